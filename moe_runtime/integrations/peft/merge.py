"""The updates added to the weights they stand beside, and taken away again exactly."""

# E local experts   F out features   D in features   r rank

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moe_runtime.integrations.peft.adapters import lora_config, unwrapped
from moe_runtime.integrations.peft.linear import BASE
from moe_runtime.nn.adapters import adapted_linears
from moe_runtime.tensor import GroupedTensor, QuantizedTensor

__all__ = ["MergeReport", "MergedLayer", "merge_lora", "unmerge_lora"]

_ORIGINALS = "lora_originals"


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedLayer:
    """How far a merged weight is from W + update, W what the base held: ||stored - (W + update)|| over ...

    of_weight  ... ||W + update||
    of_update  ... ||update||: at 1, rounding is as large as what was learned. 0 for an update of 0
    """

    name: str
    quantized: bool
    of_weight: float
    of_update: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeReport:
    """Every merged layer of this rank."""

    layers: tuple[MergedLayer, ...]

    @property
    def worst(self) -> MergedLayer:
        """The layer that lost most of its update."""
        return max(self.layers, key=lambda layer: layer.of_update)


@torch.no_grad()
def merge_lora(model: nn.Module, *, keep: bool = True) -> MergeReport:
    """Add every update to its weight, which is rounded, or quantized, again. The model then computes without adapters.

    keep  hold the weights as they were, in host memory, for `unmerge_lora`
    One expert's update is made at a time, in fp32. Every rank calls it. A merged model is for evaluating and saving:
    its training forward raises. Raises ValueError for a model without adapters, or merged already.
    """
    model = unwrapped(model)
    lora_config(model)
    if hasattr(model, _ORIGINALS):
        raise ValueError("the adapters are merged already: unmerge_lora(model) first")
    originals: dict[str, Tensor] = {}
    layers: list[MergedLayer] = []
    for name, (linear, _) in adapted_linears(model).items():
        lora: Any = linear.lora
        a, b = _whole(lora.a.weight), _whole(lora.b.weight)
        for index, parameter in enumerate(linear.wgrad_parameters("weight")):
            local, (first, row) = _local(parameter)
            first = first if parameter.dim() == 3 else index
            full_name = f"{name}.weight" if parameter.dim() == 3 else f"{name}.weight{index}"
            if keep:
                originals[full_name] = _copy(local)
            members = _members(local) if parameter.dim() == 3 else (local,)
            layers.append(_merge(full_name, members, a, b, lora.config.scale, first, row))
        lora.merged = True
    for name, layer in _ordinary(model).items():
        weight = layer.get_submodule(BASE).get_parameter("weight")
        local, (row, _) = _local(weight)
        if keep:
            originals[f"{name}.{BASE}.weight"] = _copy(local)
        a, b = (_whole(factors["default"].weight)[None] for factors in (layer.lora_A, layer.lora_B))
        layers.append(_merge(name, (local,), a, b, lora_config(model).scale, 0, row))
        layer.merged_adapters.append("default")
    setattr(model, _ORIGINALS, originals if keep else None)
    return MergeReport(layers=tuple(layers))


@torch.no_grad()
def unmerge_lora(model: nn.Module) -> None:
    """Put back, bit by bit, the weights that `merge_lora` kept. ValueError where nothing is merged or kept."""
    model = unwrapped(model)
    if not hasattr(model, _ORIGINALS):
        raise ValueError("the adapters are not merged: nothing to take away")
    originals: dict[str, Tensor] | None = getattr(model, _ORIGINALS)
    if originals is None:
        raise ValueError("the weights before merging were not kept: expected merge_lora(model, keep=True)")
    for name, original in originals.items():
        _local(model.get_parameter(name))[0].copy_(original)
    for found in adapted_linears(model).values():
        found.lora.merged = False
    for layer in _ordinary(model).values():
        layer.merged_adapters.clear()
    delattr(model, _ORIGINALS)


def _merge(name: str, members: Any, a: Tensor, b: Tensor, scale: float, first: int, row: int) -> MergedLayer:
    """`members[i]` is expert first + i, its rows from `row` on."""
    error = weight = update = 0.0
    for e, member in enumerate(members, start=first):
        a_rD, b_Fr = a[min(e, len(a) - 1)].float(), b[min(e, len(b) - 1)].float()
        update_FD = scale * (b_Fr[row : row + member.shape[0]] @ a_rD)
        wanted_FD = _values(member) + update_FD
        member.copy_(wanted_FD)
        error += float((_values(member) - wanted_FD).square().sum())
        weight += float(wanted_FD.square().sum())
        update += float(update_FD.square().sum())
    return MergedLayer(
        name=name,
        quantized=any(isinstance(member, QuantizedTensor) for member in members),
        of_weight=(error / weight) ** 0.5 if weight else 0.0,
        of_update=(error / update) ** 0.5 if update else 0.0,
    )


def _ordinary(model: nn.Module) -> dict[str, Any]:
    """PEFT's layers by name."""
    return {name: m for name, m in model.named_modules() if hasattr(m, BASE) and hasattr(m, "merged_adapters")}


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def _local(parameter: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """This rank's part, and the first index of its first two dimensions."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), (0, 0)
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local().detach(), (offset[0], offset[1])


def _members(local: Tensor) -> tuple[Tensor, ...]:
    return local.members() if isinstance(local, GroupedTensor) else local.unbind(0)


def _values(member: Tensor) -> Tensor:
    return member.dequantize(torch.float32) if isinstance(member, QuantizedTensor) else member.float()


def _copy(local: Tensor) -> Tensor:
    copied = local.detach().clone()
    return copied.to("cpu") if copied.device.type != "cpu" else copied
