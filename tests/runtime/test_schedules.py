"""Schedules: where in backward a late gradient is made, and what autograd is told meanwhile."""

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_runtime as mr
from moe_runtime.runtime import late_node
from moe_runtime.runtime.schedules import check_schedule


class Recorded(torch.autograd.Function):
    """The identity; its backward says its name."""

    @staticmethod
    def forward(ctx, x: Tensor, events: list[str], name: str) -> Tensor:
        ctx.events, ctx.name = events, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx: Tensor) -> tuple[Tensor, None, None]:
        ctx.events.append(ctx.name)
        return dx, None, None


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """Names of GEMMs of the layer's backward as they run."""
    layer = sys.modules["moe_runtime.functional.grouped_linear"]
    experts = sys.modules["moe_runtime.functional.moe_mlp"]
    recorded: list[str] = []

    def call(name: str, function: Any, *args: Any, **options: Any) -> Any:
        recorded.append(name)
        return function(*args, **options)

    for module, name, attribute in (
        (layer, "wgrad", "ragged_k_gemm_tn"),
        (layer, "dgrad", "ragged_m_gemm_nn"),
        (experts, "wgrad", "ragged_k_gemm_tn"),
        (experts, "dgrad", "gemm_dact"),
        (experts, "dgrad", "ragged_m_gemm_nn"),
    ):
        monkeypatch.setattr(module, attribute, partial(call, name, getattr(module, attribute)))
    return recorded


def exchange_then_layer(schedule: str, events: list[str]) -> mr.WgradCoordinator:
    """A fake exchange (start, wait) around taking the weight, as RoutedExperts does; then one backward."""
    layer = mr.GroupedLinear(2, 4, 4, delay_wgrad_compute=schedule == "deferred")
    coordinator = mr.WgradCoordinator(schedule).attach(layer)  # pyright: ignore[reportArgumentType]
    x_RD = torch.randn(4, 4, requires_grad=True)
    started_RD = Recorded.apply(x_RD, events, "wait")  # what starts in forward is waited for in backward
    held = layer.take_weight()
    arrived_RD = Recorded.apply(started_RD, events, "launch")
    layer.forward_ends(arrived_RD, layer.ends(arrived_RD, (2, 2)), held=held).sum().backward()
    return coordinator


def test_late_runs_dgrad_launch_wgrad_wait(events):
    exchange_then_layer("late", events)
    assert events == ["dgrad", "launch", "wgrad", "wait"]


def test_inline_and_deferred_for_contrast(events):
    exchange_then_layer("inline", events)
    assert events == ["dgrad", "wgrad", "launch", "wait"]
    events.clear()
    coordinator = exchange_then_layer("deferred", events)
    assert events == ["dgrad", "launch", "wait"]
    coordinator.flush()
    assert events == ["dgrad", "launch", "wait", "wgrad"]


@pytest.mark.parametrize("schedule", ["inline", "late", "deferred"])
def test_routed_experts_without_an_exchange_make_late_gradients_last(events, schedule):
    config = mr.RoutedExpertsConfig(
        num_experts=2, hidden_size=4, intermediate_size=4, delay_wgrad_compute=schedule == "deferred"
    )
    module = mr.RoutedExperts(config)
    coordinator = mr.WgradCoordinator(schedule).attach(module)
    x_TD = torch.randn(3, 4, requires_grad=True)
    x_TD.register_hook(lambda _: events.append("dx"))
    module(x_TD, torch.tensor([[0, 1]] * 3), torch.ones(3, 2)).sum().backward()
    events.append("end")
    coordinator.flush()
    expected = {
        "inline": ["dgrad", "wgrad", "dgrad", "wgrad", "dx", "end"],
        "late": ["dgrad", "dgrad", "wgrad", "wgrad", "dx", "end"],
        "deferred": ["dgrad", "dgrad", "dx", "end", "wgrad", "wgrad"],
    }[schedule]
    if schedule == "late":
        # The rows' own gradient is ready before the late nodes, which stand first in the block, are reached.
        events.remove("dx")
        expected.remove("dx")
    assert events == expected


def test_a_late_gradient_fires_the_parameters_own_hooks():
    layer = mr.GroupedLinear(2, 4, 4)
    mr.WgradCoordinator("late").attach(layer)
    seen = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    layer(torch.ones(2, 4), (1, 1)).sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], torch.ones(2, 4, 4))


def test_the_placeholder_of_a_late_gradient_takes_no_memory():
    layer = mr.GroupedLinear(2, 4, 4)
    coordinator = mr.WgradCoordinator("late").attach(layer)
    weight = layer.weight
    slot = coordinator.slot("", "weight")
    coordinator._backwards.append(object.__new__(FakeBackward))
    placeholder = slot.submit(lambda: torch.ones(2, 4, 4), (torch.ones(1, 4),), weight)
    assert placeholder.shape == weight.shape and placeholder.untyped_storage().nbytes() == weight.element_size()
    coordinator._backwards.clear()


class FakeBackward:
    graph_task, completed, failed = -1, False, False


def test_a_late_node_without_a_gradient_handed_in_is_an_error_by_name():
    layer = mr.GroupedLinear(2, 4, 4)
    coordinator = mr.WgradCoordinator("late").attach(layer)
    slot = coordinator.slot("", "weight")
    with pytest.raises(RuntimeError, match=r"no weight gradient was handed in for weight \(microbatch 0, call 0\)"):
        late_node(layer.weight, slot).sum().backward()


def test_unknown_schedules_are_refused():
    with pytest.raises(ValueError, match="must be one of inline, late, deferred; got 'Late'"):
        check_schedule("Late")
