"""Capacity: what is kept by each policy, padded rows, values and gradients against plain indexing, sizes past 2^31."""

# T tokens   K top-k   D model width   C capacity   R padded rows (= E * C)   E experts

import math

import pytest
import torch
from torch import Tensor

from moe_runtime.ep import Capacity, LocalDispatcher
from moe_runtime.ep.capacity import DropPolicy, PaddedRoute, drop_over_capacity, pad_to_capacity, route_within
from moe_runtime.ep.rows import gather, gather_gates, sum_rows
from moe_runtime.kernels.permute import element_offset, route
from moe_runtime.nn.balance import expert_counts
from moe_runtime.testing import nan_filled_memory

NAN = float("nan")
POLICIES: tuple[DropPolicy, ...] = ("position", "probability")
EXPERTS = 4
# ids and the bound on an expert's rows
IDS: dict[str, tuple[list[list[int]], int]] = {
    "one owner": ([[2, -1]] * 5, 3),
    "spread": ([[0, 1], [1, 2], [2, 0], [1, 3], [1, 0], [2, 1]], 2),
    "same expert twice": ([[1, 1], [1, 1]], 3),
    "already dropped": ([[-1, 1], [1, -1], [-1, -1], [1, 3]], 1),
    "nothing over": ([[0, 1], [2, 3]], 4),
    "no room": ([[0, 1], [2, 3]], 0),
    "room and no tokens": ([], 2),
    "neither room nor tokens": ([], 0),
}


def case(name: str) -> tuple[Tensor, Tensor, int]:
    ids, limit = IDS[name]
    ids_TK = torch.tensor(ids, dtype=torch.int64).reshape(-1, 2)
    gates_TK = torch.rand(ids_TK.shape, generator=torch.Generator().manual_seed(len(ids)))
    return ids_TK, gates_TK, limit


def kept_by_hand(ids_TK: Tensor, gates_TK: Tensor, limit: int, policy: DropPolicy) -> list[list[int]]:
    """Each expert's slots in order of preference; the first `limit` stay."""
    ids, gates = ids_TK.flatten().tolist(), gates_TK.flatten().tolist()
    kept = [-1] * len(ids)
    for e in range(EXPERTS):
        slots = [s for s, i in enumerate(ids) if i == e]
        if policy == "probability":
            slots.sort(key=lambda s: (-gates[s], s))
        for s in slots[:limit]:
            kept[s] = e
    return torch.tensor(kept, dtype=torch.int64).view(ids_TK.shape).tolist()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", IDS)
def test_what_is_dropped(name: str, policy: DropPolicy) -> None:
    ids_TK, gates_TK, limit = case(name)
    poisoned_TK = torch.where(ids_TK < 0, NAN, gates_TK)  # a dropped slot's gate decides nothing
    kept_TK = drop_over_capacity(ids_TK, poisoned_TK, EXPERTS, limit=limit, policy=policy)
    assert kept_TK.tolist() == kept_by_hand(ids_TK, gates_TK, limit, policy)
    assert int(expert_counts(kept_TK, EXPERTS).max()) <= limit


def test_equal_weights_keep_the_earlier_token() -> None:
    ids_TK, gates_TK = torch.zeros(6, 1, dtype=torch.int64), torch.tensor([[0.5], [0.25], [0.5], [0.5], [0.75], [0.5]])
    kept_TK = drop_over_capacity(ids_TK, gates_TK, 1, limit=3, policy="probability")
    assert kept_TK[:, 0].tolist() == [0, -1, 0, -1, 0, -1]


def test_equal_weights_of_many_tokens_keep_the_earliest() -> None:
    """More than any sort handles in one piece."""
    ids_TK = torch.zeros(3000, 1, dtype=torch.int64)
    kept_TK = drop_over_capacity(ids_TK, torch.full((3000, 1), 0.5), 1, limit=7, policy="probability")
    assert kept_TK[:, 0].tolist() == [0] * 7 + [-1] * 2993


def test_padding_drops_what_has_no_room() -> None:
    padded = pad_to_capacity(torch.tensor([[0], [0], [1], [0]]), 2, 2)
    assert [t.tolist() for t in padded] == [[0, 1, 2, -1], [[0], [1], [2], [-1]], [2, 4]]


def test_five_tokens_on_one_expert() -> None:
    """Factor 1 and a minimum of 4 on 5 tokens and 4 experts: 4 kept, the last dropped, 5 counted before that."""
    capacity, ids_TK = Capacity(factor=1.0, minimum=4, drop="position"), torch.zeros(5, 1, dtype=torch.int64)
    assert capacity.rows(5, 1, EXPERTS) == 4
    kept_TK = drop_over_capacity(ids_TK, torch.ones(5, 1), EXPERTS, limit=4, policy="position")
    assert kept_TK[:, 0].tolist() == [0, 0, 0, 0, -1]
    assert expert_counts(ids_TK, EXPERTS).tolist() == [5, 0, 0, 0]
    assert route_within(ids_TK, torch.ones(5, 1), EXPERTS, capacity).ends_E.tolist() == [4, 4, 4, 4]


def test_a_minimum_above_the_tokens_pads_and_keeps_them_all() -> None:
    """4 tokens and a minimum of 8: the 4 are kept, the width stays 8."""
    capacity, ids_TK = Capacity(factor=1.0, minimum=8, pad=True), torch.zeros(4, 1, dtype=torch.int64)
    padded = route_within(ids_TK, torch.ones(4, 1), 2, capacity)
    assert isinstance(padded, PaddedRoute)
    assert padded.ends_E.tolist() == [8, 16] and padded.row_TK[:, 0].tolist() == [0, 1, 2, 3]
    assert padded.slot_R.tolist() == [0, 1, 2, 3] + [-1] * 12


@pytest.mark.parametrize(
    ("tokens", "top_k", "factor", "expected"),
    [(10, 4, 1.1, 11), (5, 1, 1.0, 2), (0, 2, 1.0, 0), (8, 2, 0.5, 2), (7, 3, 1.25, 7), (1, 1, 1e-6, 1)],
)
def test_capacity_is_exact(tokens: int, top_k: int, factor: float, expected: int) -> None:
    """1.1 * 10 rows an expert are 11; in floats 1.1 * 40 / 4 may come out above."""
    assert Capacity(factor=factor).rows(tokens, top_k, EXPERTS) == expected
    assert Capacity(factor=factor, minimum=9).rows(tokens, top_k, EXPERTS) == max(expected, 9)


def test_the_example_of_a_padded_route() -> None:
    padded = pad_to_capacity(torch.tensor([[1], [1]]), 2, 3)
    assert [t.tolist() for t in padded] == [[-1, -1, -1, 0, 1, -1], [[3], [4]], [3, 6]]
    assert {t.dtype for t in padded} == {torch.int32}


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", IDS)
def test_padded_rows_values_and_gradients(
    name: str, policy: DropPolicy, dtype: torch.dtype, ids_dtype: torch.dtype
) -> None:
    ids_TK, gates_TK, limit = case(name)
    kept_TK = drop_over_capacity(ids_TK.to(ids_dtype), gates_TK, EXPERTS, limit=limit, policy=policy)
    padded = pad_to_capacity(kept_TK, EXPERTS, limit)
    num_rows, tokens = EXPERTS * limit, len(ids_TK)
    slots = [[s for s, i in enumerate(kept_TK.flatten().tolist()) if i == e] for e in range(EXPERTS)]
    slot_of = {e * limit + r: s for e in range(EXPERTS) for r, s in enumerate(slots[e])}
    assert padded.slot_R.tolist() == [slot_of.get(r, -1) for r in range(num_rows)]
    assert padded.ends_E.tolist() == [limit * (e + 1) for e in range(EXPERTS)]

    x_TD = torch.randn(tokens, 5).to(dtype).requires_grad_()
    gates_TK = torch.where(kept_TK < 0, NAN, gates_TK).requires_grad_()
    with nan_filled_memory():
        x_RD, gate_R = gather(x_TD, padded), gather_gates(gates_TK, padded)
    assert x_RD.shape == (num_rows, 5) and x_RD.dtype == dtype
    for r in range(num_rows):
        s = slot_of.get(r)
        assert torch.equal(x_RD[r], torch.zeros(5, dtype=dtype) if s is None else x_TD[s // 2])
        assert gate_R[r].item() == (0.0 if s is None else gates_TK.flatten()[s].item())
    dx_RD, dgate_R = torch.randn(num_rows, 5).to(dtype), torch.randn(num_rows)
    dx_RD[[r for r in range(num_rows) if r not in slot_of]] = NAN  # nobody's gradient
    with nan_filled_memory():
        dx_TD, dgate_TK = torch.autograd.grad((x_RD, gate_R), (x_TD, gates_TK), (dx_RD, dgate_R))
        y_RD = dx_RD.clone().requires_grad_()
        out_TD = sum_rows(y_RD, padded)
        (dy_RD,) = torch.autograd.grad(out_TD, y_RD, x_TD.detach())
    expected_TD, expected_S = torch.zeros(tokens, 5, dtype=torch.float64), torch.zeros(2 * tokens)
    for r, s in slot_of.items():
        expected_TD[s // 2] += dx_RD[r].double()
        expected_S[s] = dgate_R[r]
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float64: 1e-6}[dtype]
    for got_TD in (dx_TD, out_TD.detach()):
        torch.testing.assert_close(got_TD.double(), expected_TD, rtol=tolerance, atol=tolerance)
    assert torch.equal(dgate_TK.flatten(), expected_S)
    assert torch.equal(dy_RD, x_RD.detach())


@pytest.mark.parametrize("pad", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_come_back(policy: DropPolicy, pad: bool) -> None:
    """Dispatch and combine of ones as weights: each token times the number of its slots that were kept."""
    ids_TK, gates_TK, _ = case("spread")
    dispatcher = LocalDispatcher(num_experts=EXPERTS, capacity=Capacity(factor=2 / 3, drop=policy, pad=pad))
    x_TD = torch.randn(6, 5)
    rows = dispatcher.wait(dispatcher.start(x_TD, ids_TK, gates_TK))
    kept_TK = torch.tensor(kept_by_hand(ids_TK, gates_TK, 2, policy))
    assert rows.x_RD.shape[0] == (8 if pad else 12)
    torch.testing.assert_close(dispatcher.combine(rows.x_RD, rows.plan), x_TD * (kept_TK >= 0).sum(1, keepdim=True))


def test_element_offsets_past_int32() -> None:
    """Row 299,594 of width 7168 starts at 2,147,489,792; in int32 that is -2,147,477,504."""
    for dtype in (torch.int32, torch.int64):
        row, column = torch.tensor([299_593, 299_593, 299_594], dtype=dtype), torch.tensor([1023, 1024, 0], dtype=dtype)
        offset = element_offset(row, column, width=7168)
        assert offset.tolist() == [2**31 - 1, 2**31, 2_147_489_792] and offset.dtype == torch.int64
    assert 37_449 * 8 * 7168 <= 2**31 < 37_450 * 8 * 7168, "the number of tokens at which rows x 8 pass the limit"


def test_dropped_ids_are_no_rows() -> None:
    """ids [[0, -1], [1, 0]]: counts [2, 1], and the dropped slot adds nothing."""
    ids_TK = torch.tensor([[0, -1], [1, 0]])
    for capacity in (None, Capacity(factor=4.0), Capacity(factor=4.0, pad=True)):
        dispatcher = LocalDispatcher(num_experts=2, capacity=capacity)
        rows = dispatcher.wait(dispatcher.start(torch.tensor([[1.0], [10.0]]), ids_TK, torch.ones(2, 2)))
        assert dispatcher.combine(rows.x_RD, rows.plan).tolist() == [[1.0], [20.0]]
    assert route(ids_TK, 2).ends_E.tolist() == [2, 3]


def test_sizes_past_int32_are_refused_before_anything_is_allocated() -> None:
    with pytest.raises(ValueError, match=r"expected fewer than 2\^31 ids, got 2147483648"):
        route(torch.zeros(1, 1, dtype=torch.int32).expand(2**30, 2), 4)
    with pytest.raises(ValueError, match=r"below 2\^31 rows, got 65536 x 32768"):
        pad_to_capacity(torch.zeros(1, 1, dtype=torch.int64), 65536, 32768)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 0.0}, "factor of the capacity must be finite and above 0, got 0.0"),
        ({"factor": math.inf}, "factor of the capacity must be finite and above 0, got inf"),
        ({"factor": NAN}, "factor of the capacity must be finite and above 0, got nan"),
        ({"factor": 1.0, "minimum": -1}, "minimum of the capacity must be at least 0, got -1"),
        ({"factor": 1.0, "drop": "random"}, "drop must be one of 'position', 'probability'; got 'random'"),
    ],
)
def test_refusals(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Capacity(**options)
