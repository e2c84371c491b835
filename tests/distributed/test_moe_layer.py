"""The layer over ranks: the loss and every gradient of one process, exact scales, losses that do not see the cut."""

from collections.abc import Callable

import pytest
import torch
from moe_cases import (
    biases_after_a_step,
    layer,
    losses_in_parts,
    order_of_backward,
    router_after_a_step,
    stacked,
    two_owners_of_one_token,
)

from moe_runtime.testing.ranks import RankPool

Ranks = Callable[[int], RankPool]

# The worst relative error measured against one process: 1.2e-7 (fp32, gloo).
TOLERANCE = 1e-6

LAYERS = [
    # world, routing, whose tokens, where weights are applied, capacity
    (2, "mixed", "even", "output", "none"),
    (2, "mixed", "last", "input", "padded"),
    (2, "dropped", "even", "output", "all fit"),
    (2, "one owner", "last", "output", "none"),
    (4, "mixed", "even", "input", "none"),
    (4, "one owner", "even", "output", "padded"),
    (4, "dropped", "last", "output", "padded"),
]


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: "-".join(map(str, case)))
def test_same_numbers_as_one_process(case: tuple, ranks: Ranks) -> None:
    world, *options = case
    expected = layer(*options)
    for got in ranks(world).run(layer, *options):
        assert got.keys() == expected.keys()
        assert torch.equal(got["counts"], expected["counts"])
        for name, value in expected.items():
            error = (got[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-30)
            print(f"measured {name} {error:.2e}")
            assert error < TOLERANCE, f"{name}: {error:.2e}"


def test_two_ranks_own_the_experts_of_one_token(ranks: Ranks) -> None:
    """3.2, and the weights' gradients are [2, 5] where the token is; the other rank has no token and no gradient."""
    expected = ([pytest.approx(3.2)], [[2.0, 5.0]])
    assert two_owners_of_one_token() == expected
    first, second = ranks(2).run(two_owners_of_one_token)
    assert first == expected and second == ([], [])


@pytest.mark.parametrize("gates_on", ["output", "input"])
@pytest.mark.parametrize(("data", "expert"), [("ddp", 1), ("ddp", 2), ("fsdp2", 2)])
def test_router_gradients_are_summed_and_weights_stay_equal(
    data: str, expert: int, gates_on: str, ranks: Ranks
) -> None:
    """Local gradients of 1 and 3 times the one-process one: both ranks hold 4 times it, and step alike, bit for bit."""
    (expected, _) = router_after_a_step("none", 1, gates_on, [1.0])
    assert expected.norm() > 0
    first, second = ranks(2).run(router_after_a_step, data, expert, gates_on, [1.0, 3.0])
    assert (first[0] - 4 * expected).norm() < TOLERANCE * (4 * expected).norm()
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize(("data", "expert"), [("fsdp2", 1), ("fsdp2", 2), ("ddp", 2)])
def test_wrapped_layers_get_the_gradients_of_outputs_and_losses(data: str, expert: int, ranks: Ranks) -> None:
    expected = stacked("none", 1)
    for got in ranks(2).run(stacked, data, expert):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert (got[name] - value).norm() < TOLERANCE * value.norm(), name


# "batch" counts in one rank's microbatch by its definition, so it does see a cut along sequences.
CUTS = [(kind, split) for split in ("data", "context") for kind in ("sequence", "global_batch", "z")]


@pytest.mark.parametrize(("kind", "split"), [*CUTS, ("batch", "context")])
def test_losses_do_not_see_how_the_batch_is_cut(kind: str, split: str, ranks: Ranks) -> None:
    total, gradient = losses_in_parts(kind, split)
    for got_total, got_gradient in ranks(2).run(losses_in_parts, kind, split):
        assert got_total == pytest.approx(total, rel=1e-6)
        torch.testing.assert_close(got_gradient, gradient, rtol=1e-5, atol=1e-8)


def test_one_step_of_the_biases_from_all_counts(ranks: Ranks) -> None:
    expected = ([8, 4, 2, 2], [-0.5, 0.0, 0.5, 0.5])
    assert biases_after_a_step() == expected
    assert ranks(2).run(biases_after_a_step) == [expected] * 2


def test_shared_experts_run_while_the_exchange_is_under_way(ranks: Ranks) -> None:
    """Rows and weights are launched, then the shared experts computed, then both waited for; backward the same."""
    for forward, backward in ranks(2).run(order_of_backward):
        dispatch = ["launch", "launch", "shared", "finish", "finish"]
        combine = ["launch", "finish"]
        assert forward == dispatch + combine
        assert backward == combine + dispatch
