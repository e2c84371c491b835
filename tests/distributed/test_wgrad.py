"""Delayed weight gradients equal inline ones bit for bit, however the model is wrapped; the classic faults are refused.

The reducer is the same on both sides. At two ranks it is what `distribute` makes in either case: a sum of two has one
order. At three and four, torch's DDP and FSDP2 would reduce an inline model's experts together with dense weights, in
other pieces than the deferred schedule does, which can differ in the last bit; there inline uses the same pieces.
"""

from collections.abc import Callable, Iterator
from itertools import combinations, product

import pytest
from wgrad_cases import (
    EXPERTS,
    Case,
    after_a_failed_microbatch,
    after_an_abort,
    compare,
    drift,
    event_order,
    marks_after_sharding,
    microbatch_by_microbatch,
    naive,
    scalar_average,
    two_backwards_without_no_sync,
    whole_model_sync,
    without_coordinator,
)

from moe_runtime.testing.ranks import RankPool

Ranks = Callable[[int], RankPool]

AXES = {
    "data": ("none", "ddp", "fsdp2"),
    "world": (1, 2, 3, 4),
    "expert": (1, 2),
    "schedule": ("late", "deferred"),
    "budget_bytes": (None, 2000),
    "microbatches": (1, 2, 4),
    "precision": ("fp32", "bf16"),
    "checkpointing": (False, True),
    "discrete": (False, True),
    "weights": ("plain", "mxfp8"),
}


def meaningless(case: Case) -> bool:
    """Combinations that do not exist: one process is not wrapped, ranks are; expert ranks divide the world; MXFP8 is
    sharded by whole experts of a packed weight.
    """
    splits_experts = (EXPERTS // case.expert) % max(case.world // case.expert, 1) != 0
    if case.weights == "mxfp8" and case.data == "fsdp2" and (case.discrete or splits_experts):
        return True
    return (
        (case.data == "none") != (case.world == 1)
        or case.world % case.expert != 0
        or (case.budget_bytes is not None and case.schedule == "late")
    )


def all_cases() -> list[Case]:
    cases = (Case(**dict(zip(AXES, values, strict=True))) for values in product(*AXES.values()))  # pyright: ignore
    return [case for case in cases if not meaningless(case)]


def pairs(case: Case) -> set[tuple]:
    return set(combinations([(axis, getattr(case, axis)) for axis in AXES], 2))


def pairwise(cases: list[Case]) -> list[Case]:
    """Few cases that hold every pair of values that any case holds: greedily, the first of the best each time."""
    wanted = set().union(*map(pairs, cases))
    # Of equally good ones the cheapest first: more ranks and more microbatches take longer on few cores.
    cases = sorted(cases, key=lambda case: (case.world, case.microbatches))
    chosen = []
    while wanted:
        best = max(cases, key=lambda case: len(pairs(case) & wanted))
        chosen.append(best)
        wanted -= pairs(best)
    return chosen


ALL = all_cases()
SAMPLE = pairwise(ALL)
REST = [case for case in ALL if case not in SAMPLE]


def test_the_sample_covers_every_pair_of_values():
    assert len(ALL) == 1332
    assert set().union(*map(pairs, SAMPLE)) == set().union(*map(pairs, ALL))
    assert {(c.schedule, c.data) for c in SAMPLE} == set(product(AXES["schedule"], AXES["data"]))
    assert len(SAMPLE) <= 24


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_wgrad_equals_inline(case: Case, ranks: Ranks):
    check(case, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("case", REST, ids=str)
def test_wgrad_equals_inline_in_the_full_product(case: Case, ranks: Ranks):
    check(case, ranks)


@pytest.mark.parametrize(
    "case",
    [
        Case(bias=True, microbatches=2, discrete=True),
        Case(bias=True, data="ddp", world=2, microbatches=3, expert=2, budget_bytes=0),
        Case(bias=True, data="fsdp2", world=2, microbatches=3, precision="bf16", budget_bytes=0),
        Case(bias=True, data="fsdp2", world=2, microbatches=2, schedule="late", precision="bf16"),
    ],
    ids=str,
)
def test_wgrad_equals_inline_with_biases_which_are_not_delayed(case: Case, ranks: Ranks):
    check(case, ranks)


def check(case: Case, ranks: Ranks) -> None:
    results = [compare(case)] if case.world == 1 else ranks(case.world).run(compare, case)
    for rank, lines in enumerate(results):
        assert lines == [], f"rank {rank}"


def wgrads(lines: list[str]) -> Iterator[str]:
    return (line for line in lines if line.endswith(("gate_up.weight", "down.weight")))


def test_planted_naive_wgrad_is_one_step_late_under_fsdp2(ranks: Ranks):
    for (against_this_step, against_step_before), _ in ranks(2).run(naive, "fsdp2"):
        assert len(list(wgrads(against_this_step))) == 3 * 4, "four weights, wrong in each of three steps"
        assert list(wgrads(against_step_before)) == [], "exactly what the step before should have had"
        assert len(against_step_before) == 2 * 4, "dense gradients are on time"


def test_planted_naive_wgrad_drifts_apart_under_ddp(ranks: Ranks):
    (first, _), (second, _) = (result[0] for result in ranks(2).run(naive, "ddp"))
    assert len(list(wgrads(first))) == len(list(wgrads(second))) == 3 * 4
    (_, one), (_, other) = ranks(2).run(naive, "ddp")
    assert {name for name, value in one.items() if not value.equal(other[name])} == {
        f"blocks.{i}.experts.experts.{name}.weight" for i in range(2) for name in ("gate_up", "down")
    }


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("ddp", "DDP would reduce the weight of blocks.0.experts.experts.gate_up before its gradient exists"),
        ("fsdp2", "FSDP2 holds the weight of blocks.0.experts.experts.gate_up, and would apply its gradient one step"),
    ],
)
def test_a_wrapper_that_the_coordinator_does_not_know_is_refused(data: str, sentence: str, ranks: Ranks):
    for got in ranks(2).run(drift, data):
        assert got.startswith(sentence)
        assert "moe_runtime.distribute" in got


@pytest.mark.parametrize(
    ("data", "sentence"),
    [("ddp", "DDP would reduce the weight of"), ("fsdp2", "sharded without its coordinator")],
)
def test_a_wrapper_over_delayed_layers_without_a_coordinator_is_refused(data: str, sentence: str, ranks: Ranks):
    for got in ranks(2).run(without_coordinator, data):
        assert sentence in got


def test_reduction_switched_on_behind_the_coordinator_is_refused_in_backward(ranks: Ranks):
    for got in ranks(2).run(whole_model_sync):
        assert got.startswith("FSDP2 would reduce blocks.1.experts.experts.down.weight")
        assert "gradient_sync" in got


@pytest.mark.parametrize("data", ["ddp", "fsdp2"])
def test_an_expert_that_one_rank_alone_uses_gets_the_mean_on_both(data: str, ranks: Ranks):
    for got in ranks(2).run(scalar_average, data):
        assert got == pytest.approx([1.0, 2.0], rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("inline", ["dgrad", "wgrad", "dgrad", "wgrad", "launch", "launch", "wait", "wait", "end of backward"]),
        ("late", ["dgrad", "dgrad", "launch", "launch", "wgrad", "wgrad", "wait", "wait", "end of backward"]),
        ("deferred", ["dgrad", "dgrad", "launch", "launch", "wait", "wait", "end of backward", "wgrad", "wgrad"]),
    ],
)
def test_wgrad_runs_between_launching_the_exchange_and_waiting_for_it(schedule: str, expected: list, ranks: Ranks):
    # Rows and routing weights are exchanged apart: two launches. The first launch and wait are those of combine.
    for events in ranks(2).run(event_order, schedule):
        assert events == ["launch", "wait", *expected]


@pytest.mark.parametrize("schedule", ["inline", "late", "deferred"])
@pytest.mark.parametrize("world", [2, 4])
def test_expert_gradients_add_up_over_two_reduced_backwards_under_ddp(schedule: str, world: int, ranks: Ranks):
    for wrong in ranks(world).run(two_backwards_without_no_sync, schedule):
        assert wrong == []


@pytest.mark.parametrize("data", ["ddp", "fsdp2"])
def test_backward_dw_after_each_microbatch_gives_what_one_flush_gives(data: str, ranks: Ranks):
    for wrong in ranks(2).run(microbatch_by_microbatch, data):
        assert wrong == []


@pytest.mark.parametrize(
    "case",
    [
        Case(schedule=schedule, data=data, world=2, expert=expert, microbatches=2, budget_bytes=budget)
        for schedule, data, expert, budget in (
            ("late", "ddp", 2, None),
            ("deferred", "ddp", 2, None),
            ("deferred", "ddp", 1, 0),
            ("deferred", "fsdp2", 2, None),
            ("deferred", "fsdp2", 1, 0),
        )
    ],
    ids=str,
)
def test_nothing_of_a_backward_that_raised_reaches_later_steps(case: Case, ranks: Ranks):
    for lines in ranks(2).run(after_a_failed_microbatch, case):
        assert lines == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("data", ["ddp", "fsdp2"])
def test_nothing_of_an_aborted_step_reaches_later_ones(data: str, precision: str, ranks: Ranks):
    for lines in ranks(2).run(after_an_abort, Case(data=data, world=2, precision=precision, budget_bytes=0)):
        assert lines == []


def test_sharding_and_materializing_keep_the_marks(ranks: Ranks):
    for lost in ranks(2).run(marks_after_sharding):
        assert lost == []
