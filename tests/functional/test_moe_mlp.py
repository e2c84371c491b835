"""The experts as one function against a loop in float64, and bit for bit against the ops it replaces."""

# T tokens   K top-k   R routed rows   D model width   F expert width   H = 2 F   E experts

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_runtime.ep.rows import gather_gates
from moe_runtime.functional import HeldWeight, Layout, TokenRows, activate, grouped_linear, moe_mlp
from moe_runtime.kernels.permute import Route, route
from moe_runtime.testing import nan_filled_memory

EXPERTS, TOKENS, TOP_K, WIDTH, EXPERT_WIDTH = 6, 21, 2, 32, 16
NAMES = ("y", "dx", "dgates", "dgate_up", "ddown")
# Of the norm, against float64: the worst measured is 1.2e-6 and 8e-3.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}


def ids_of(name: str) -> Tensor:
    ids_TK = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :TOP_K]
    if name == "one_owner":
        return torch.full_like(ids_TK, 4)
    if name == "first_and_last_empty":
        return 1 + ids_TK % (EXPERTS - 2)
    if name == "dropped":
        return ids_TK.masked_fill(torch.arange(TOKENS)[:, None] % 3 == 0, -1)
    return torch.full_like(ids_TK, -1) if name == "none" else ids_TK


ROUTINGS = ("mixed", "one_owner", "first_and_last_empty", "dropped", "none")


def leaves_of(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """x, gates, gate_up, down."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((TOKENS, WIDTH), (EXPERTS, 2 * EXPERT_WIDTH, WIDTH), (EXPERTS, WIDTH, EXPERT_WIDTH))
    x, up, down = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    gates = torch.rand(TOKENS, TOP_K, generator=generator)
    return [leaf.requires_grad_() for leaf in (x, gates, up / WIDTH**0.5, down / EXPERT_WIDTH**0.5)]


def tokens_of(routed: Route) -> TokenRows:
    return TokenRows((routed.slot_R // TOP_K).to(torch.int32), routed.row_TK)


def layer(leaves: list[Tensor], ids_TK: Tensor, layout: Layout = "concatenated") -> Tensor:
    x, gates, up, down = leaves
    routed = route(ids_TK, EXPERTS)
    gate_R = gather_gates(gates, routed)
    weights = HeldWeight(up), HeldWeight(down)
    return moe_mlp(x, gate_R, routed.ends_E, *weights, tokens=tokens_of(routed), layout=layout)


def loop(leaves: list[Tensor], ids_TK: Tensor, layout: Layout) -> Tensor:
    """Token by token."""
    x, gates, up, down = leaves
    rows = []
    for t, choices in enumerate(ids_TK.tolist()):
        total = 0 * x[t] + 0 * up.sum() + 0 * down.sum() + 0 * gates[t].sum()
        for k, e in enumerate(choices):
            if e >= 0:
                h = up[e] @ x[t]
                g, u = h.chunk(2) if layout == "concatenated" else (h[0::2], h[1::2])
                total = total + gates[t, k] * (down[e] @ (torch.nn.functional.silu(g) * u))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
def test_values_and_gradients_match_a_loop(name: str, dtype: torch.dtype, layout: Layout) -> None:
    leaves, ids_TK = leaves_of(dtype), ids_of(name)
    dy = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(9)).to(dtype)
    with nan_filled_memory():
        y = layer(leaves, ids_TK, layout)
        got = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y = loop(exact, ids_TK, layout)
    wanted = [y.detach(), *torch.autograd.grad(y, exact, dy.double())]
    for what, a, b in zip(NAMES, got, wanted, strict=True):
        assert float((a - b).norm()) <= TOLERANCE[dtype] * float(b.norm()), what


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_of_an_exchange_get_the_bits_of_the_ops_one_by_one(dtype: torch.dtype) -> None:
    _, gates, up, down = leaves_of(dtype)
    routed = route(ids_of("dropped"), EXPERTS)
    num_rows = int(routed.ends_E[-1])
    rows = torch.randn(TOKENS * TOP_K, WIDTH).to(dtype)
    rows[num_rows:] = float("nan")
    gate_R = gates.detach().reshape(-1)[: len(rows)].clone()
    results = []
    for run in (
        lambda x, gate: moe_mlp(x, gate, routed.ends_E, HeldWeight(up), HeldWeight(down)),
        lambda x, gate: grouped_linear(
            activate(grouped_linear(x, up, routed.ends_E), gate, activation="swiglu", layout="concatenated"),
            down,
            routed.ends_E,
        ),
    ):
        x, gate = rows.clone().requires_grad_(), gate_R.clone().requires_grad_()
        y = run(x, gate)
        results.append([y.detach(), *torch.autograd.grad(y, (x, gate, up, down), torch.ones_like(y))])
    for what, a, b in zip(NAMES, *results, strict=True):
        assert torch.equal(a, b), what


def test_without_a_gate_rows_weigh_one() -> None:
    _, _, up, down = leaves_of(torch.float32)
    ends_E = torch.tensor([3, 3, 9, 9, 12, 12], dtype=torch.int32)
    x = torch.randn(12, WIDTH, requires_grad=True)
    weights = HeldWeight(up), HeldWeight(down)
    bare, ones = moe_mlp(x, None, ends_E, *weights), moe_mlp(x, torch.ones(12), ends_E, *weights)
    assert torch.equal(bare, ones)
    (dx,) = torch.autograd.grad(bare.sum(), x)
    assert torch.equal(dx, torch.autograd.grad(ones.sum(), x)[0])


@pytest.mark.parametrize("needed", range(4), ids=NAMES[1:])
def test_one_gradient_alone_has_the_same_bits(needed: int) -> None:
    leaves, ids_TK = leaves_of(torch.float32), ids_of("mixed")
    wanted = torch.autograd.grad(layer(leaves, ids_TK).sum(), leaves)[needed]
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index == needed)
    (alone,) = torch.autograd.grad(layer(leaves, ids_TK).sum(), leaves[needed])
    assert torch.equal(alone, wanted)


def test_saved_for_backward_are_h_the_inputs_and_a_few_bytes_a_row() -> None:
    leaves, ids_TK = leaves_of(torch.float32), ids_of("mixed")
    held: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        y = layer(leaves, ids_TK)
    for given in (*leaves, ids_TK, y):
        held.pop(given.untyped_storage().data_ptr(), None)
    rows, h_bytes = TOKENS * TOP_K, 2 * EXPERT_WIDTH * 4
    assert rows * h_bytes < sum(held.values()) <= rows * (h_bytes + 24)


class Slot:
    """Takes products over; the gradient comes from calling them."""

    def __init__(self) -> None:
        self.submitted: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = []

    def submit(self, product: Callable[..., Tensor], operands: tuple[Tensor, ...], weight: Tensor) -> None:
        self.submitted.append((product, operands))


def test_a_slot_gets_each_weight_gradient_and_its_operands() -> None:
    leaves, ids_TK = leaves_of(torch.float32), ids_of("mixed")
    x, gates, up, down = leaves
    wanted = torch.autograd.grad(layer(leaves, ids_TK).sum(), (up, down))
    routed = route(ids_TK, EXPERTS)
    slots: Any = Slot(), Slot()
    y = moe_mlp(
        x,
        gather_gates(gates, routed),
        routed.ends_E,
        HeldWeight(up, slots[0]),
        HeldWeight(down, slots[1]),
        tokens=tokens_of(routed),
    )
    y.sum().backward()
    assert up.grad is None and down.grad is None and x.grad is not None
    for slot, gradient in zip(slots, wanted, strict=True):
        ((product, operands),) = slot.submitted
        assert torch.equal(product(), gradient)
        assert all(isinstance(operand, Tensor) for operand in operands)
        into = torch.ones_like(gradient)
        product(into_EFD=into, accumulate=True)
        torch.testing.assert_close(into, gradient + 1)
    # The up-projection's holds tokens, not their rows.
    assert slots[0].submitted[0][1][1].shape == x.shape
