"""Adapters alone, whole, by name: the same entries however the model is sharded."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moe_runtime.checkpoint.tensors import global_view
from moe_runtime.comm.layout import layout_of
from moe_runtime.integrations.peft.adapters import check_frozen_base, lora_config, unwrapped
from moe_runtime.nn.adapters import adapter_parameters

__all__ = ["load_lora_state_dict", "lora_state_dict"]


@torch.no_grad()
def lora_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Every adapter's parameters, on the CPU; those of all experts of all ranks. Every rank calls it and gets all.

    Raises ValueError for a model without adapters, and for one whose base trains.
    """
    lora_config(model)
    check_frozen_base(model)
    state: dict[str, Tensor] = {}
    for name, view in _views(model).items():
        whole = view.full_tensor() if isinstance(view, DTensor) else view
        state[name] = torch.empty(whole.shape, dtype=whole.dtype).copy_(whole)
    return state


@torch.no_grad()
def load_lora_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Fill the adapters with what `lora_state_dict` gave, at this or any other layout.

    Raises ValueError, before anything is written, for names or shapes that are not this model's: adapters of another
    base, or of another rank.
    """
    views = _views(model)
    lacking = sorted(views.keys() - state.keys())
    unknown = sorted(state.keys() - views.keys())
    if lacking or unknown:
        problem = f"lacks {lacking[0]}" if lacking else f"holds {unknown[0]}, which the model has not"
        raise ValueError(f"the adapters belong to another base or configuration: the state {problem}")
    for name, view in views.items():
        if state[name].shape != view.shape:
            raise ValueError(
                f"the adapters belong to another base or rank: {name} must have shape {tuple(view.shape)}, "
                f"got {tuple(state[name].shape)}"
            )
    for name, view in views.items():
        if not isinstance(view, DTensor):
            view.copy_(state[name])
            continue
        shape, offset = compute_local_shape_and_global_offset(view.shape, view.device_mesh, view.placements)
        part = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        view.to_local().copy_(state[name][part])


def _views(model: nn.Module) -> dict[str, Tensor]:
    """The global view of each adapter parameter, over the live storage."""
    model = unwrapped(model)
    layout = layout_of(model)
    return dict(global_view(name, parameter.detach(), layout) for name, parameter in adapter_parameters(model))
