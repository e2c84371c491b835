"""The Triton kernels against their references: on the CPU under Triton's interpreter, and compiled on a GPU.

A process interprets kernels or compiles them, so the CPU run is this same file in a child process. The interpreter
rounds to bfloat16 toward zero; only what moves bfloat16 without rounding runs there.
"""

# T tokens   K top-k   R routed rows   E experts   D model width   F expert width   H = 2 F

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_runtime.core import env
from moe_runtime.kernels import combine, permute, swiglu
from moe_runtime.kernels.combine import _reference as combine_reference
from moe_runtime.kernels.permute import Route
from moe_runtime.kernels.permute import _reference as permute_reference
from moe_runtime.kernels.swiglu import _reference as swiglu_reference
from moe_runtime.kernels.tables import describe
from moe_runtime.kernels.tiles import row_tile
from moe_runtime.testing import nan_filled_memory, strided

pytest.importorskip("triton", reason="triton is not installed")
from moe_runtime.kernels.combine import _triton as combine_triton
from moe_runtime.kernels.grouped_gemm import _triton_tail
from moe_runtime.kernels.permute import _triton as permute_triton
from moe_runtime.kernels.swiglu import _triton as swiglu_triton

INTERPRETED = env.get("TRITON_INTERPRET") == "1"
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a CUDA device")
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]
MOVED = (torch.float32, torch.bfloat16, torch.float16)
ROUNDED = (torch.float32, torch.float16) if INTERPRETED else MOVED
INF, NAN = float("inf"), float("nan")

# Of each result's largest value; on a GPU exp is not exact and fp32 products are contracted.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}

# (tokens, top_k, experts): nothing, one of everything, one tile of the sort, just over one, several, more experts than
# slots
SIZES = [(0, 2, 3), (4, 0, 3), (1, 1, 1), (64, 4, 5), (257, 1, 2), (300, 3, 9), (9, 7, 1024)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def random_ids(num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    """Ids of which some are negative and some too large: both drop their slot on a GPU."""
    generator = torch.Generator().manual_seed(num_tokens + top_k)
    return torch.randint(-2, num_experts + 2, (num_tokens, top_k), generator=generator)


def expected_route(ids_TK: Tensor, num_experts: int) -> Route:
    return permute_reference.route(ids_TK.cpu().masked_fill(ids_TK.cpu() >= num_experts, -1), num_experts)


def assert_same_route(actual: Route, expected: Route) -> None:
    for name, a, b in zip(Route._fields, actual, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert torch.equal(a.cpu(), b), name


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """The same bits but for which NaN, on any device."""
    assert actual.dtype == expected.dtype and actual.is_contiguous()
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest finite value."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    scale = float(expected.float().nan_to_num(0, 0, 0).abs().amax()) if expected.numel() else 0.0
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=0, atol=tolerance * scale, equal_nan=True)


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
def test_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", __file__]
    child = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=child, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("width", [1, 7, 8, 9, 1023, 1024, 1025, 14336])
def test_row_tile(width: int) -> None:
    for elements in (1, 1024, 4096):
        rows, columns = row_tile(width, elements)
        assert rows & (rows - 1) == columns & (columns - 1) == 0
        assert min(width, 1024) <= columns < max(2 * width, 16)
        assert rows == 1 or rows * columns == elements


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), SIZES)
def test_route(device: str, num_tokens: int, top_k: int, num_experts: int, dtype: torch.dtype) -> None:
    ids_TK = random_ids(num_tokens, top_k, num_experts).to(dtype)
    with nan_filled_memory():
        routed = permute_triton.route(ids_TK.to(device), num_experts)
    assert_same_route(routed, expected_route(ids_TK, num_experts))


@pytest.mark.parametrize("expert", [-1, 0, 4])
def test_route_to_one_owner(device: str, expert: int) -> None:
    ids_TK = torch.full((150, 2), expert)
    assert_same_route(permute_triton.route(ids_TK.to(device), 5), expected_route(ids_TK, 5))


def test_route_strided_and_huge_ids(device: str) -> None:
    ids_TK = random_ids(6, 4, 3)
    ids_TK[0, 0], ids_TK[1, 2] = 2**40, -(2**40)  # as int32 both would be expert 0
    for view in (ids_TK, ids_TK.t(), ids_TK[::2, 1::2], ids_TK[:1].expand(5, 4)):
        assert_same_route(permute_triton.route(view.to(device), 3), expected_route(view, 3))
    on_device = ids_TK.to(device)
    assert_same_route(permute_triton.route(on_device.t(), 3), expected_route(ids_TK.t(), 3))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("width", [0, 1, 7, 64, 1030])
@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(0, 2, 3), (1, 1, 1), (13, 3, 5)])
def test_gather_rows(
    device: str, num_tokens: int, top_k: int, num_experts: int, width: int, dtype: torch.dtype
) -> None:
    slot_R, _, ends_E = expected_route(random_ids(num_tokens, top_k, num_experts), num_experts)
    x_TD = torch.randn(num_tokens, width).to(dtype)
    with nan_filled_memory():
        y_RD = permute_triton.gather_rows(x_TD.to(device), slot_R.to(device), ends_E.to(device), top_k)
    assert_same(y_RD, permute_reference.gather_rows(x_TD, slot_R, ends_E, top_k))


def test_gather_rows_past_the_end_are_zero_whatever_x_holds(device: str) -> None:
    slot_R, _, ends_E = expected_route(torch.tensor([[0, -1], [-1, -1], [1, 0]]), 2)
    x_TD = torch.full((3, 5), NAN, device=device)
    slot_R[3:] = 2**30  # no slot: must not be read
    y_RD = permute_triton.gather_rows(x_TD, slot_R.to(device), ends_E.to(device), 2)
    assert y_RD[:3].isnan().all()
    assert_same(y_RD[3:], torch.zeros(3, 5))


def test_gather_rows_strided(device: str) -> None:
    routed = expected_route(random_ids(6, 2, 3), 3)
    slot_R, ends_E = (torch.stack((t, t + 100), dim=1).to(device)[:, 0] for t in (routed.slot_R, routed.ends_E))
    base = torch.randn(24, 24, device=device)
    odd = torch.randn(6 * 5 + 1, device=device).to(torch.bfloat16)[1:].view(6, 5)
    for x_TD in (base[:6, ::4], base[:, :6].t()[:, :7], base[:1, :9].expand(6, 9), base[:6, :1].expand(6, 8), odd):
        y_RD = permute_triton.gather_rows(x_TD, slot_R, ends_E, 2)
        assert_same(y_RD, permute_reference.gather_rows(x_TD.cpu(), routed.slot_R, routed.ends_E, 2))


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
@pytest.mark.parametrize("width", [0, 1, 7, 64, 1030])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 2), (4, 0), (1, 1), (13, 3), (5, 9)])
def test_gather_sum(device: str, num_tokens: int, top_k: int, width: int, dtype: torch.dtype) -> None:
    row_TK = expected_route(random_ids(num_tokens, top_k, 4), 4).row_TK
    y_RD = (torch.randn(num_tokens * top_k, width) * 10.0 ** torch.randint(-3, 3, (width,))).to(dtype)
    expected = combine_reference.gather_sum(y_RD, row_TK)
    named_R = torch.zeros(len(y_RD), dtype=torch.bool)
    named_R[row_TK[row_TK >= 0].long()] = True
    y_RD[~named_R] = NAN  # nobody's: must not be read
    with nan_filled_memory():
        out_TD = combine_triton.gather_sum(y_RD.to(device), row_TK.to(device))
    assert_same(out_TD, expected)


def test_gather_sum_of_nothing_is_positive_zero(device: str) -> None:
    y_RD = torch.full((2, 5), -0.0, device=device)
    row_TK = torch.tensor([[-1, -1], [0, -1], [1, 0]], dtype=torch.int32, device=device)
    for rows in (y_RD, y_RD[:0]):
        out_TD = combine_triton.gather_sum(rows, row_TK if len(rows) else row_TK.clamp(max=-1))
        assert torch.equal(out_TD.cpu().view(torch.int32), torch.zeros(3, 5, dtype=torch.int32))


def test_gather_sum_strided(device: str) -> None:
    base = torch.randn(24, 24, device=device)
    row_TK = expected_route(random_ids(6, 2, 4), 4).row_TK
    for y_RD in (base[:12, ::3], base[:, :12].t()[:, :7], base[:1, :9].expand(12, 9), base[:12, :1].expand(12, 8)):
        out_TD = combine_triton.gather_sum(y_RD, row_TK.t().contiguous().to(device).t())
        assert_same(out_TD, combine_reference.gather_sum(y_RD.cpu(), row_TK))


SWIGLU_SIZES = [(0, 4), (3, 0), (1, 1), (5, 7), (3, 255), (9, 256), (2, 1100)]


def operands(num_rows: int, width: int, gated: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """da, h and a gate; some gates are exactly 0 or negative."""
    generator = torch.Generator().manual_seed(num_rows + width)
    h_RH = (torch.randn(num_rows, 2 * width, generator=generator) * 4).to(dtype)
    da_RF = torch.randn(num_rows, width, generator=generator).to(dtype)
    gate_R = torch.randn(num_rows, generator=generator).masked_fill_(torch.arange(num_rows) % 4 == 3, 0.0)
    return da_RF, h_RH, None if gated == "none" else gate_R.to(torch.float32 if gated == "fp32" else dtype)


def on(device: str, value: Tensor | None) -> Tensor | None:
    return None if value is None else value.to(device)


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("gated", ["none", "fp32", "own"])
@pytest.mark.parametrize(("num_rows", "width"), SWIGLU_SIZES)
def test_swiglu(device: str, num_rows: int, width: int, gated: str, interleaved: bool, dtype: torch.dtype) -> None:
    da_RF, h_RH, gate_R = operands(num_rows, width, gated, dtype)
    with nan_filled_memory():
        a_RF = swiglu_triton.swiglu(h_RH.to(device), on(device, gate_R), interleaved)
        dh_RH, dgate_R = swiglu_triton.swiglu_backward(
            da_RF.to(device), h_RH.to(device), on(device, gate_R), interleaved
        )
    assert_near(a_RF, swiglu_reference.swiglu(h_RH, gate_R, interleaved), TOLERANCE[dtype])
    expected_RH, expected_R = swiglu_reference.swiglu_backward(da_RF, h_RH, gate_R, interleaved)
    assert_near(dh_RH, expected_RH, TOLERANCE[dtype])
    assert (dgate_R is None) == (expected_R is None) == (gate_R is None)
    if dgate_R is not None and expected_R is not None:
        assert_near(dgate_R, expected_R, TOLERANCE[torch.float32])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # from numpy, in the interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("interleaved", [False, True])
def test_swiglu_extremes_stay_in_their_row(device: str, interleaved: bool) -> None:
    g_RF = torch.tensor([[0.5], [-INF], [INF], [NAN], [-100.0], [100.0], [-0.0], [0.5]]).repeat(1, 9)
    u_RF = torch.full_like(g_RF, 2.0)
    h_RH = torch.stack((g_RF, u_RF), 2).flatten(1) if interleaved else torch.cat((g_RF, u_RF), 1)
    gate_R, da_RF = torch.full((8,), 0.5), torch.ones_like(g_RF)
    a_RF = swiglu_triton.swiglu(h_RH.to(device), gate_R.to(device), interleaved)
    assert_near(a_RF, swiglu_reference.swiglu(h_RH, gate_R, interleaved), TOLERANCE[torch.float32])
    actual = swiglu_triton.swiglu_backward(da_RF.to(device), h_RH.to(device), gate_R.to(device), interleaved)
    expected = swiglu_reference.swiglu_backward(da_RF, h_RH, gate_R, interleaved)
    for a, b in zip(actual, expected, strict=True):
        assert a is not None and b is not None
        assert_near(a, b, TOLERANCE[torch.float32])
    assert a_RF[[0, 4, 5, 6, 7]].isfinite().all() and a_RF[[1, 3]].isnan().all()


def test_swiglu_strided(device: str) -> None:
    da_RF, h_RH, gate_R = operands(5, 6, "fp32", torch.float32)
    assert gate_R is not None
    views = [strided(value.to(device)) for value in (da_RF, h_RH, gate_R)]
    assert_near(swiglu_triton.swiglu(*views[1:], False), swiglu_reference.swiglu(h_RH, gate_R, False), 2e-6)
    actual = swiglu_triton.swiglu_backward(*views, True)
    for a, b in zip(actual, swiglu_reference.swiglu_backward(da_RF, h_RH, gate_R, True), strict=True):
        assert a is not None and b is not None
        assert_near(a, b, 2e-6)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("width", [0, 1, 7, 1030])
@pytest.mark.parametrize("ends", [[0], [3, 3], [0, 19], [0, 0, 20]])
def test_zero_tail(
    device: str, ends: list[int], width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton_tail, "_MAX_PROGRAMS", 4)  # fewer than rows: each program takes several
    y_RF = torch.randn(20, width).to(dtype)
    y_RF[ends[-1] :] = NAN
    y_RF[: ends[-1] : 2] = NAN  # an expert's own NaN is not the tail's to mend
    expected = y_RF.clone()
    expected[ends[-1] :] = 0
    on_device = y_RF.to(device)
    assert _triton_tail.zero_tail(on_device, torch.tensor(ends, dtype=torch.int32, device=device)) is on_device
    assert_same(on_device, expected)


def test_zero_tail_writes_only_its_rows_and_columns(device: str) -> None:
    whole = torch.full((6, 16), 7.0, device=device)
    ends_E = torch.tensor([[1, 9], [2, 9]], dtype=torch.int32, device=device)[:, 0]
    _triton_tail.zero_tail(whole[:5, 3:10], ends_E)
    expected = torch.full((6, 16), 7.0)
    expected[2:5, 3:10] = 0
    assert_same(whole, expected)
    with pytest.raises(ValueError, match=r"columns one element apart, got strides \(1, 16\)"):
        _triton_tail.zero_tail(whole.t(), ends_E)


def chain(ids_TK: Tensor, x_TD: Tensor, gate_R: Tensor) -> list[Tensor]:
    """Every op through its public function, on the backend that the table chooses."""
    routed = permute.route(ids_TK, 7)
    y_RD = permute.gather_rows(x_TD, routed.slot_R, routed.ends_E, top_k=ids_TK.shape[1])
    a_RF = swiglu.swiglu(y_RD, gate_R, layout="interleaved")
    dh_RH, dgate_R = swiglu.swiglu_backward(a_RF, y_RD, gate_R, layout="interleaved")
    assert dgate_R is not None
    return [*routed, y_RD, combine.gather_sum(y_RD, routed.row_TK), a_RF, dh_RH, dgate_R]


def chain_inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    ids_TK = torch.randint(-1, 7, (301, 3), device="cuda", generator=generator)
    x_TD = torch.randn(301, 2050, device="cuda", generator=generator).to(torch.bfloat16)
    return ids_TK, x_TD, torch.rand(903, device="cuda", generator=generator)


def assert_all_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(actual, expected, strict=True)] == [True] * len(expected)


@pytest.mark.gpu
@NEEDS_GPU
def test_the_tables_choose_triton_on_a_gpu() -> None:
    chosen = {selection.op: selection.chosen for selection in describe(torch.device("cuda"))}
    assert {chosen[op] for op in ("route", "gather_rows", "gather_sum", "swiglu")} == {"triton"}


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_no_op_waits_for_the_gpu() -> None:
    inputs = chain_inputs()
    expected = chain(*inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = chain(*inputs)
        _triton_tail.zero_tail(actual[3], actual[2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_all_equal(actual, expected)


@pytest.mark.gpu
@NEEDS_GPU
def test_the_bits_repeat_beside_other_work() -> None:
    inputs = chain_inputs()
    expected = chain(*inputs)
    stream = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda")
    for _ in range(5):
        with torch.cuda.stream(stream):
            noise = noise @ noise
        assert_all_equal(chain(*inputs), expected)


@pytest.mark.gpu
@NEEDS_GPU
def test_a_captured_graph_follows_new_ids() -> None:
    inputs = chain_inputs(1)
    chain(*inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(*inputs)
    for seed in (2, 3):
        fresh = chain_inputs(seed)
        for static, value in zip(inputs, fresh, strict=True):
            static.copy_(value)
        graph.replay()
        assert_all_equal(captured, chain(*fresh))


@pytest.mark.gpu
@NEEDS_GPU
def test_every_op_traces_in_one_graph() -> None:
    inputs = chain_inputs()
    compiled: Callable[..., list[Tensor]] = torch.compile(chain, backend="aot_eager", fullgraph=True)
    assert_all_equal(compiled(*inputs), chain(*inputs))


@pytest.mark.gpu
@NEEDS_GPU
def test_rows_past_2_to_the_31_elements() -> None:
    rows, width = 2**20 + 5, 2048  # 4.3 GB of bfloat16
    big = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    big[-4:] = torch.randn(4, width, device="cuda")
    last = torch.arange(rows - 4, rows, dtype=torch.int32, device="cuda")
    assert torch.equal(permute_triton.gather_rows(big, last, last.new_tensor([4]), 1), big[-4:])
    assert torch.equal(combine_triton.gather_sum(big, last[:, None]), big[-4:])
    a_RF = swiglu_triton.swiglu(big, None, False)
    assert torch.equal(a_RF[-4:], swiglu_triton.swiglu(big[-4:].clone(), None, False))
    dh_RH, _ = swiglu_triton.swiglu_backward(a_RF, big, None, False)
    assert torch.equal(dh_RH[-4:], swiglu_triton.swiglu_backward(a_RF[-4:], big[-4:], None, False)[0])
    slot_R = torch.zeros(rows, dtype=torch.int32, device="cuda")
    y_RD = permute_triton.gather_rows(big[-1:], slot_R, slot_R.new_tensor([rows - 1]), 1)
    assert torch.equal(y_RD[-2], big[-1]) and not y_RD[-1].any()
    _triton_tail.zero_tail(big, slot_R.new_tensor([rows - 2]))
    assert big[-4:-2].any(1).all() and not big[-2:].any()
