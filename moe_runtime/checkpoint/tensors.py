"""The global view of a rank's tensors: what makes a checkpoint independent of how it was sharded.

Every entry is a tensor of its global shape: a plain one where ranks are replicas, a DTensor where they hold parts. An
expert parameter is one tensor over all experts of all ranks, split over the expert axis first. A quantized one is its
bytes: "<name>.rowwise.qdata", "<name>.rowwise.scale", ... Entries alias the live storage, so that loading fills the
model in place.
"""

# E experts over the whole group

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from moe_runtime.comm.layout import ParallelLayout, layout_of
from moe_runtime.tensor import GroupedTensor, QuantizedTensor

_SUFFIXES = {
    f"{prefix}_{part}": f".{direction}.{name}"
    for direction, prefix in (("rowwise", "row"), ("columnwise", "column"))
    for part, name in (("payload", "qdata"), ("scale", "scale"), ("tensor_scale", "tensor_scale"))
}
_TRAINABLE_ONLY = "checkpoints_hold_trainable_only"
_MEMBER = re.compile(r"^(?P<stem>.*\.(?:weight|bias))(?P<index>\d+)$")


def split_member(name: str) -> tuple[str, int | None]:
    """(name of the tensor of all experts, expert) of one expert's separate parameter; (name, None) of any other."""
    member = _MEMBER.match(name)
    return (member["stem"], int(member["index"])) if member else (name, None)


def leave_out_frozen(model: nn.Module) -> None:
    """From now on checkpoints of `model` hold parameters that require gradients, no other ones and no buffers.

    For adapters on a base that is on disk already. The model remembers it, as it does its layout.
    """
    setattr(model, _TRAINABLE_ONLY, True)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, in the global view; what trains, where frozen ones are left out."""
    layout = layout_of(model)
    trainable_only = getattr(model, _TRAINABLE_ONLY, False)
    entries: dict[str, Tensor] = {}
    for name, parameter in named_parameters(model):
        if trainable_only and not parameter.requires_grad:
            continue
        key, parts = parts_of(name, parameter, layout)
        entries.update((f"{key}{suffix}", value) for suffix, value in parts.items())
    if trainable_only:
        return entries
    buffers = {name.removeprefix("module."): buffer for name, buffer in model.named_buffers()}
    persistent = {name.removeprefix("module.") for name in model.state_dict(keep_vars=True)}
    entries.update((name, buffer) for name, buffer in buffers.items() if name in persistent)
    return entries


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Optimizer state as "<parameter>.<key>", in the global view; parameters without state have no entry."""
    layout = layout_of(model)
    entries: dict[str, Tensor] = {}
    for name, parameter in named_parameters(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"optimizer state {key!r} of {name} must be a tensor to be saved, got {type(value).__name__}"
                )
            full_name, full = global_view(name, value, layout)
            entries[f"{full_name}.{key}"] = full
    return entries


@torch.no_grad()
def create_optimizer_state(optimizer: Optimizer) -> None:
    """Let the optimizer make its state, to load a checkpoint into: a step of size 0 with zero gradients.

    Parameters, and learning rates, are afterwards as they were.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            if parameter.grad is not None:
                raise ValueError("create the optimizer state before any gradient exists: found one")
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def shapes(entries: dict[str, Tensor]) -> dict[str, list[int]]:
    """Global shape of every entry: what tells one model's checkpoint from another's."""
    return {name: list(value.shape) for name, value in sorted(entries.items())}


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by their names in the model that DDP may wrap."""
    for name, parameter in model.named_parameters():
        yield name.removeprefix("module."), parameter


def parts_of(name: str, parameter: Tensor, layout: ParallelLayout) -> tuple[str, dict[str, Tensor]]:
    """A parameter's name and, by suffix, its tensors: itself under "", or each tensor of a quantized one."""
    local = local_of(parameter)
    if not isinstance(local, QuantizedTensor):
        key, value = global_view(name, parameter, layout)
        return key, {"": value}
    key, parts = name, {}
    for part, tensor in local.records.tensors().items():
        if isinstance(parameter, DTensor):
            # Sharded by whole experts, which are the first dimension of each tensor.
            shape = torch.Size((parameter.shape[0], *tensor.shape[1:]))
            stride = torch.empty(shape, device="meta").stride()
            mesh, placements = parameter.device_mesh, parameter.placements
            tensor = DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)
        key, parts[_SUFFIXES[part]] = global_view(name, tensor, layout)
    return key, parts


@torch.no_grad()
def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def forget_init_values(model: nn.Module) -> None:
    """Free what quantized parameters were once quantized from: it describes nothing that was loaded since."""
    for _, parameter in named_parameters(model):
        local = local_of(parameter)
        if isinstance(local, QuantizedTensor):
            local.clear_high_precision_init_val()


def global_view(name: str, value: Tensor, layout: ParallelLayout) -> tuple[str, Tensor]:
    """The name and tensor under which parameter `name`, or something of its shape, stands in a checkpoint."""
    value = _plain(value.detach())
    if name not in layout.expert_parameters:
        return name, value
    assert layout.expert_mesh is not None
    member = _MEMBER.match(name)
    if member:
        # Separate parameters are known by their expert's id over all ranks; only the ranks that hold it save it.
        count = sum(
            1 for other in layout.expert_parameters if other.startswith(member["stem"]) and _MEMBER.match(other)
        )
        return f"{member['stem']}{int(member['index']) + layout.expert_rank * count}", value
    if not value.dim():
        return name, value  # a step count, the same for every expert
    local, within = _local_and_placement(value)
    shape = (value.shape[0] * layout.expert, *value.shape[1:])
    stride = torch.empty(shape, device="meta").stride()
    placements = (Replicate(), Shard(0), within)
    return name, DTensor.from_local(
        local, layout.expert_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _plain(value: Tensor) -> Tensor:
    """`value` without a class of ours, on the same storage: files of plain tensors need no code of ours to be read."""
    if isinstance(value, DTensor):
        local = local_of(value)
        if not isinstance(local, GroupedTensor):
            return value
        mesh, placements, stride = value.device_mesh, value.placements, value.stride()
        return DTensor.from_local(_plain(local), mesh, placements, run_check=False, shape=value.shape, stride=stride)
    return value.as_subclass(Tensor) if isinstance(value, GroupedTensor) else value


def _local_and_placement(value: Tensor) -> tuple[Tensor, Placement]:
    if isinstance(value, DTensor):
        return value.to_local(), value.placements[-1]
    return value, Replicate()
