"""Weight gradients that are added to `main_grad`: Megatron's protocol of a fused accumulation, attribute by attribute.

    main_grad                 read: fp32 (or the weight's dtype), the weight's shape; gradients are added to it
    get_main_grad()           called in its place where the parameter has it: buffers that are made when first needed
    overwrite_main_grad       read: True writes the gradient over what `main_grad` holds
    grad_added_to_main_grad   set to True. Where somebody else has put it on the parameter, a reducer waits for `.grad`
                              as well, and autograd gets zeros for it; else `.grad` stays None
    zero_out_wgrad            read by reducers that do add `.grad`: what they add is always zeros

The attributes belong to whoever reduces gradients. None is cached, so that each may be put there at any time.
"""

# E local experts   F out features   D in features

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moe_runtime.runtime.targets import DelayedModule

_FLAG = "grad_added_to_main_grad"


class Product(Protocol):
    """A weight gradient to be computed: a new tensor, or stored in `into_EFD`, or added to it."""

    def __call__(self, *, into_EFD: Tensor | None = None, accumulate: bool = False) -> Tensor:
        """(E, F, D)"""
        ...


class MainGrad:
    """Where one module's weight gradients go: into `main_grad` of its stacked weight, or of its E separate ones."""

    def __init__(self, module: DelayedModule) -> None:
        self._module = module
        self._flagged_here: set[int] = set()  # weights whose flag nobody else has put there

    @torch.no_grad()
    def add(self, product: Product) -> Tensor | None:
        """Compute the gradient into the buffers; what autograd gets in its place: zeros if somebody waits, or None.

        Raises RuntimeError, before anything is computed, for a parameter without a buffer.
        """
        parameters = list(self._module.wgrad_parameters("weight"))
        buffers = [self._buffer(p, i) if p.requires_grad else None for i, p in enumerate(parameters)]
        if len(parameters) == 1 and parameters[0].dim() == 3:
            (parameter,), (buffer,) = parameters, buffers
            product(into_EFD=buffer, accumulate=not _overwrites(parameter))
        else:
            self._add_separately(product, parameters, buffers)
        waited_for = [self._flag(p, i) for i, p in enumerate(parameters) if p.requires_grad]
        if not any(waited_for):
            return None
        first = parameters[0]
        shape = first.shape if first.dim() == 3 else (len(parameters), *first.shape)
        return torch.zeros(shape, dtype=first.dtype, device=first.device)

    def _add_separately(
        self, product: Product, parameters: Sequence[nn.Parameter], buffers: Sequence[Tensor | None]
    ) -> None:
        like = next(buffer for buffer in buffers if buffer is not None)
        # In the buffers' precision, so that both layouts add the same bits.
        dw_EFD = product(into_EFD=like.new_empty((len(parameters), *like.shape)))
        for parameter, buffer, dw_FD in zip(parameters, buffers, dw_EFD, strict=True):
            if buffer is None:
                continue
            if _overwrites(parameter):
                buffer.copy_(dw_FD)
            else:
                buffer.add_(dw_FD)

    def _buffer(self, parameter: nn.Parameter, index: int) -> Tensor:
        held: Any = parameter
        buffer = held.get_main_grad() if hasattr(parameter, "get_main_grad") else getattr(held, "main_grad", None)
        if buffer is None:
            raise RuntimeError(
                f"{self._name(parameter, index)} accumulates into main_grad, and has none: expected a tensor of shape "
                f"{tuple(parameter.shape)} that whoever reduces gradients puts there; torch's DDP and FSDP2 put none, "
                "use them with fuse_wgrad_accumulation=False"
            )
        if buffer.shape != parameter.shape or buffer.dtype not in (torch.float32, parameter.dtype):
            raise RuntimeError(
                f"main_grad of {self._name(parameter, index)} must be float32 or {parameter.dtype} of shape "
                f"{tuple(parameter.shape)}, got {buffer.dtype} of shape {tuple(buffer.shape)}"
            )
        return buffer

    def _flag(self, parameter: nn.Parameter, index: int) -> bool:
        """Say that the gradient is in `main_grad`; whether somebody waits for `.grad` as well."""
        others = hasattr(parameter, _FLAG) and not (getattr(parameter, _FLAG) and index in self._flagged_here)
        (self._flagged_here.discard if others else self._flagged_here.add)(index)
        setattr(parameter, _FLAG, True)
        return others

    def _name(self, parameter: nn.Parameter, index: int) -> str:
        return f"weight{'' if parameter.dim() == 3 else index} of {self._module!r}"


def _overwrites(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "overwrite_main_grad", False))
