"""The three grouped products of each backend against float64, with poisoned memory, tails and strides."""

# R routed rows   D in features   F out features   E local experts

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_runtime.core.errors import UnsupportedError
from moe_runtime.kernels.grouped_gemm import TABLE, ragged_k_gemm_tn, ragged_m_gemm_nn, ragged_m_gemm_nt
from moe_runtime.kernels.select import Problem
from moe_runtime.testing import RAGGED, assert_close_per_expert, nan_filled_memory, strided, with_nan_tail

# Against float64: the worst measured is 1.7e-7, 2.1e-3 and 2.7e-4.
TOLERANCE = {torch.float32: 5e-7, torch.bfloat16: 6e-3, torch.float16: 8e-4}
BACKENDS = ("torch", "reference")
OPS = ("nt", "nn", "tn")
TAIL = 3


def ends_of(splits: Sequence[int]) -> Tensor:
    return torch.tensor(splits).cumsum(0).to(torch.int32)


def run(op: str, rows: Tensor, other: Tensor, ends_E: Tensor, backend: str | None) -> Tensor:
    """`other` is the weights (E, F, D) for nt and nn, and x (R, D) for tn."""
    functions: dict[str, Callable[..., Tensor]] = {
        "nt": ragged_m_gemm_nt,
        "nn": ragged_m_gemm_nn,
        "tn": ragged_k_gemm_tn,
    }
    return functions[op](rows, other, ends_E, backend=backend)


def exact(op: str, rows: Tensor, other: Tensor, splits: Sequence[int]) -> Tensor:
    """float64, expert by expert."""
    parts = rows.double().split([*splits, len(rows) - sum(splits)])[: len(splits)]
    if op == "tn":
        others = other.double().split([*splits, len(other) - sum(splits)])
        return torch.stack([part.T @ x for part, x in zip(parts, others, strict=False)])
    weights = other.double()
    return torch.cat([part @ (weights[e].T if op == "nt" else weights[e]) for e, part in enumerate(parts)])


def operands(op: str, splits: Sequence[int], width: int, out: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width + sum(splits))
    rows = torch.randn(sum(splits), width if op == "nt" else out, generator=generator)
    shape = (sum(splits), width) if op == "tn" else (len(splits), out, width)
    return rows.to(dtype), torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("splits", RAGGED.values(), ids=RAGGED)
def test_values(splits: tuple[int, ...], op: str, dtype: torch.dtype, backend: str) -> None:
    rows, other = operands(op, splits, 32, 48, dtype)
    poisoned = with_nan_tail(other, TAIL) if op == "tn" else other
    with nan_filled_memory():
        got = run(op, with_nan_tail(rows, TAIL), poisoned, ends_of(splits), backend)
    assert got.dtype == dtype and got.is_contiguous()
    expected = exact(op, rows, other, splits)
    if op != "tn":
        assert torch.equal(got[len(rows) :], torch.zeros_like(got[len(rows) :]))
        got = got[: len(rows)]
    ends_E = None if op == "tn" else ends_of(splits)
    worst = assert_close_per_expert(got, expected, TOLERANCE[dtype], ends=ends_E, name=op)
    print(f"measured {dtype} {backend} {worst:.2e}")


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("width", "out"), [(33, 48), (32, 50), (1, 1), (33, 7)])
def test_sizes_that_fill_no_whole_16_bytes(
    width: int, out: int, op: str, dtype: torch.dtype, backend: str | None
) -> None:
    splits = (5, 0, 9)
    rows, other = operands(op, splits, width, out, dtype)
    with nan_filled_memory():
        got = run(op, rows, other, ends_of(splits), backend)
    expected = exact(op, rows, other, splits)
    bound = 0.004 * expected.abs().max().item() if dtype != torch.float32 else 1e-5
    torch.testing.assert_close(got.double(), expected, rtol=0.008 if dtype != torch.float32 else 1e-5, atol=bound)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("splits", RAGGED.values(), ids=RAGGED)
def test_backends_agree_bit_by_bit(splits: tuple[int, ...], op: str, dtype: torch.dtype) -> None:
    rows, other = operands(op, splits, 32, 48, dtype)
    first, second = (run(op, rows, other, ends_of(splits), backend) for backend in BACKENDS)
    assert torch.equal(first, second)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_strides_and_addresses_do_not_matter(op: str, backend: str) -> None:
    splits = (4, 0, 3)
    rows, other = operands(op, splits, 16, 24, torch.bfloat16)
    expected = run(op, rows, other, ends_of(splits), backend)
    odd = torch.cat([rows.new_zeros(1), rows.flatten()])[1:].view_as(rows)
    turned = other.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert odd.data_ptr() % 16 and not turned.is_contiguous()
    for a, b in ((strided(rows), other), (odd, other), (rows, turned), (rows, strided(other))):
        assert torch.equal(run(op, a, b, ends_of(splits), backend), expected)
    ones = rows[:1, :1].expand_as(rows)  # stride 0 along both dims, as the gradient of a sum has
    assert torch.equal(
        run(op, ones, other, ends_of(splits), backend), run(op, ones.contiguous(), other, ends_of(splits), backend)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", ["no rows", "no rows, strided", "one row", "one expert"])
def test_strides_of_empty_and_single_dims_do_not_matter(shape: str, op: str, dtype: torch.dtype, backend: str) -> None:
    """Such a tensor counts as contiguous whatever its strides are: a gradient of `y.sum()` without rows has (0, 0)."""
    splits = {"one row": (0, 1), "one expert": (3,)}.get(shape, (0, 0))
    rows, other = operands(op, splits, 8, 8, dtype)
    if shape == "no rows":
        odd, odd_other = rows.new_zeros(1, 1).expand(0, 8), other
    elif shape == "no rows, strided":
        odd, odd_other = rows.new_zeros(8, 3)[:, :0].t(), other
    elif shape == "one row":
        odd, odd_other = torch.cat([rows, rows.new_ones(1, 3)], dim=1)[:, :8], other
    else:
        odd, odd_other = rows, other
        if op != "tn":
            odd_other = torch.cat([other.flatten(), other.new_ones(3)]).as_strided((1, 8, 8), (67, 8, 1))
    assert odd.shape == rows.shape and torch.equal(odd, rows)
    got = run(op, odd, odd_other, ends_of(splits), backend)
    assert torch.equal(got, run(op, rows, other, ends_of(splits), "reference"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_overwrites_poisoned_memory_of_an_empty_expert(backend: str) -> None:
    """splits [2, 0, 1], x [[1, 2], [3, 4], [5, 6]], dy [1, 1, 2]: dw = [[4, 6], [0, 0], [10, 12]]."""
    x_RD, dy_RF = torch.zeros(3, 8), torch.zeros(3, 8)  # whole 16 bytes
    x_RD[:, :2] = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    dy_RF[:, 0] = torch.tensor([1.0, 1.0, 2.0])
    with nan_filled_memory():
        dw_EFD = ragged_k_gemm_tn(dy_RF, x_RD, ends_of([2, 0, 1]), backend=backend)
    assert dw_EFD[:, 0, :2].tolist() == [[4.0, 6.0], [0.0, 0.0], [10.0, 12.0]]
    assert dw_EFD.count_nonzero() == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_and_no_experts(backend: str) -> None:
    none, w_EFD, ends_E = torch.zeros(0, 8), torch.ones(3, 4, 8), ends_of([0, 0, 0])
    assert ragged_m_gemm_nt(none, w_EFD, ends_E, backend=backend).shape == (0, 4)
    assert ragged_m_gemm_nn(torch.zeros(0, 4), w_EFD, ends_E, backend=backend).shape == (0, 8)
    dw_EFD = ragged_k_gemm_tn(torch.zeros(0, 4), none, ends_E, backend=backend)
    assert torch.equal(dw_EFD, torch.zeros(3, 4, 8))
    nobody, empty_E = torch.ones(0, 4, 8), torch.zeros(0, dtype=torch.int32)
    assert torch.equal(ragged_m_gemm_nt(torch.ones(2, 8), nobody, empty_E, backend="reference"), torch.zeros(2, 4))


def test_bfloat16_is_accumulated_in_float32() -> None:
    """256 + 1 + 1 is 258; added in bfloat16 it stays 256."""
    x_RD = torch.zeros(1, 8, dtype=torch.bfloat16)
    x_RD[0, :3] = torch.tensor([256.0, 1.0, 1.0])
    w_EFD = torch.ones(1, 8, 8, dtype=torch.bfloat16)
    for backend in BACKENDS:
        results = [ragged_m_gemm_nt(x_RD, w_EFD, ends_of([1]), backend=backend) for _ in range(100)]
        assert all((y == 258.0).all() for y in results)


def test_operands_are_left_alone() -> None:
    rows, other = operands("nt", (3, 2), 16, 16, torch.float32)
    kept = rows.clone(), other.clone()
    for backend in BACKENDS:
        run("nt", rows, other, ends_of((2, 1)), backend)
        run("nn", rows, other, ends_of((2, 1)), backend)
        run("tn", rows, rows, ends_of((2, 1)), backend)
    assert torch.equal(rows, kept[0]) and torch.equal(other, kept[1])


def test_what_torch_refuses_runs_on_the_reference_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    x_RD, w_EFD = torch.ones(2, 37, dtype=torch.bfloat16), torch.ones(1, 8, 37, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"torch: rows must be whole multiples of 16 bytes, got 37 columns"):
        ragged_m_gemm_nt(x_RD, w_EFD, ends_of([2]), backend="torch")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert (ragged_m_gemm_nt(x_RD, w_EFD, ends_of([2])) == 37).all()
    said = [record.message for record in caplog.records if "37 columns" in record.message]
    assert len(said) == 1 and "grouped_gemm runs on backend reference" in said[0]


def test_float64_is_refused_by_torch_with_the_dtype() -> None:
    x_RD, w_EFD = torch.ones(2, 8, dtype=torch.float64), torch.ones(1, 8, 8, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match=r"float32, bfloat16 or float16, got torch\.float64"):
        ragged_m_gemm_nt(x_RD, w_EFD, ends_of([2]), backend="torch")
    assert (ragged_m_gemm_nt(x_RD, w_EFD, ends_of([2])) == 8).all()


def test_an_unknown_backend_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of .*torch.*, reference for grouped_gemm; got 'cublas'"):
        ragged_m_gemm_nt(torch.ones(2, 8), torch.ones(1, 8, 8), ends_of([2]), backend="cublas")


def test_aligned_operands_go_to_torch() -> None:
    x = torch.ones(2, 8)
    assert TABLE.choose(Problem((x, x))).__name__.endswith("_torch")


ROWS, WEIGHTS = torch.ones(4, 8), torch.ones(2, 6, 8)


@pytest.mark.parametrize(
    ("op", "rows", "other", "message"),
    [
        (
            "nt",
            torch.ones(4, 7),
            WEIGHTS,
            r"expected rows \(R, 8\) and weights \(E, out, in\), got \(4, 7\) and \(2, 6, 8\)",
        ),
        (
            "nn",
            torch.ones(4, 8),
            WEIGHTS,
            r"expected rows \(R, 6\) and weights \(E, out, in\), got \(4, 8\) and \(2, 6, 8\)",
        ),
        ("nt", torch.ones(8), WEIGHTS, r"expected rows \(R, 8\) .*, got \(8,\)"),
        ("nt", ROWS, torch.ones(6, 8), r"expected rows \(R, \?\) .*, got \(4, 8\) and \(6, 8\)"),
        ("nt", ROWS.bfloat16(), WEIGHTS, r"one dtype, got torch\.bfloat16 and torch\.float32"),
        ("tn", ROWS, torch.ones(3, 8), r"of one dtype, got \(4, 8\) torch\.float32 and \(3, 8\) torch\.float32"),
        ("tn", ROWS, ROWS.bfloat16(), r"of one dtype, got \(4, 8\) torch\.float32 and \(4, 8\) torch\.bfloat16"),
        ("tn", ROWS, WEIGHTS, r"dy \(R, F\) and x \(R, D\) of one dtype, got \(4, 8\) torch\.float32 and \(2, 6, 8\)"),
    ],
)
def test_operands_that_do_not_fit(op: str, rows: Tensor, other: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(op, rows, other, torch.tensor([1, 4], dtype=torch.int32), None)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([5, 5], r"ends must not decrease and must stay within 4 rows, got \[5, 5\]"),
        ([3, 2], r"ends must not decrease and must stay within 4 rows, got \[3, 2\]"),
        ([-1, 2], r"ends must not decrease and must stay within 4 rows, got \[-1, 2\]"),
    ],
    ids=["past the rows", "decreasing", "negative"],
)
@pytest.mark.parametrize("op", OPS)
def test_ends_that_do_not_fit(op: str, ends: list[int], message: str) -> None:
    other: Any = ROWS if op == "tn" else WEIGHTS
    rows = torch.ones(4, 6) if op == "nn" else ROWS
    with pytest.raises(ValueError, match=message):
        run(op, rows, other, torch.tensor(ends, dtype=torch.int32), None)


def test_ends_of_another_shape_or_dtype() -> None:
    with pytest.raises(ValueError, match=r"int32 of shape \(2,\) on cpu, .*; got torch\.int32 of shape \(3,\) on cpu"):
        ragged_m_gemm_nt(ROWS, WEIGHTS, torch.tensor([1, 4, 4], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"ends must be int32 .*; got torch\.int64 of shape \(2,\)"):
        ragged_m_gemm_nt(ROWS, WEIGHTS, torch.tensor([1, 4]))
    with pytest.raises(ValueError, match=r"ends must be int32 .*; got torch\.float32"):
        ragged_k_gemm_tn(ROWS, ROWS, torch.tensor([1.0, 4.0]))
    with pytest.raises(ValueError, match=r"ends must be int32 of shape \(0,\).*; got torch\.int32 of shape \(\)"):
        ragged_k_gemm_tn(ROWS, ROWS, torch.tensor(4, dtype=torch.int32))
