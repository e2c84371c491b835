"""Whether a coordinator may own a model's weight gradients, and whether what wraps the model will leave them to it."""

from collections.abc import Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from moe_runtime.runtime.schedules import Schedule
from moe_runtime.runtime.targets import DelayedModule

MARK = "skip_backward_post_hook"


def check_attachable(model: nn.Module, owners: Mapping[str, nn.Module], schedule: Schedule) -> None:
    """ValueError, naming the module or parameter, for a model that a coordinator of this schedule must not own."""
    if any("wgrad_coordinator" in module.__dict__ for module in model.modules()):
        raise ValueError("the model, or a part of it, has a coordinator already; attach one, once")
    wrapped = any(isinstance(m, FSDPModule | DistributedDataParallel) for m in model.modules())
    if schedule == "deferred" and wrapped:
        raise ValueError("attach a deferred coordinator before DDP or FSDP2 wraps the model: their hooks exist now")
    owned: dict[int, str] = {}
    for name, module in owners.items():
        flag = bool(getattr(module, "delay_wgrad_compute", False))
        if flag != (schedule == "deferred"):
            raise ValueError(
                f"{name or 'the model'} has delay_wgrad_compute={flag}, which schedule {schedule!r} does not "
                f"allow: build it with delay_wgrad_compute={schedule == 'deferred'}"
            )
        for parameter_name, parameter in module.named_parameters(prefix=name, recurse=False):
            if id(parameter) in owned and schedule == "deferred":
                raise ValueError(f"{owned[id(parameter)]} and {parameter_name} are one weight with two owners")
            owned[id(parameter)] = parameter_name
    for name, parameter in model.named_parameters():
        if getattr(parameter, MARK, False) and id(parameter) not in owned:
            raise ValueError(f"{name} is marked {MARK}, but no module would compute its gradient")


def mark(module: DelayedModule) -> None:
    """Tell reducers that look for it that this module's weight gradient comes after backward."""
    for parameter in module.wgrad_parameters("weight"):
        setattr(parameter, MARK, True)


def active_ddp() -> DistributedDataParallel | None:
    """The DDP wrapper whose forward is under way."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def check_ddp(ddp: DistributedDataParallel | None, modules: Mapping[str, DelayedModule]) -> None:
    """RuntimeError if this DDP reduces one of these modules' weights by itself."""
    if ddp is None:
        return
    ignored = getattr(ddp, "parameters_to_ignore", frozenset())
    reduced = {id(parameter) for name, parameter in ddp.module.named_parameters() if name not in ignored}
    for name, module in modules.items():
        if any(id(parameter) in reduced for parameter in module.wgrad_parameters("weight")):
            raise RuntimeError(
                f"DDP would reduce the weight of {name or 'the model'} before its gradient exists, and replicas would "
                "drift apart; wrap the model with moe_runtime.distribute(model, plan, coordinator)"
            )


def check_main_grad(module: DelayedModule, name: str) -> None:
    """RuntimeError if the DDP whose forward is under way would reduce this module's weights: it reduces `.grad`."""
    ddp = active_ddp()
    if ddp is None:
        return
    ignored = getattr(ddp, "parameters_to_ignore", frozenset())
    reduced = {id(parameter) for name, parameter in ddp.module.named_parameters() if name not in ignored}
    if any(id(parameter) in reduced for parameter in module.wgrad_parameters("weight")):
        raise RuntimeError(
            f"DDP reduces .grad of the weight of {name or 'the model'}, whose gradient goes into main_grad: replicas "
            "would drift apart; build it with fuse_wgrad_accumulation=False"
        )


def check_fsdp(model: nn.Module, modules: Mapping[str, DelayedModule], known: Mapping[str, object]) -> None:
    """RuntimeError if FSDP2 holds one of these modules and the coordinator does not know."""
    for unit in model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        inside = {id(child) for child in unit.modules()}
        for name, module in modules.items():
            if id(module) in inside and name not in known:
                raise RuntimeError(
                    f"FSDP2 holds the weight of {name or 'the model'}, and would apply its gradient one step late; "
                    "wrap the model with moe_runtime.distribute(model, plan, coordinator)"
                )
