"""Where a finished weight gradient goes: plain `.grad`, a group's buckets, or FSDP2's own reduction.

FSDP2 has no public call for "here is this parameter's gradient, reduce it now". What torch's own pipelining does in
`stage.perform_reduce_grad` is done here: fill the unsharded gradient, then run the group's post-backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class DelayedModule(Protocol):
    """A module whose weight gradient the coordinator may own."""

    delay_wgrad_compute: bool

    def own_wgrad(self, coordinator: Any, name: str) -> None:
        """Hand weight gradients to `coordinator` from now on, under this full name."""
        ...

    def wgrad_parameters(self, parameter: str) -> Sequence[nn.Parameter]:
        """The parameters that a gradient called `parameter` belongs to: one stacked, or E separate ones in id order."""
        ...


@dataclass(frozen=True)
class FSDPUnit:
    """The FSDP2 unit that manages one delayed module's weights, and the root it belongs to."""

    unit: FSDPModule
    root: FSDPModule

    def groups(self) -> list[Any]:
        """The unit's parameter groups: one in torch 2.11, a list from 2.13 on."""
        state = self.unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        return list(groups) if groups is not None else [state._fsdp_param_group]

    def reduces_by_itself(self) -> bool:
        """Whether a backward now would reduce these weights before their gradients exist."""
        return any(group.reduce_grads for group in self.groups())

    def hold(self) -> None:
        """Leave reduction to the coordinator."""
        self.unit.set_requires_gradient_sync(False, recurse=False)

    @torch.no_grad()
    def add(self, module: DelayedModule, name: str, gradient: Tensor) -> None:
        """Accumulate a gradient where FSDP2 keeps those that are not reduced yet."""
        pieces = _pieces(module, name, gradient)
        held = self._held([parameter for parameter, _ in pieces])
        for one, (_, piece) in zip(held, pieces, strict=True):
            _add_unsharded(one, piece)

    def discard(self, module: DelayedModule, name: str) -> None:
        """Forget what `add` accumulated."""
        for held in self._held(module.wgrad_parameters(name)):
            held.unsharded_accumulated_grad = None
            held._unsharded_param.grad = None

    def _held(self, parameters: Sequence[nn.Parameter]) -> list[Any]:
        """FSDP2's record of each parameter, which the module shows sharded or, within a backward, gathered."""
        records: dict[int, Any] = {}
        for held in (held for group in self.groups() for held in group.fsdp_params):
            records[id(held.sharded_param)] = records[id(getattr(held, "_unsharded_param", None))] = held
        missing = [parameter for parameter in parameters if id(parameter) not in records]
        if missing:
            raise RuntimeError(
                f"FSDP2 does not hold {len(missing)} of the delayed weights: they were replaced after wrapping"
            )
        return [records[id(parameter)] for parameter in parameters]

    def reduce(self) -> None:
        """Run the group's reduction."""
        self.unit.set_requires_gradient_sync(True, recurse=False)
        self.unit.set_is_last_backward(True)
        for group in self.groups():
            group.post_backward()
        self.hold()

    def finish(self) -> None:
        """Let the reductions under way end on the default stream."""
        self.root._get_fsdp_state()._root_post_backward_final_callback()


def _add_unsharded(held: Any, gradient: Tensor) -> None:
    reduce_dtype = held.reduce_dtype
    if reduce_dtype is not None and gradient.dtype != reduce_dtype:
        gradient = gradient.to(reduce_dtype)
        before = held.unsharded_accumulated_grad
        held.unsharded_accumulated_grad = gradient if before is None else before + gradient
        return
    parameter = held._unsharded_param
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@torch.no_grad()
def accumulate(module: DelayedModule, name: str, gradient: Tensor) -> None:
    """Add to `.grad` of the parameters, as autograd would. RuntimeError if somebody has sharded them."""
    for parameter, piece in _pieces(module, name, gradient):
        if isinstance(parameter, DTensor):
            raise RuntimeError(
                f"a delayed gradient of shape {tuple(piece.shape)} belongs to a parameter that was sharded without its "
                "coordinator; wrap the model with moe_runtime.distribute(model, plan, coordinator)"
            )
        if parameter.grad is None:
            parameter.grad = piece
        else:
            parameter.grad += piece


def _pieces(module: DelayedModule, name: str, gradient: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
    parameters = module.wgrad_parameters(name)
    pieces = [gradient] if len(parameters) == 1 and parameters[0].dim() == gradient.dim() else gradient.unbind(0)
    return [(p, piece) for p, piece in zip(parameters, pieces, strict=True) if p.requires_grad]


def find_unit(root: nn.Module, module: nn.Module) -> FSDPUnit | None:
    """The innermost FSDP2 unit of `root` that contains `module`, or None."""
    if not isinstance(root, FSDPModule):
        return None
    innermost: nn.Module = root
    for candidate in root.modules():
        if isinstance(candidate, FSDPModule) and any(child is module for child in candidate.modules()):
            innermost = candidate
    assert isinstance(innermost, FSDPModule)
    return FSDPUnit(innermost, root)
