"""Ways to train wrongly under Megatron's DDP without an error, planted one by one; what `verify` or a guard says."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from mcore_world import D, config, groups
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor, nn
from training_cases import MICROBATCHES, Case, Net, build, rows

import moe_runtime as mr
from moe_runtime.integrations.megatron import ExpertLinear, verify

MARK = "skip_backward_post_hook"
DELAYED = Case(schedule="each", overlap=True)


def said(action: Callable[[], Any]) -> str:
    try:
        action()
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _wrapped(change: Callable[[nn.Module], None], **options: Any) -> DistributedDataParallel:
    """DELAYED's model under DDP, changed before the wrap."""
    groups()
    cfg = config()
    net = Net(DELAYED, cfg)
    change(net)
    return DistributedDataParallel(
        cfg, DistributedDataParallelConfig(**{"overlap_grad_reduce": True, "delay_wgrad_compute": True, **options}), net
    )


def _fc1(net: nn.Module) -> ExpertLinear:
    return net.layers[0].experts.linear_fc1  # pyright: ignore


def at_verify(fault: str) -> str:
    """What `verify` says of a model with this fault."""
    ddp = FAULTS[fault]()
    return said(lambda: verify(ddp))


def _unmarked() -> DistributedDataParallel:
    return _wrapped(lambda net: setattr(_fc1(net).weight, MARK, False))


def _marked_after_the_wrap() -> DistributedDataParallel:
    ddp = _unmarked()
    setattr(_fc1(ddp.module).weight, MARK, True)
    return ddp


def _flag_of_ddp_is_off() -> DistributedDataParallel:
    return _wrapped(lambda net: None, delay_wgrad_compute=False)


class _Orphan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D, D))
        setattr(self.weight, MARK, True)


def _marked_and_nobody_registers() -> DistributedDataParallel:
    return _wrapped(lambda net: net.add_module("orphan", _Orphan()))


def _tied() -> DistributedDataParallel:
    def tie(net: nn.Module) -> None:
        net.layers[1].experts.linear_fc1.weight = net.layers[0].experts.linear_fc1.weight  # pyright: ignore

    return _wrapped(tie)


def _parent_registers_too() -> DistributedDataParallel:
    def register(net: nn.Module) -> None:
        net.layers[0].experts.register_wgrad_accumulation_and_reduce_hooks = lambda hook: None  # pyright: ignore

    return _wrapped(register)


def _mark_lost_after_the_wrap() -> DistributedDataParallel:
    ddp = _wrapped(lambda net: None)
    fc1 = _fc1(ddp.module)
    fc1.delay_wgrad_compute = False
    setattr(fc1.weight, MARK, False)
    return ddp


def _replaced_after_the_wrap() -> DistributedDataParallel:
    ddp = _wrapped(lambda net: None)
    fc1 = _fc1(ddp.module)
    fc1.weight = nn.Parameter(fc1.weight.detach().clone())
    return ddp


def _data_replaced_after_the_wrap() -> DistributedDataParallel:
    ddp = _wrapped(lambda net: None, use_distributed_optimizer=True)
    weight = _fc1(ddp.module).weight
    weight.data = weight.detach().as_subclass(Tensor).clone()
    return ddp


def _allreduce_lost() -> DistributedDataParallel:
    ddp = _wrapped(lambda net: None)
    _fc1(ddp.module).weight.allreduce = False  # pyright: ignore
    return ddp


def _dense_parameter_changes_sides() -> DistributedDataParallel:
    ddp = _wrapped(lambda net: None)
    ddp.module.dense.weight.allreduce = False  # pyright: ignore
    return ddp


def _wrapped_twice() -> DistributedDataParallel:
    ddp = _wrapped(lambda net: None)
    return DistributedDataParallel(ddp.config, DistributedDataParallelConfig(delay_wgrad_compute=True), ddp.module)


FAULTS: dict[str, Callable[[], Any]] = {
    "unmarked": _unmarked,
    "marked after the wrap": _marked_after_the_wrap,
    "DDP's own flag is off": _flag_of_ddp_is_off,
    "marked and nobody registers": _marked_and_nobody_registers,
    "tied": _tied,
    "the parent registers too": _parent_registers_too,
    "the mark is lost after the wrap": _mark_lost_after_the_wrap,
    "replaced after the wrap": _replaced_after_the_wrap,
    "data replaced after the wrap": _data_replaced_after_the_wrap,
    "allreduce lost": _allreduce_lost,
    "a dense parameter changes sides": _dense_parameter_changes_sides,
    "wrapped twice": _wrapped_twice,
    "not wrapped": lambda: nn.Linear(2, 2),
    "nothing": lambda: _wrapped(lambda net: None),
}


def unmarked_gradients_are_lost() -> dict[str, float]:
    """Without `verify`, the largest reduced gradient of weights that were not marked, and of one that was."""
    ddp = _wrapped(_unmark_first_layer, overlap_grad_reduce=False)
    ddp.zero_grad_buffer()
    _microbatch(ddp, 0)
    ddp.module.backward_dw()  # pyright: ignore
    ddp.finish_grad_sync()
    first, second = (layer.experts.linear_fc1.weight.main_grad for layer in ddp.module.layers)  # pyright: ignore
    return {"unmarked": first.abs().max().item(), "marked": second.abs().max().item()}


def _unmark_first_layer(net: nn.Module) -> None:
    for parameter in net.layers[0].parameters():  # pyright: ignore
        if hasattr(parameter, MARK):
            setattr(parameter, MARK, False)


def _microbatch(ddp: Any, index: int) -> None:
    (ddp(rows(3, seed=index)) / MICROBATCHES).backward()


def two_calls_in_the_last_microbatch() -> str:
    """A weight gradient of an earlier microbatch, run when the last one has begun."""
    ddp, _, _ = build(DELAYED)

    def run() -> None:
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            _microbatch(ddp, 0)
        ddp.module.backward_dw()  # outside no_sync: counts as the last microbatch's
        _microbatch(ddp, 1)
        ddp.module.backward_dw()

    return said(run)


def gradient_is_cleared_before_the_hook(fused: bool) -> str:
    """Somebody clears `.grad`, the placeholder too, between its making and the hook."""
    ddp, _, _ = build(dataclasses.replace(DELAYED, fused=fused))
    fc2 = ddp.module.layers[1].experts.linear_fc2
    fc2._coordinator._hooks[("", "weight")].insert(0, lambda: setattr(fc2.weight, "grad", None))
    ddp.zero_grad_buffer()
    _microbatch(ddp, 0)
    return said(ddp.module.backward_dw)


def step_with_gradients_pending() -> str:
    ddp, optimizer, _ = build(dataclasses.replace(DELAYED, overlap=False))
    ddp.zero_grad_buffer()
    _microbatch(ddp, 0)
    ddp.finish_grad_sync()
    return said(optimizer.step)


def backward_dw_without_a_backward() -> str:
    ddp, _, _ = build(DELAYED)
    ddp.zero_grad_buffer()
    return said(ddp.module.backward_dw)


def attached_after_the_wrap() -> str:

    ddp, _, _ = build(DELAYED)
    try:
        mr.WgradCoordinator("deferred").attach(ddp.module)
    except ValueError as error:
        return str(error)
    return "nothing"
