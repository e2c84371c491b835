"""Materialize a model and fill it as its Hugging Face classes do, from a seed of each module's own."""

import copy
import hashlib
from collections.abc import Container, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from moe_runtime.checkpoint.tensors import split_member
from moe_runtime.core.errors import UnsupportedError
from moe_runtime.integrations.transformers.experts import TEMPLATE, experts_layout
from moe_runtime.nn import RoutedExperts, Router


@torch.no_grad()
def initialize(model: PreTrainedModel, *, seed: int, device: torch.device, leave: Container[str] = frozenset()) -> None:
    """Materialize what is on meta on `device` and fill it as the Hugging Face classes initialize it.

    Each module draws from a seed made of `seed` and its name, so the values depend neither on the order of modules nor
    on how the model is sharded: one module is filled whole, in fp32, and each rank keeps its part. Tensors that are
    real already are left as they are.

    leave  tensors that are made real and not filled: somebody else fills them. Separate experts' count as one tensor
    Raises UnsupportedError, naming it, for a tensor that no class initializes.
    """
    template: PreTrainedModel = model.__dict__[TEMPLATE]
    fresh = {
        full_name
        for name, module in model.named_modules()
        for key, t in _own_tensors(module)
        if t.is_meta and split_member(full_name := f"{name}.{key}")[0] not in leave
    }
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    model.tie_weights()
    for name, source in template.named_modules():
        if next(_own_tensors(source), None) is None:
            continue
        module = model.get_submodule(name)
        if isinstance(module, RoutedExperts):
            if any(full_name.startswith(f"{name}.") for full_name in fresh):
                _fill_experts(module, source, _initialized(template, name, seed, device))
                fresh = {full_name for full_name in fresh if not full_name.startswith(f"{name}.")}
            continue
        wanted = [key for key, _ in _own_tensors(source) if f"{name}.{key}" in fresh]
        if wanted:
            full = _initialized(template, name, seed, device)
            for key in wanted:
                _keep_part(dict(_own_tensors(module))[key], full[key])
                fresh.discard(f"{name}.{key}")
        if isinstance(module, Router) and module.expert_bias is not None and f"{name}.expert_bias" in fresh:
            module.expert_bias.zero_()
            fresh.discard(f"{name}.expert_bias")
    model.tie_weights()
    if fresh:
        raise UnsupportedError(f"nothing initializes {', '.join(sorted(fresh))}: make it real before initialize()")


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _initialized(template: PreTrainedModel, name: str, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Full fp32 values of one module's own tensors, as its class and those around it initialize them.

    The module is asked first, then every module that contains it, as transformers does: some classes initialize their
    children. All but this module's tensors are on meta, where initialization does nothing.
    """
    whole = copy.copy(template.get_submodule(name))
    whole._parameters = {
        key: None if p is None else nn.Parameter(_blank(p, device)) for key, p in whole._parameters.items()
    }
    whole._buffers = {key: None if b is None else _blank(b, device) for key, b in whole._buffers.items()}
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        current, path = whole, name
        template._init_weights(current)
        while path:
            path, _, child = path.rpartition(".")
            around = copy.copy(template.get_submodule(path))
            around._modules = {**around._modules, child: current}
            template._init_weights(around)
            current = around
    values = dict(_own_tensors(whole))
    for key, value in values.items():
        if value.is_floating_point() and value.isnan().any():
            raise UnsupportedError(f"{type(whole).__name__} leaves {name}.{key} uninitialized")
    return values


def _blank(tensor: Tensor, device: torch.device) -> Tensor:
    """A real tensor of this one's shape whose values show whether anything was written."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.full(tensor.shape, float("nan"), dtype=torch.float32, device=device)


def _fill_experts(module: RoutedExperts, source: nn.Module, full: Mapping[str, Tensor]) -> None:
    layout = experts_layout(source)
    for linear, key in ((module.experts.gate_up, layout.up_name), (module.experts.down, "down_proj")):
        first, last = module.first_expert, module.first_expert + linear.num_gemms
        weight_EFD = full[key].transpose(1, 2) if layout.is_transposed else full[key]
        values = {"weight": weight_EFD[first:last]}
        if linear.use_bias:
            values["bias"] = full[f"{key}_bias"][first:last]
        for kind, stacked in values.items():
            if linear.single_grouped_weight:
                _keep_part(linear.get_parameter(kind), stacked)
                continue
            for e, member in enumerate(stacked):
                _keep_part(linear.get_parameter(f"{kind}{e}"), member)


def _keep_part(target: Tensor, full: Tensor) -> None:
    """Copy into `target` the part of `full` that this rank holds."""
    if not isinstance(target, DTensor):
        target.copy_(full)
        return
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    part = full[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
    target.to_local().copy_(part)
