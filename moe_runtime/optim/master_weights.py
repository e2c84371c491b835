"""MasterWeights: step fp32 copies of low-precision parameters with any torch optimizer, then write them back.

A quantized parameter is written back in every direction it stores. Its master starts at the high-precision values from
which it was quantized, where it kept them, so training starts where it would have without quantization.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moe_runtime.tensor import QuantizedTensor


class MasterWeights(Optimizer):
    """`optimizer_class` over fp32 masters of `params`; after each step the parameters hold the masters, rounded.

    params  as for any torch optimizer: parameters, or groups with their own options
    A parameter that is fp32 already, and not quantized, is its own master. Initial values of quantized parameters are
    freed once the masters hold them. `state[p]` holds the inner optimizer's state, all fp32, and
    "master" where there is a copy; learning rates and other options live in `param_groups` as usual.
    A gradient that went into `main_grad` (fuse_wgrad_accumulation) is read there; who put that buffer there zeroes it.
    """

    def __init__(self, optimizer_class: type[Optimizer], params: Iterable[Any], **kwargs: Any) -> None:
        self._master: dict[Tensor, Tensor] = {}
        self._make_inner = lambda groups: optimizer_class(groups, **kwargs)
        self.inner: Optimizer | None = None
        super().__init__(params, dict(kwargs))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options; their masters are made now."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._master.update((p, _master_of(p)) for p in group["params"])
        inner_group = {**_options(group), "params": [self._master[p] for p in group["params"]]}
        if self.inner is None:
            self.inner = self._make_inner([inner_group])
        else:
            self.inner.add_param_group(inner_group)
        group.update(_options(self.inner.param_groups[-1]))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of the inner optimizer on the masters, then the write-back."""
        if closure is not None:
            raise ValueError("MasterWeights takes no closure: gradients must be complete before the step")
        assert self.inner is not None
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_options(group))
        copies = [(p, master) for p, master in self._master.items() if master is not p]
        lent = {p: p.grad for p, master in self._master.items() if master is p and _gradient_of(p) is not p.grad}
        for p, master in (*copies, *((p, p) for p in lent)):
            gradient = _gradient_of(p)
            master.grad = None if gradient is None else gradient.to(torch.float32)
        self.inner.step()
        for p, gradient in lent.items():
            p.grad = gradient
        for p, master in copies:
            if master.grad is not None:
                p.copy_(master)
                master.grad = None
        self._show_state()
        return None

    def _show_state(self) -> None:
        assert self.inner is not None
        for p, master in self._master.items():
            own = {} if master is p else {"master": master}
            if len(self.state[p]) != len(own) + len(self.inner.state[master]):
                self.state[p] = {**own, **self.inner.state[master]}

    @torch.no_grad()
    def write_back(self) -> None:
        """Make every parameter its master, rounded: after masters were loaded in place."""
        for p, master in self._master.items():
            if master is not p:
                p.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict, with each copy under "master"."""
        self._show_state()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore masters and inner state in fp32 (torch's own loading would round them to the parameters' dtype)."""
        assert self.inner is not None
        masters = {index: held["master"] for index, held in state_dict["state"].items() if "master" in held}
        inner_state = {
            index: {key: value for key, value in held.items() if key != "master"}
            for index, held in state_dict["state"].items()
        }
        self.inner.load_state_dict({"state": inner_state, "param_groups": state_dict["param_groups"]})
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, value in masters.items():
            self._master[parameters[index]].copy_(value)
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_options(inner))
        self.state.clear()
        self._show_state()
        self.write_back()


def _gradient_of(parameter: Tensor) -> Tensor | None:
    """Where a layer says that it has added it to `main_grad`, `.grad` is None or zeros."""
    fused = getattr(parameter, "grad_added_to_main_grad", False)
    return getattr(parameter, "main_grad", None) if fused else parameter.grad


@torch.no_grad()  # with gradients, a DTensor's local tensor is an alias that others would not see cleared
def _master_of(parameter: Tensor) -> Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if isinstance(local, QuantizedTensor):
        value = local.get_high_precision_init_val()
        master = local.dequantize(torch.float32) if value is None else value.to(local.device, torch.float32, copy=True)
        local.clear_high_precision_init_val()
        if isinstance(parameter, DTensor):
            master = DTensor.from_local(
                master,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        return master.requires_grad_(parameter.requires_grad)
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().to(torch.float32).requires_grad_(parameter.requires_grad)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
