"""The grouped Triton GEMMs under Triton's interpreter against their references; compiled ones are in tests/gpu.

A process interprets kernels or compiles them, so these run in a child process, in fp32: the interpreter's bfloat16
products are wrong.
"""

# T tokens   R routed rows   D model width   F expert width   H = 2 F   E experts

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_runtime.core import env
from moe_runtime.kernels.gemm_dact import _reference as dact_reference
from moe_runtime.kernels.gemm_gather_act import _reference as gather_act_reference
from moe_runtime.kernels.grouped_gemm import _reference
from moe_runtime.kernels.swiglu import Layout
from moe_runtime.testing import nan_filled_memory

pytest.importorskip("triton", reason="triton is not installed")
from moe_runtime.kernels.gemm_dact import _triton as dact_triton
from moe_runtime.kernels.gemm_gather_act import _triton as gather_act_triton
from moe_runtime.kernels.grouped_gemm import _tiles, _triton
from moe_runtime.kernels.grouped_gemm._triton_tiles import Tile, largest_first, row_tiles

CHILD = env.get("TRITON_INTERPRET") == "1"
IN_CHILD = pytest.mark.skipif(not CHILD, reason="runs in the child of test_under_the_interpreter")
NAN = float("nan")
TILE = Tile(rows=16, columns=32, depth=16, group=3, warps=4)
WIDTH, EXPERT_WIDTH, TOKENS = 40, 24, 13
# Sums of 40 products of O(1); the worst measured is 4e-7 of the largest value.
TOLERANCE = 3e-6

COUNTS = {
    "uneven": (5, 0, 25, 11),
    "first_and_last_empty": (0, 17, 16, 0),
    "one_owner": (0, 40, 0),
    "one_row": (1,),
    "none": (0, 0),
}
TAILS = (0, 9)


@pytest.mark.skipif(CHILD, reason="this is the child")
def test_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    child = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=child, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def close(got: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().amax()) if expected.numel() else 0.0
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE * scale)


def ends_of(counts: Sequence[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


class Problem:
    """Operands for one list of counts; what stands in a tail is NaN, and an index out of bounds."""

    def __init__(self, counts: Sequence[int], tail: int) -> None:
        torch.manual_seed(sum(counts) + tail)
        self.num_rows, rows, experts = sum(counts), sum(counts) + tail, len(counts)
        self.ends_E = ends_of(counts)
        self.x_TD, self.x_RD = torch.randn(TOKENS, WIDTH), torch.randn(rows, WIDTH)
        self.index_R = torch.randint(0, TOKENS, (rows,), dtype=torch.int32)
        self.w_EHD = torch.randn(experts, 2 * EXPERT_WIDTH, WIDTH)
        self.w_EDF = torch.randn(experts, WIDTH, EXPERT_WIDTH)
        self.gate_R, self.h_RH = torch.randn(rows), torch.randn(rows, 2 * EXPERT_WIDTH)
        for rows_of in (self.x_RD, self.gate_R, self.h_RH):
            rows_of[self.num_rows :] = NAN
        self.index_R[self.num_rows :] = 2**30


@pytest.fixture(params=COUNTS.values(), ids=list(COUNTS))
def counts(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return request.param


@IN_CHILD
@pytest.mark.parametrize("tail", TAILS)
def test_products(counts: tuple[int, ...], tail: int) -> None:
    p = Problem(counts, tail)
    with nan_filled_memory():
        y_RH = _triton.ragged_m_gemm_nt(p.x_RD, p.w_EHD, p.ends_E, tile=TILE)
        dx_RD = _triton.ragged_m_gemm_nn(p.h_RH, p.w_EHD, p.ends_E, tile=TILE)
        dw_EHD = _triton.ragged_k_gemm_tn(p.h_RH, p.x_RD, p.ends_E, tile=TILE)
    close(y_RH, _reference.ragged_m_gemm_nt(p.x_RD, p.w_EHD, p.ends_E))
    close(dx_RD, _reference.ragged_m_gemm_nn(p.h_RH, p.w_EHD, p.ends_E))
    close(dw_EHD, _reference.ragged_k_gemm_tn(p.h_RH, p.x_RD, p.ends_E))
    assert not y_RH[p.num_rows :].any() and not dx_RD[p.num_rows :].any()
    assert not dw_EHD[[e for e, count in enumerate(counts) if not count]].any()


@IN_CHILD
def test_weight_gradients_are_added_to_a_buffer(counts: tuple[int, ...]) -> None:
    p = Problem(counts, 4)
    dw_EHD = _reference.ragged_k_gemm_tn(p.h_RH, p.x_RD, p.ends_E)
    into = torch.full_like(dw_EHD, NAN)
    assert _triton.ragged_k_gemm_tn(p.h_RH, p.x_RD, p.ends_E, into_EFD=into, tile=TILE) is into
    close(into, dw_EHD)
    into = torch.full_like(dw_EHD, 0.5)
    _triton.ragged_k_gemm_tn(p.h_RH, p.x_RD, p.ends_E, into_EFD=into, accumulate=True, tile=TILE)
    close(into, dw_EHD + 0.5)


@IN_CHILD
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize(("gathered", "gated"), [(False, False), (True, True)])
def test_activation_in_the_epilogue(counts: tuple[int, ...], gathered: bool, gated: bool, layout: Layout) -> None:
    p = Problem(counts, 6)
    x, index_R = (p.x_TD, p.index_R) if gathered else (p.x_RD, None)
    gate_R = p.gate_R if gated else None
    with nan_filled_memory():
        got = gather_act_triton.gemm_gather_act(x, p.w_EHD, p.ends_E, gate_R, index_R, layout, tile=TILE)
    wanted = gather_act_reference.gemm_gather_act(x, p.w_EHD, p.ends_E, gate_R, index_R, layout)
    for a, b in zip(got, wanted, strict=True):
        close(a, b)
        assert not a[p.num_rows :].any()


@IN_CHILD
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize(("gathered", "gated"), [(False, False), (True, True)])
def test_activation_gradient_in_the_epilogue(
    counts: tuple[int, ...], gathered: bool, gated: bool, layout: Layout
) -> None:
    p = Problem(counts, 6)
    dy, index_R = (p.x_TD, p.index_R) if gathered else (p.x_RD, None)
    saved = (p.h_RH, p.gate_R if gated else None, layout)
    with nan_filled_memory():
        got = dact_triton.gemm_dact(dy, p.w_EDF, saved, p.ends_E, index_R, gated, tile=TILE)
    wanted = dact_reference.gemm_dact(dy, p.w_EDF, saved, p.ends_E, index_R, gated)
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            close(a, b)
            assert not a[p.num_rows :].any()


@IN_CHILD
def test_row_tiles_cover_every_row_once(counts: tuple[int, ...]) -> None:
    for tail in TAILS:
        num_rows = sum(counts) + tail
        expert_N, start_N, stop_N = row_tiles(ends_of(counts), num_rows, 16).tolist()
        owner = {}
        for e, start, stop in zip(expert_N, start_N, stop_N, strict=True):
            for row in range(start, min(stop, start + 16)):
                assert row not in owner
                owner[row] = e
        expected = [e for e, count in enumerate([*counts, tail]) for _ in range(count)]
        assert [owner[row] for row in range(num_rows)] == expected and len(owner) == num_rows


@IN_CHILD
def test_largest_first_is_a_stable_order() -> None:
    ends_E = ends_of([3, 9, 0, 9, 1])
    assert largest_first(ends_E).tolist() == [1, 3, 0, 4, 2]


@pytest.mark.parametrize("name", ["rows", "columns", "depth", "warps"])
def test_a_tile_has_powers_of_two(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} of a tile must be a power of two, got 48"):
        Tile(**{"rows": 64, "columns": 64, name: 48})


def test_tiles_follow_the_shape_class() -> None:
    assert _tiles.ragged_m(768) != _tiles.ragged_m(7168)
    assert _tiles.ragged_k(65536, 128) != _tiles.ragged_k(65536, 8)
    assert _tiles.gather_act(2048, gathered=True) != _tiles.gather_act(2048, gathered=False)
