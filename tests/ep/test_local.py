"""The dispatcher of one process: rows, gates and sums against plain indexing, and their gradients."""

# T tokens   D model width   K top-k   R routed rows (= T * K)   E experts

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_runtime.ep import Dispatched, LocalDispatcher
from moe_runtime.ep.rows import gather, gather_gates, sum_rows
from moe_runtime.kernels.permute import route
from moe_runtime.testing import nan_filled_memory, strided

NAN = float("nan")
EXPERTS = 4
IDS: dict[str, list[list[int]]] = {
    "spread": [[0, 3], [2, 1], [3, 0]],
    "one owner": [[2, 2], [2, 2]],
    "first and last empty": [[1, 2], [2, 1], [1, 1]],
    "dropped": [[-1, 3], [0, -1], [-1, -1], [1, 3]],
    "all dropped": [[-1, -1], [-1, -1]],
    "one choice": [[3], [-1], [0]],
    "no tokens": [],
}


def ids_of(name: str) -> Tensor:
    return torch.tensor(IDS[name], dtype=torch.int64).reshape(-1, len(IDS[name][0]) if IDS[name] else 2)


def order_of(ids_TK: Tensor) -> list[int]:
    """Slots t * K + k that were not dropped, sorted by expert, in slot order inside one."""
    slots = [(e, s) for s, e in enumerate(ids_TK.flatten().tolist()) if e >= 0]
    return [s for _, s in sorted(slots)]


def dispatched(x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Dispatched:
    dispatcher = LocalDispatcher(num_experts=EXPERTS)
    return dispatcher.wait(dispatcher.start(x_TD, ids_TK, gates_TK))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", IDS)
def test_dispatch(name: str, dtype: torch.dtype) -> None:
    ids_TK = ids_of(name)
    num_rows, top_k, order = ids_TK.numel(), ids_TK.shape[1], order_of(ids_TK)
    x_TD, gates_TK = torch.randn(len(ids_TK), 6).to(dtype), torch.rand(ids_TK.shape)
    x_TD.requires_grad_()
    poisoned_TK = torch.where(ids_TK < 0, NAN, gates_TK).requires_grad_()
    with nan_filled_memory():
        rows = dispatched(x_TD, ids_TK, poisoned_TK)
    assert rows.x_RD.shape == (num_rows, 6) and rows.x_RD.dtype == dtype
    assert rows.gate_R.shape == (num_rows,) and rows.gate_R.dtype == torch.float32
    assert torch.equal(rows.x_RD[: len(order)], x_TD[[s // top_k for s in order]])
    assert torch.equal(rows.gate_R[: len(order)], gates_TK.flatten()[order])
    for tail in (rows.x_RD[len(order) :], rows.gate_R[len(order) :]):
        assert torch.equal(tail, torch.zeros_like(tail))
    counts = [int((ids_TK == e).sum()) for e in range(EXPERTS)]
    assert rows.plan.ends_E.tolist() == torch.tensor(counts).cumsum(0).tolist()
    assert rows.plan.ends_E.dtype == torch.int32 and rows.plan.received is None

    dx_RD, dgate_R = torch.randn(num_rows, 6).to(dtype), torch.randn(num_rows)
    with nan_filled_memory():
        dx_TD, dgate_TK = torch.autograd.grad((rows.x_RD, rows.gate_R), (x_TD, poisoned_TK), (dx_RD, dgate_R))
    expected_TD, expected_S = torch.zeros(len(ids_TK), 6, dtype=torch.float64), torch.zeros(num_rows)
    for r, s in enumerate(order):
        expected_TD[s // top_k] += dx_RD[r].double()
        expected_S[s] = dgate_R[r]
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float64: 1e-6}[dtype]
    torch.testing.assert_close(dx_TD.double(), expected_TD, rtol=tolerance, atol=tolerance)
    assert torch.equal(dgate_TK.flatten(), expected_S)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", IDS)
def test_combine(name: str, dtype: torch.dtype) -> None:
    ids_TK = ids_of(name)
    num_rows, top_k, order = ids_TK.numel(), ids_TK.shape[1], order_of(ids_TK)
    plan = dispatched(torch.zeros(len(ids_TK), 6), ids_TK, torch.zeros(ids_TK.shape)).plan
    y_RD = torch.randn(num_rows, 6).to(dtype)
    y_RD[len(order) :] = NAN  # rows of dropped slots are nobody's
    y_RD.requires_grad_()
    with nan_filled_memory():
        out_TD = LocalDispatcher(num_experts=EXPERTS).combine(y_RD, plan)
        dout_TD = torch.randn(len(ids_TK), 6).to(dtype)
        (dy_RD,) = torch.autograd.grad(out_TD, y_RD, dout_TD)
    expected_TD = torch.zeros(len(ids_TK), 6, dtype=torch.float64)
    for r, s in enumerate(order):
        expected_TD[s // top_k] += y_RD[r].detach().double()
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float64: 1e-6}[dtype]
    torch.testing.assert_close(out_TD.double(), expected_TD, rtol=tolerance, atol=tolerance)
    assert out_TD.dtype == dtype
    assert torch.equal(dy_RD[: len(order)], dout_TD[[s // top_k for s in order]])
    assert torch.equal(dy_RD[len(order) :], torch.zeros_like(dy_RD[len(order) :]))


def test_tokens_come_back_summed_over_their_choices() -> None:
    ids_TK = torch.tensor([[3, 0, 1], [2, 1, 0], [1, 3, 2]])
    x_TD = torch.randn(3, 5)
    rows = dispatched(x_TD, ids_TK, torch.ones(3, 3))
    back_TD = LocalDispatcher(num_experts=EXPERTS).combine(rows.x_RD, rows.plan)
    torch.testing.assert_close(back_TD, 3 * x_TD)


def test_bfloat16_choices_are_summed_in_fp32_and_rounded_once() -> None:
    plan = route(torch.tensor([[0, 1, 2]]), 3)
    y_RD = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert sum_rows(y_RD, plan).item() == 258.0
    x_TD = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    gather(x_TD, plan).backward(y_RD)
    assert x_TD.grad is not None and x_TD.grad.item() == 258.0


def test_each_way_is_the_gradient_of_the_other() -> None:
    """<gather(x), y> = <x, sum_rows(y)> for random x and y."""
    plan = route(torch.randint(-1, EXPERTS, (9, 3), generator=torch.Generator().manual_seed(0)), EXPERTS)
    x_TD, y_RD = torch.randn(9, 5, dtype=torch.float64), torch.randn(27, 5, dtype=torch.float64)
    left, right = (gather(x_TD, plan) * y_RD).sum(), (x_TD * sum_rows(y_RD, plan)).sum()
    assert left.item() == pytest.approx(right.item(), rel=1e-6)


def test_strided_inputs_and_gradients_of_sums() -> None:
    ids_TK = torch.tensor([[0, 3], [-1, 1], [2, 2]])
    x_TD, gates_TK = torch.randn(3, 8), torch.rand(3, 2)
    results = []
    for x, gates, ids in (
        (x_TD, gates_TK, ids_TK),
        (strided(x_TD), strided(gates_TK), ids_TK.t().contiguous().t()),
        (x_TD, gates_TK, ids_TK.int()),
    ):
        x, gates = x.detach().requires_grad_(), gates.detach().requires_grad_()
        rows = dispatched(x, ids, gates)
        out_TD = LocalDispatcher(num_experts=EXPERTS).combine(rows.x_RD, rows.plan)
        (out_TD.sum() + rows.gate_R.sum()).backward()
        results.append([rows.x_RD, rows.gate_R, out_TD, x.grad, gates.grad])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_gates_keep_their_dtype(dtype: torch.dtype) -> None:
    plan = route(torch.tensor([[1, 0]]), 2)
    gates_TK = torch.tensor([[0.25, 0.75]], dtype=dtype, requires_grad=True)
    gate_R = gather_gates(gates_TK, plan)
    assert gate_R.dtype == dtype and gate_R.tolist() == [0.75, 0.25]
    gate_R.backward(torch.tensor([3.0, 5.0], dtype=dtype))
    assert gates_TK.grad is not None and gates_TK.grad.dtype == dtype and gates_TK.grad.tolist() == [[5.0, 3.0]]


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "gather": lambda x: gather(x, route(torch.tensor([[0, 1], [1, -1]]), 2)),
    "sum_rows": lambda x: sum_rows(x, route(torch.tensor([[0], [1]]), 2)),
    "gather_gates": lambda x: gather_gates(x, route(torch.tensor([[0, 1, -1], [1, -1, 0]]), 2)),
}


@pytest.mark.parametrize("way", WAYS)
def test_second_derivative_is_right_or_refused(way: str) -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    try:
        (first,) = torch.autograd.grad(WAYS[way](x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    except RuntimeError:
        return
    count = torch.autograd.grad(WAYS[way](x).sum(), x)[0]  # rows that each element went to
    torch.testing.assert_close(second, 6 * x.detach() * count)


def test_ids_out_of_range() -> None:
    with pytest.raises(
        ValueError, match=rf"ids must lie in \[-1, num_experts={EXPERTS}\), got 4 for token 0, choice 1"
    ):
        dispatched(torch.zeros(1, 2), torch.tensor([[0, 4]]), torch.zeros(1, 2))


def test_a_plan_is_frozen_and_the_dispatcher_keeps_nothing() -> None:
    dispatcher = LocalDispatcher(num_experts=EXPERTS)
    plan = dispatcher.start(torch.zeros(1, 2), torch.tensor([[0]]), torch.zeros(1, 1)).plan
    with pytest.raises(AttributeError):
        plan.received = plan.local
    assert dispatcher == LocalDispatcher(num_experts=EXPERTS)
