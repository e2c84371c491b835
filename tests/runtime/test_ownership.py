"""Who may own a weight gradient, and that its mark is there whatever happened to the parameter."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import moe_runtime as mr
from moe_runtime.nn import GroupedLinear
from moe_runtime.runtime import ownership


def marks(module: nn.Module) -> list[bool]:
    """Of each weight: whether it is marked."""
    return [
        bool(getattr(parameter, "skip_backward_post_hook", False))
        for name, parameter in module.named_parameters()
        if "weight" in name
    ]


def new_weight(layer: GroupedLinear) -> tuple[str, nn.Parameter]:
    name = "weight" if layer.single_grouped_weight else "weight0"
    return name, nn.Parameter(torch.zeros(layer.get_parameter(name).shape))


def assigned_state(layer: GroupedLinear) -> None:
    fresh = GroupedLinear(2, 4, 3, single_grouped_weight=layer.single_grouped_weight, bias=True)
    layer.load_state_dict(fresh.state_dict(), assign=True)


CHANGES: dict[str, Callable[[GroupedLinear], object]] = {
    "construction": lambda layer: None,
    "register_parameter": lambda layer: layer.register_parameter(*new_weight(layer)),
    "attribute": lambda layer: setattr(layer, *new_weight(layer)),
    "load_state_dict assign": assigned_state,
    "to dtype": lambda layer: layer.to(torch.bfloat16),
    "to_empty": lambda layer: layer.to_empty(device="cpu"),
    "reset_parameters": lambda layer: layer.reset_parameters(),
    "keep_experts": lambda layer: layer.keep_experts(0, 1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_weight_is_marked_if_and_only_if_it_is_delayed(change, single, delayed, device):
    layer = GroupedLinear(2, 4, 3, single_grouped_weight=single, delay_wgrad_compute=delayed, device=device, bias=True)
    CHANGES[change](layer)
    assert set(marks(layer)) == {delayed}
    assert not any(getattr(p, "skip_backward_post_hook", False) for n, p in layer.named_parameters() if "bias" in n)


@pytest.mark.parametrize("swaps", [True, False])
def test_marks_survive_swapping_conversions(swaps):
    layer = GroupedLinear(2, 4, 3, delay_wgrad_compute=True, device="meta")
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        layer.to_empty(device="cpu").double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert marks(layer) == [True]


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("replaced_by", ["deepcopy", "hand"])
def test_attach_marks_again_what_was_replaced(single, replaced_by):
    model = nn.Sequential(GroupedLinear(2, 4, 3, single_grouped_weight=single, delay_wgrad_compute=True))
    if replaced_by == "deepcopy":
        model = copy.deepcopy(model)
    else:
        layer = model[0]
        for name in [name for name in layer._parameters if "weight" in name]:
            layer._parameters[name] = nn.Parameter(torch.zeros(layer.get_parameter(name).shape))
        assert not any(marks(model))
    mr.WgradCoordinator("deferred").attach(model)
    assert all(marks(model))


@pytest.mark.parametrize("schedule", ["inline", "late"])
def test_other_schedules_never_mark(schedule):
    model = nn.Sequential(GroupedLinear(2, 4, 3))
    mr.WgradCoordinator(schedule).attach(model)
    assert marks(model) == [False]


# Refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "flag"), [("inline", True), ("late", True), ("deferred", False)], ids=lambda value: str(value)
)
def test_a_flag_that_disagrees_with_the_schedule_is_refused_by_name(schedule, flag):
    model = nn.Sequential(nn.Linear(2, 2), GroupedLinear(2, 4, 3, delay_wgrad_compute=flag))
    sentence = (
        rf"^1 has delay_wgrad_compute={flag}, which schedule '{schedule}' does not allow: build it with .*={not flag}"
    )
    with pytest.raises(ValueError, match=sentence):
        mr.WgradCoordinator(schedule).attach(model)
    assert "wgrad_coordinator" not in model.__dict__


def test_a_weight_with_two_owners_is_refused_by_name():
    model = nn.ModuleDict({name: GroupedLinear(2, 4, 4, delay_wgrad_compute=True) for name in ("a", "b")})
    model["b"].weight = model["a"].weight
    with pytest.raises(ValueError, match=r"^a\.weight and b\.weight are one weight with two owners"):
        mr.WgradCoordinator("deferred").attach(model)


@pytest.mark.parametrize("schedule", ["inline", "late"])
def test_a_tied_weight_is_fine_where_autograd_adds_up(schedule):
    gradients = []
    for each in ("inline", schedule):
        torch.manual_seed(0)
        a, b = GroupedLinear(2, 4, 4), GroupedLinear(2, 4, 4)
        b.weight = a.weight
        model = nn.ModuleDict({"a": a, "b": b})
        mr.WgradCoordinator(each).attach(model)
        b(a(torch.ones(4, 4), (2, 2)), (2, 2)).sum().backward()
        gradients.append(a.weight.grad)
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("schedule", ["inline", "late", "deferred"])
def test_a_marked_parameter_that_nobody_owns_is_refused_by_name(schedule):
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight.skip_backward_post_hook = True
    with pytest.raises(ValueError, match=r"^0\.weight is marked skip_backward_post_hook, but no module"):
        mr.WgradCoordinator(schedule).attach(model)


def test_a_coordinator_attached_twice_is_refused():
    model, other = (nn.Sequential(GroupedLinear(2, 4, 3, delay_wgrad_compute=True)) for _ in range(2))
    coordinator = mr.WgradCoordinator("deferred").attach(model)
    with pytest.raises(ValueError, match="this coordinator is attached already; make one for each model"):
        coordinator.attach(other)
    for again in (model, nn.Sequential(model)):
        with pytest.raises(ValueError, match="has a coordinator already; attach one, once"):
            mr.WgradCoordinator("deferred").attach(again)


def test_attaching_does_not_lose_what_waits_or_who_listens():
    model = nn.Sequential(GroupedLinear(2, 4, 3, delay_wgrad_compute=True))
    model[0](torch.ones(2, 4), (1, 1)).sum().backward()
    with pytest.raises(RuntimeError, match="attaching a coordinator with weight gradients pending: weight"):
        mr.WgradCoordinator("deferred").attach(model)
    model[0].backward_dw()
    model[0].register_wgrad_accumulation_and_reduce_hooks(lambda: None)
    with pytest.raises(ValueError, match="0 has hooks already: attach first, then register them"):
        mr.WgradCoordinator("deferred").attach(model)


@pytest.fixture
def one_rank(tmp_path):
    """A gloo group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def wrap(model: nn.Module, data: str) -> nn.Module:
    if data == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return torch.distributed.fsdp.fully_shard(model)


@pytest.mark.parametrize("data", ["ddp", "fsdp2"])
def test_a_wrapped_model_is_refused_when_deferred(one_rank, data):
    model = nn.Sequential(nn.Linear(4, 4), GroupedLinear(2, 4, 3, delay_wgrad_compute=True))
    with pytest.raises(ValueError, match="attach a deferred coordinator before DDP or FSDP2 wraps the model"):
        mr.WgradCoordinator("deferred").attach(wrap(model, data))
    for schedule in ("inline", "late"):
        mr.WgradCoordinator(schedule).attach(wrap(nn.Sequential(GroupedLinear(2, 4, 3)), data))


def test_sharding_loses_marks_which_marking_brings_back(one_rank):
    layer = GroupedLinear(2, 4, 3, delay_wgrad_compute=True)
    wrap(layer, "fsdp2")
    assert marks(layer) == [False], "a fact of torch, and the reason to mark again"
    ownership.mark(layer)
    assert marks(layer) == [True]


def test_a_ddp_that_ignores_the_delayed_weights_is_fine(one_rank):
    layer = GroupedLinear(2, 4, 4, delay_wgrad_compute=True)
    model = nn.Sequential(nn.Linear(4, 4))
    model.add_module("experts", Routed(layer))
    coordinator = mr.WgradCoordinator("deferred").attach(model)
    names = [name for name, _ in model.named_parameters() if name.startswith("experts")]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    nn.parallel.DistributedDataParallel(model)(torch.ones(2, 4)).sum().backward()
    assert coordinator.flush() == 1


class Routed(nn.Module):
    def __init__(self, layer: GroupedLinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_RD: torch.Tensor) -> torch.Tensor:
        return self.layer(x_RD, (1, 1))
