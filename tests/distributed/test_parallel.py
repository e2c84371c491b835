"""distribute(): the same losses, norms and gradients however the model is spread, and exact gradient scales."""

from collections.abc import Callable

import pytest
import torch
from parallel_cases import (
    accumulated_in_ddp,
    expert_norm,
    refusals,
    routed,
    scalar_expert_gradient,
    train,
    values_after_wrap,
)

from moe_runtime.testing.ranks import RankPool

Ranks = Callable[[int], RankPool]

# Worst relative error seen against one process: 4e-7 in a gradient, 2e-7 in a loss, 2e-7 in a norm (fp32, gloo).
GRADIENT_TOLERANCE = 1e-6
LOSS_TOLERANCE = 1e-6

PLANS = [
    # world, data, expert, replicate, discrete, microbatches
    (2, "ddp", 1, 1, False, 1),
    (2, "fsdp2", 1, 1, False, 2),
    (2, "ddp", 2, 1, False, 2),
    (2, "fsdp2", 2, 1, False, 1),
    (2, "fsdp2", 2, 1, True, 2),
    (2, "ddp", 2, 1, True, 1),
    (4, "ddp", 2, 1, False, 2),
    (4, "fsdp2", 2, 1, False, 2),
    (4, "fsdp2", 2, 2, False, 1),
    (4, "fsdp2", 1, 2, False, 1),
    (4, "fsdp2", 4, 1, False, 1),
    (4, "ddp", 4, 1, False, 1),
]


@pytest.fixture(scope="module")
def one_process() -> dict[int, tuple[list[float], list[float], dict[str, torch.Tensor]]]:
    return {microbatches: train("none", 1, 1, False, microbatches) for microbatches in (1, 2)}


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(map(str, plan)))
def test_same_numbers_as_one_process(plan: tuple, ranks: Ranks, one_process: dict) -> None:
    world, data, expert, replicate, discrete, microbatches = plan
    losses, norms, gradients = one_process[microbatches]
    results = ranks(world).run(train, data, expert, replicate, discrete, microbatches)
    for rank_losses, rank_norms, _ in results:
        assert rank_losses == results[0][0], "ranks see one global loss"
        assert rank_norms == results[0][1], "ranks see one norm, bit for bit"
    for got, expected in zip(results[0][0] + results[0][1], losses + norms, strict=True):
        assert got == pytest.approx(expected, rel=LOSS_TOLERANCE)
    merged = {name: value for _, _, found in results for name, value in found.items()}
    if discrete:
        merged = _stacked(merged)
    assert merged.keys() == gradients.keys()
    for name, expected in gradients.items():
        error = (merged[name] - expected).norm() / expected.norm()
        assert error < GRADIENT_TOLERANCE, f"{name}: {error:.2e}"


def _stacked(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Separate experts' gradients, by their ids over all ranks, as one tensor each."""
    families: dict[str, dict[int, torch.Tensor]] = {}
    whole = {}
    for name, value in gradients.items():
        stem = name.rstrip("0123456789")
        if stem != name:
            families.setdefault(stem, {})[int(name.removeprefix(stem))] = value
        else:
            whole[name] = value
    return whole | {stem: torch.stack([v for _, v in sorted(found.items())]) for stem, found in families.items()}


@pytest.mark.parametrize("data", ["fsdp2", "ddp"])
@pytest.mark.parametrize(
    ("world", "expert", "values", "expected"),
    [(2, 1, [1.0, 3.0], 2.0), (2, 2, [1.0, 3.0], 2.0), (4, 2, [1.0, 3.0, 5.0, 7.0], 4.0)],
    ids=["dp2", "ep2", "ep2xedp2"],
)
def test_expert_gradient_is_divided_by_the_full_data_parallel_size(
    world: int, expert: int, values: list[float], expected: float, data: str, ranks: Ranks
) -> None:
    for got in ranks(world).run(scalar_expert_gradient, expert, data, values):
        assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("data", ["fsdp2", "ddp"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("empty", "expected"), [(False, 120.0**0.5), (True, 10.0)], ids=["both", "one_without_rows"])
def test_norm_sums_experts_of_all_ranks(data: str, world: int, empty: bool, expected: float, ranks: Ranks) -> None:
    results = ranks(world).run(expert_norm, data, 2, empty)
    for norm, factor in results:
        assert norm == pytest.approx(expected, rel=1e-6)
        assert factor == pytest.approx(1.0 / expected, rel=1e-5)
    assert len(set(results)) == 1, "every rank has the same norm, bit for bit"


@pytest.mark.parametrize("world", [2, 4])
def test_ddp_accumulates_expert_gradients_like_dense_ones(world: int, ranks: Ranks) -> None:
    for together, apart in ranks(world).run(accumulated_in_ddp):
        for name, value in apart.items():
            torch.testing.assert_close(together[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", ["all_to_expert_0", "dropped", "mixed", "none"])
def test_hostile_routings_equal_one_process(case: str, world: int, ranks: Ranks) -> None:
    expected = routed(1, case)
    got = ranks(world).run(routed, world, case)[0]
    for name, value in expected.items():
        assert torch.isfinite(got[name]).all(), name
        torch.testing.assert_close(
            got[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_experts_keep_their_values_and_dense_weights_agree_after_wrapping(ranks: Ranks) -> None:
    first, second = ranks(2).run(values_after_wrap)
    assert (first["experts.experts.gate_up.weight"] == 1.0).all()
    assert (second["experts.experts.gate_up.weight"] == 2.0).all()
    assert torch.equal(first["dense.weight"], second["dense.weight"])


def test_plans_that_do_not_fit_are_refused_on_every_rank_with_the_numbers(ranks: Ranks) -> None:
    expected = (
        "data='none' is for one process, got 2 ranks",
        "replicate * shard must be the 2 ranks of the world, got 3 * 0",
        "expert must divide the shard degree 2, got expert=3",
        "has 3 experts, which expert=2 of 2 ranks does not divide",
        "expert=2 needs RoutedExperts modules in the model, found none",
        "experts accumulates into main_grad, which neither FSDP2 nor DDP reduces",
    )
    for sentences in ranks(2).run(refusals):
        for got, part in zip(sentences, expected, strict=True):
            assert part in got
