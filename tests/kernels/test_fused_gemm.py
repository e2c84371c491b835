"""gemm_gather_act, gemm_dact, and weight gradients by index or into a buffer, on the CPU; what each refuses.

The kernels themselves: test_grouped_triton.py under the interpreter, tests/gpu/test_grouped_kernels.py.
"""

# T tokens   R routed rows   D model width   F expert width   H = 2 F   E experts

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_runtime.core.errors import UnsupportedError
from moe_runtime.kernels import gemm_dact as dact
from moe_runtime.kernels import gemm_gather_act as gather_act
from moe_runtime.kernels.gemm_dact import Preactivation, gemm_dact
from moe_runtime.kernels.gemm_gather_act import gemm_gather_act
from moe_runtime.kernels.grouped_gemm import _cuda_engine, _hopper, ragged_k_gemm_tn
from moe_runtime.kernels.select import Problem, Table
from moe_runtime.kernels.swiglu import Layout, swiglu, swiglu_backward

ENDS_E = torch.tensor([4, 4, 9], dtype=torch.int32)
ROWS, TAIL, TOKENS, WIDTH, EXPERT_WIDTH = 9, 2, 5, 16, 8
NAN = float("nan")


def operands() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    gate_R = normal(ROWS + TAIL)
    gate_R[ROWS:] = NAN
    index_R = torch.randint(0, TOKENS, (ROWS + TAIL,), generator=generator, dtype=torch.int32)
    return {
        "x_TD": normal(TOKENS, WIDTH),
        "index_R": index_R,
        "gate_R": gate_R,
        "w_EHD": normal(3, 2 * EXPERT_WIDTH, WIDTH),
        "w_EDF": normal(3, WIDTH, EXPERT_WIDTH),
    }


def each(function: Callable[[int, slice], Tensor], columns: int) -> Tensor:
    """function(e, rows of e), and zeros below."""
    out = torch.zeros(ROWS + TAIL, columns, dtype=torch.float64)
    for e, (start, stop) in enumerate(((0, 4), (4, 4), (4, 9))):
        out[start:stop] = function(e, slice(start, stop))
    return out


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("gated", [False, True])
def test_both_ops_match_their_equations(gated: bool, layout: Layout) -> None:
    p = operands()
    gate_R = p["gate_R"] if gated else None
    weight_R = p["gate_R"].double().nan_to_num() if gated else torch.ones(ROWS + TAIL, dtype=torch.float64)
    rows = p["x_TD"].double()[p["index_R"].long()]
    h_RH, a_RF = gemm_gather_act(p["x_TD"], p["w_EHD"], ENDS_E, gate_R, row_index_R=p["index_R"], layout=layout)
    h = each(lambda e, part: rows[part] @ p["w_EHD"][e].double().T, 2 * EXPERT_WIDTH)
    torch.testing.assert_close(h_RH.double(), h, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a_RF.double(), swiglu(h, weight_R, layout=layout), rtol=1e-5, atol=1e-5)
    got = gemm_dact(p["x_TD"], p["w_EDF"], Preactivation(h_RH, gate_R, layout), ENDS_E, row_index_R=p["index_R"])
    da = each(lambda e, part: rows[part] @ p["w_EDF"][e].double(), EXPERT_WIDTH)
    dh, dgate = swiglu_backward(da, h_RH.double(), weight_R, layout=layout)
    torch.testing.assert_close(got.dh_RH.double(), dh, rtol=1e-5, atol=1e-5)
    assert got.a_RF is not None and torch.equal(got.a_RF, a_RF)
    assert (got.dgate_R is None) == (gate_R is None)
    if got.dgate_R is not None and dgate is not None:
        torch.testing.assert_close(got.dgate_R.double(), dgate.double(), rtol=1e-4, atol=1e-4)
    without = gemm_dact(
        p["x_TD"],
        p["w_EDF"],
        Preactivation(h_RH, gate_R, layout),
        ENDS_E,
        row_index_R=p["index_R"],
        activations=False,
    )
    assert without.a_RF is None and torch.equal(without.dh_RH, got.dh_RH)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_weight_gradients_of_rows_by_index_into_a_buffer(backend: str) -> None:
    p = operands()
    dh_RH = torch.randn(ROWS + TAIL, 2 * EXPERT_WIDTH)
    dh_RH[ROWS:] = NAN
    rows = p["x_TD"][p["index_R"].long()]
    plain = ragged_k_gemm_tn(dh_RH, rows, ENDS_E, backend=backend)
    by_index = ragged_k_gemm_tn(dh_RH, p["x_TD"], ENDS_E, x_index_R=p["index_R"], backend=backend)
    assert torch.equal(plain, by_index)
    turned = ragged_k_gemm_tn(p["x_TD"], dh_RH, ENDS_E, dy_index_R=p["index_R"], backend=backend)
    torch.testing.assert_close(turned, plain.transpose(1, 2))
    into = torch.full_like(plain, NAN)
    assert ragged_k_gemm_tn(dh_RH, rows, ENDS_E, into_EFD=into, backend=backend) is into
    assert torch.equal(into, plain)
    ragged_k_gemm_tn(dh_RH, rows, ENDS_E, into_EFD=into, accumulate=True, backend=backend)
    assert torch.equal(into, plain + plain) and not into[1].any()


def refused(message: str, call: Callable[[], object], error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_what_is_refused() -> None:
    p = operands()
    x, w, index = p["x_TD"], p["w_EHD"], p["index_R"]
    refused("row_index must be int32 of shape (R,)", lambda: gemm_gather_act(x, w, ENDS_E, row_index_R=index.long()))
    refused(
        "gate must have shape (11,), one weight a row; got (3,)",
        lambda: gemm_gather_act(x, w, ENDS_E, torch.ones(3), row_index_R=index),
    )
    refused(
        "gate must be float32 or h's dtype torch.float32, got torch.float64",
        lambda: gemm_gather_act(x, w, ENDS_E, torch.ones(11).double(), row_index_R=index),
        TypeError,
    )
    refused(
        "w must have shape (E, 2F, D), got (3, 15, 16)",
        lambda: gemm_gather_act(x, w[:, :15], ENDS_E, row_index_R=index),
    )
    layout: Layout = "rows"  # pyright: ignore[reportAssignmentType]
    refused(
        'layout must be "concatenated" or "interleaved"',
        lambda: gemm_gather_act(x, w, ENDS_E, row_index_R=index, layout=layout),
    )
    h_RH = torch.zeros(11, 2 * EXPERT_WIDTH)
    refused(
        "h must be torch.float32 of shape (11, 16), got torch.float32 (10, 16)",
        lambda: gemm_dact(x, p["w_EDF"], Preactivation(h_RH[:10]), ENDS_E, row_index_R=index),
    )
    x = torch.ones(ROWS, 16)
    refused("accumulate needs a tensor to add to", lambda: ragged_k_gemm_tn(x, x, ENDS_E, accumulate=True))
    refused(
        "into must be contiguous, float32 or torch.float32, of shape (3, 16, 16)",
        lambda: ragged_k_gemm_tn(x, x, ENDS_E, into_EFD=torch.zeros(3, 16, 8)),
    )
    refused("row_index must be int32", lambda: ragged_k_gemm_tn(x, x, ENDS_E, x_index_R=torch.zeros(ROWS)))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_kernels_of_the_gpu_refuse_the_cpu_by_name(backend: str) -> None:
    p = operands()
    with pytest.raises(UnsupportedError, match=f"{backend}: runs on cuda tensors, got cpu"):
        gemm_gather_act(p["x_TD"], p["w_EHD"], ENDS_E, row_index_R=p["index_R"], backend=backend)
    with pytest.raises(UnsupportedError, match=f"{backend}: runs on cuda tensors, got cpu"):
        ragged_k_gemm_tn(torch.ones(9, 8), torch.ones(9, 8), ENDS_E, backend=backend)


def test_tables_name_the_fastest_first() -> None:
    assert [backend.name for backend in gather_act.TABLE.backends] == ["cuda", "triton", "reference"]
    assert [backend.name for backend in dact.TABLE.backends] == ["cuda", "triton", "reference"]


@pytest.mark.parametrize("table", [gather_act.TABLE, dact.TABLE], ids=lambda table: table.op)
def test_the_cuda_kernels_leave_interleaved_halves_to_triton(table: Table) -> None:
    operand = torch.empty(16, 16, dtype=torch.bfloat16)
    cuda, triton, _ = table.backends
    assert cuda.refuses(Problem((operand, operand), "interleaved")) == "takes concatenated halves, got interleaved ones"
    assert "halves" not in (triton.refuses(Problem((operand, operand), "interleaved")) or "")


@pytest.mark.parametrize(
    ("rows", "shape", "loses"),
    [
        ((16384, 4096), (8, 28672, 4096), True),  # mixtral: 2048 rows for 235 MB
        ((65536, 2880), (32, 5760, 2880), True),  # gpt-oss: 2048 rows for 33 MB
        ((65536, 7168), (8, 4096, 7168), False),  # dsv3 over 32 ranks: 8192 rows for 59 MB
        ((65536, 2048), (128, 1536, 2048), False),  # qwen3: 512 rows for 6 MB
        ((0, 16), (0, 16, 16), False),
    ],
)
def test_large_weights_with_few_rows_are_left_to_torch(
    rows: tuple[int, ...], shape: tuple[int, ...], loses: bool
) -> None:
    meta = torch.device("meta")
    problem = Problem(
        (torch.empty(rows, dtype=torch.bfloat16, device=meta), torch.empty(shape, dtype=torch.bfloat16, device=meta))
    )
    reason = _hopper.loses_to_torch(problem)
    assert (reason is not None) is loses
    if reason is not None:
        assert reason.startswith("slower than grouped_mm for under 4096 rows an expert and")


def test_each_variant_of_the_source_is_complete() -> None:
    """Both files are there, and stand for every combination that the launchers ask for."""
    source = _cuda_engine.source()
    for macro in ("MODE", "B_MN", "GATHER", "OUT_F32", "ACCUMULATE", "STAGES"):
        assert macro in source
    assert "wgmma.mma_async" in source and "@WGMMA@" not in source
    given = _cuda_engine.Variant(mode=_cuda_engine.Mode.WGRAD, b_mn=True, gather=_cuda_engine.Gather.B).options()
    assert given[:3] == ["-DMODE=3", "-DB_MN=1", "-DGATHER=2"]


def test_a_map_of_rows_of_one_expert_wraps_around() -> None:
    """(2^30 - count + row, start + count, 2^30) names row start + row: the offsets cancel modulo 2^64."""
    row_bytes, start, count, row = 4096, 70_000, 300, 17
    strides = (row_bytes, row_bytes, _cuda_engine.RAGGED_SPAN_BYTES - row_bytes)
    place = (2**30 - count + row, start + count, 2**30)
    total = sum(stride * at for stride, at in zip(strides, place, strict=True))
    assert total % 2**64 == (start + row) * row_bytes
