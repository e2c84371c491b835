"""Products with weights dequantized on the way: the bits of dequantizing first; the Triton kernel in a child process.

A process interprets kernels or compiles them, so the CPU run of the kernel is this same file in a child process, in
fp32: the interpreter's bfloat16 products are wrong.
"""

# R routed rows   D in features   F out features   E experts

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_runtime.core import env
from moe_runtime.core.errors import UnsupportedError
from moe_runtime.formats import MXFP4, MXFP8, NVFP4, Float8, Format, FP8Block, Quantized
from moe_runtime.formats.format import Direction
from moe_runtime.kernels import gemm_dequant as op
from moe_runtime.kernels.dequantize import dequantize
from moe_runtime.kernels.gemm_dequant import _reference, _whole, gemm_dequant_nn, gemm_dequant_nt
from moe_runtime.kernels.grouped_gemm import ragged_m_gemm_nn, ragged_m_gemm_nt
from moe_runtime.kernels.quantize import quantize
from moe_runtime.testing import nan_filled_memory

CHILD = env.get("TRITON_INTERPRET") == "1"
IN_CHILD = pytest.mark.skipif(not CHILD, reason="runs in the child of test_under_the_interpreter")
IN_PARENT = pytest.mark.skipif(CHILD, reason="ran in the parent")
FORMATS: list[Format] = [
    MXFP8(),
    MXFP8(element="e5m2"),
    MXFP4(),
    FP8Block(),
    FP8Block(two_dimensional=True, power_of_two=False),
    Float8(),
    NVFP4(),
    NVFP4(two_dimensional=True),
]
COUNTS = {
    "uneven": (5, 0, 25),
    "first_and_last_empty": (0, 17, 0),
    "one_owner": (0, 0, 40),
    "none": (0, 0, 0),
}
TAIL = 3
# Sums of up to 256 products of O(1), of the largest value; the worst measured is 5e-7.
TOLERANCE = 3e-6


def sizes_of(fmt: Format) -> tuple[int, int]:
    """(F, D), neither a whole number of the small tile's columns where the format lets them be."""
    block = 1 if fmt.block is None else fmt.block.cols
    return {1: (40, 24), 16: (48, 80), 32: (96, 160), 128: (128, 256)}[block]


def ends_of(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def stored(fmt: Format, direction: Direction = "rowwise", dtype: torch.dtype = torch.float32) -> Quantized:
    out, width = sizes_of(fmt)
    w_EFD = torch.randn(3, out, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    rowwise = direction == "rowwise"
    row, column = quantize(w_EFD, fmt, rowwise=rowwise, columnwise=not rowwise)
    record = row if rowwise else column
    assert record is not None
    return record


def rows(counts: tuple[int, ...], width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(counts))
    x = torch.randn(sum(counts) + TAIL, width, generator=generator).to(dtype)
    x[sum(counts) :] = float("nan")
    return x


@pytest.fixture(params=COUNTS.values(), ids=list(COUNTS))
def counts(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return request.param


@IN_PARENT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_same_bits_as_dequantizing_first(
    fmt: Format, direction: Direction, dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    if direction == "columnwise" and not fmt.columnwise_allowed:
        pytest.skip(f"{fmt.name} has no columnwise direction")
    w, ends_E = stored(fmt, direction, dtype), ends_of(counts)
    values = dequantize(w, dtype)
    x_RD, dy_RF = rows(counts, w.shape[2], dtype), rows(counts, w.shape[1], dtype)
    with nan_filled_memory():
        got = gemm_dequant_nt(x_RD, w, ends_E), gemm_dequant_nn(dy_RF, w, ends_E)
    wanted = ragged_m_gemm_nt(x_RD, values, ends_E), ragged_m_gemm_nn(dy_RF, values, ends_E)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == dtype and torch.equal(a, b)
        assert not a[sum(counts) :].any()
    whole = _whole.gemm_dequant_nt(x_RD, w, ends_E), _whole.gemm_dequant_nn(dy_RF, w, ends_E)
    assert all(torch.equal(a, b) for a, b in zip(whole, wanted, strict=True))


@IN_PARENT
@pytest.mark.parametrize("product", ["gemm_dequant_nt", "gemm_dequant_nn"])
def test_never_holds_more_values_than_one_expert_has(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = stored(MXFP8())
    made: list[int] = []

    def recorded(q: Quantized, dtype: torch.dtype) -> Tensor:
        values = dequantize(q, dtype)
        made.append(values.numel())
        return values

    monkeypatch.setattr(_reference, "dequantize", recorded)
    x = rows((5, 0, 25), w.shape[2 if product.endswith("nt") else 1])
    getattr(op, product)(x, w, ends_of((5, 0, 25)))
    assert made == [w.shape[1] * w.shape[2]] * 2  # and none of an expert without rows


@IN_PARENT
def test_members_of_a_wider_record_are_read_where_they_are() -> None:
    w = stored(NVFP4())
    apart = torch.zeros(3, w.payload.shape[1] * 2, w.payload.shape[2], dtype=torch.uint8)
    apart[:, : w.payload.shape[1]] = w.payload
    spread = Quantized(
        payload=apart[:, : w.payload.shape[1]], scale=w.scale, tensor_scale=w.tensor_scale, format=w.format
    )
    x_RD, ends_E = rows((5, 0, 25), w.shape[2]), ends_of((5, 0, 25))
    assert torch.equal(gemm_dequant_nt(x_RD, spread, ends_E), gemm_dequant_nt(x_RD, w, ends_E))


@IN_PARENT
def test_what_is_refused() -> None:
    w, ends_E = stored(MXFP8()), ends_of((5, 0, 25))
    with pytest.raises(ValueError, match=r"expected rows \(R, 160\) .*, got \(33, 96\) and \(3, 96, 160\)"):
        gemm_dequant_nt(rows((5, 0, 25), 96), w, ends_E)
    with pytest.raises(ValueError, match=r"expected rows \(R, 96\) .*, got \(33, 160\) and \(3, 96, 160\)"):
        gemm_dequant_nn(rows((5, 0, 25), 160), w, ends_E)
    with pytest.raises(ValueError, match="ends must not decrease and must stay within 33 rows"):
        gemm_dequant_nt(rows((5, 0, 25), 160), w, ends_of((5, 0, 40)))
    with pytest.raises(ValueError, match=r"expected a quantized stack \(E, F, D\), got mxfp8 of shape \(96, 160\)"):
        gemm_dequant_nt(rows((5, 0, 25), 160), w.member(0), ends_E)
    for name in ("whole", "triton"):
        with pytest.raises(UnsupportedError, match=f"{name}: runs on cuda tensors, got cpu"):
            gemm_dequant_nt(rows((5, 0, 25), 160), w, ends_E, backend=name)


@IN_PARENT
def test_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    child = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=child, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def triton_kernels() -> Any:
    pytest.importorskip("triton", reason="triton is not installed")
    from moe_runtime.kernels.gemm_dequant import _triton

    return _triton


@IN_CHILD
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_the_kernel_multiplies_what_the_reference_does(fmt: Format, counts: tuple[int, ...]) -> None:
    from moe_runtime.kernels.grouped_gemm._triton_tiles import Tile

    tile = Tile(rows=16, columns=32, depth=16, group=3, warps=4)
    kernels, w, ends_E = triton_kernels(), stored(fmt), ends_of(counts)
    for name, width in (("gemm_dequant_nt", w.shape[2]), ("gemm_dequant_nn", w.shape[1])):
        x = rows(counts, width)
        with nan_filled_memory():
            got = getattr(kernels, name)(x, w, ends_E, tile=tile)
        close(got, getattr(_reference, name)(x, w, ends_E))
        assert not got[sum(counts) :].any()


@IN_CHILD
def test_the_kernel_refuses_columnwise_records() -> None:
    w = stored(MXFP8(), "columnwise")
    with pytest.raises(UnsupportedError, match="reads rowwise records, got a columnwise one"):
        triton_kernels().gemm_dequant_nt(rows((5, 0, 25), 160), w, ends_of((5, 0, 25)))


def close(got: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().amax()) if expected.numel() else 0.0
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE * scale)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or CHILD, reason="needs a CUDA device")
@pytest.mark.parametrize("product", [gemm_dequant_nt, gemm_dequant_nn], ids=["nt", "nn"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_on_a_gpu(fmt: Format, product: Callable[..., Tensor], counts: tuple[int, ...]) -> None:
    """Against fp32 sums of the same bfloat16 values, of the norm; and no memory of the weight's size."""
    out, width = 512, 768
    w_EFD = torch.randn(3, out, width, device="cuda", dtype=torch.bfloat16)
    w, _ = quantize(w_EFD, fmt, rowwise=True)
    assert w is not None
    many = tuple(40 * count for count in counts)
    x = rows(many, width if product is gemm_dequant_nt else out, torch.bfloat16).cuda()
    ends_E = ends_of(many).cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = product(x, w, ends_E, backend="triton")
    allowed = got.numel() * 2 + 16384
    assert torch.cuda.max_memory_allocated() - before <= allowed < w_EFD.numel() * 2
    float32 = {gemm_dequant_nt: ragged_m_gemm_nt, gemm_dequant_nn: ragged_m_gemm_nn}[product]
    exact = float32(x.float(), dequantize(w, torch.bfloat16).float(), ends_E, backend="reference")
    assert float((got - exact).norm()) <= 4e-3 * float(exact.norm())
    assert not got[sum(many) :].any()
