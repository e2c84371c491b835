"""Delayed weight gradients in the W slots of torch's pipeline schedules: the bits of one process."""

from collections.abc import Callable

import pytest
import torch
from pipeline_cases import SCHEDULES, Stage, alone, piped
from torch import nn

import moe_runtime as mr
from moe_runtime.testing.ranks import RankPool

Ranks = Callable[[int], RankPool]


def _check(ranks: Ranks, schedule: str, deferred: bool, static: bool) -> None:
    expected = alone()
    results = ranks(2).run(piped, schedule, deferred, static)
    found = {name: gradient for gradients, _, _ in results for name, gradient in gradients.items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    assert [fired for _, fired, _ in results] == [int(deferred)] * 2
    assert all(("without a W slot" in log) == (not static) for _, _, log in results)


@pytest.mark.parametrize("deferred", [False, True], ids=["inline", "deferred"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_equal_one_process(schedule: str, deferred: bool, ranks: Ranks) -> None:
    _check(ranks, schedule, deferred, static=True)


def test_shape_inference_on_uninitialized_values_leaves_no_gradient(ranks: Ranks) -> None:
    _check(ranks, "zero_bubble", True, static=False)


def test_builder_refuses_what_it_cannot_schedule() -> None:
    late = mr.WgradCoordinator("late").attach(Stage(0, deferred=False))
    with pytest.raises(ValueError, match="without a budget, got schedule='late'"):
        late.dw_builder(nn.Linear(2, 2))
    bounded = mr.WgradCoordinator("deferred", budget_bytes=1000).attach(Stage(0, deferred=True))
    with pytest.raises(ValueError, match="budget_bytes=1000"):
        bounded.dw_builder(nn.Linear(2, 2))
    deferred = mr.WgradCoordinator("deferred").attach(Stage(0, deferred=True))
    with pytest.raises(ValueError, match="owns no module of the stage"):
        deferred.dw_builder(nn.Linear(2, 2))


def test_backward_without_a_slot_is_dropped_with_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(0, deferred=True)
    coordinator = mr.WgradCoordinator("deferred").attach(stage)
    build = coordinator.dw_builder(stage)
    stage(torch.full((12, 16), float("nan"))).sum().backward()  # what shape inference does
    stage.zero_grad()
    stage(torch.ones(12, 16)).sum().backward()
    run = build()
    assert "without a W slot" in caplog.text and "input_args" in caplog.text
    run()
    assert coordinator.flush() == 0
    down = stage.experts.experts.down.weight.grad
    assert down is not None and down.isfinite().all()
