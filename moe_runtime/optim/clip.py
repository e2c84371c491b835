"""One gradient norm over expert and dense parameters, the same bits on every rank and for both weight layouts.

Each (parameter, expert) has one squared norm. Every rank adds what it alone holds into a vector of them, one all-reduce
completes the vector, and each rank sums it in the same order: experts of a weight in id order, then weights by name.
"""

# E experts over the whole group

import re
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from moe_runtime.comm.layout import ParallelLayout, layout_of

_DISCRETE = re.compile(r"^(?P<family>(?:.*\.)?(?:weight|bias))(?P<expert>\d+)$")


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale every gradient by min(1, max_norm / norm); returns the norm before scaling, a float64 scalar on the device.

    model     as `distribute` returned it, or any module in one process
    max_norm  > 0; infinity measures without scaling
    Parameters without a gradient count as zero. A non-finite norm is returned as it is and scales nothing.
    A gradient in `main_grad` belongs to whoever reduces it: RuntimeError.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if (coordinator := getattr(inner, "wgrad_coordinator", None)) is not None:
        coordinator.check_nothing_pending("clip_grad_norm_")
    layout = layout_of(model)
    named = [(name.removeprefix("module."), p) for name, p in model.named_parameters() if p.requires_grad]
    if fused := next((name for name, p in named if getattr(p, "grad_added_to_main_grad", False)), None):
        raise RuntimeError(
            f"clip_grad_norm_ reads .grad, and the gradient of {fused} is in main_grad: clip where main_grad is "
            "reduced, or build the layer with fuse_wgrad_accumulation=False"
        )
    norm = _total_norm(named, layout)
    if max_norm == float("inf"):
        return norm
    # The product with 1 is exact, so that a norm below the bound leaves every bit; no wait for the device.
    factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
    gradients = [_local(p.grad) for _, p in named if p.grad is not None]
    for group in _by_dtype(gradients):
        torch._foreach_mul_(group, factor.to(group[0].dtype))
    return norm


def _total_norm(named: list[tuple[str, nn.Parameter]], layout: ParallelLayout) -> Tensor:
    families: dict[str, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in named:
        match = _DISCRETE.match(name)
        families[match["family"] if match else name].append((name, parameter))
    device = named[0][1].device if named else torch.device("cpu")
    sizes = {family: _family_size(members, layout) for family, members in families.items()}
    squares = torch.zeros(sum(sizes.values()), dtype=torch.float64, device=device)
    first = 0
    for family in sorted(families):
        _add_squares(squares[first : first + sizes[family]], families[family], layout)
        first += sizes[family]
    if layout.world > 1:
        dist.all_reduce(squares)
    per_family = [piece.sum() for piece in squares.split([sizes[family] for family in sorted(families)])]
    return torch.stack(per_family).sum().sqrt() if per_family else squares.sum()


def _family_size(members: list[tuple[str, nn.Parameter]], layout: ParallelLayout) -> int:
    name, parameter = members[0]
    rows = parameter.shape[0] if _stacked(name, parameter) else len(members)
    return rows * (layout.expert if name in layout.expert_parameters else 1)


def _stacked(name: str, parameter: nn.Parameter) -> bool:
    """Whether rows of dim 0 are experts: packed weights (E, F, D) and packed biases (E, F)."""
    return parameter.dim() == 3 or (parameter.dim() == 2 and name.rpartition(".")[2] == "bias")


def _add_squares(slots: Tensor, members: list[tuple[str, nn.Parameter]], layout: ParallelLayout) -> None:
    name, parameter = members[0]
    is_expert = name in layout.expert_parameters
    if not _counts_here(parameter, is_expert, layout):
        return
    local_count = len(slots) // (layout.expert if is_expert else 1)
    base = layout.expert_rank * local_count if is_expert else 0
    if _stacked(name, parameter):
        if parameter.grad is not None:
            local_EFD = _local(parameter.grad)
            base += _first_row(parameter)
            _put(slots, base, list(local_EFD.unbind(0)))
        return
    ordered = sorted(members, key=lambda member: int(m["expert"]) if (m := _DISCRETE.match(member[0])) else 0)
    for offset, (_, member) in enumerate(ordered):
        if member.grad is not None:
            _put(slots, base + offset, [_local(member.grad)])


def _put(slots: Tensor, base: int, gradients: list[Tensor]) -> None:
    if gradients and gradients[0].numel():
        slots[base : base + len(gradients)] += _squared_norms(gradients)


def _squared_norms(gradients: list[Tensor]) -> Tensor:
    """float64, one for each tensor."""
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    if gradients[0].is_cuda:
        return torch.stack(torch._foreach_norm(gradients, 2, dtype)).double().square()
    # On the CPU torch adds a whole tensor's squares in one fp32 chain, which loses 2e-5 of a million; rows are short.
    rows = [gradient.reshape(-1, gradient.shape[-1] if gradient.dim() else 1) for gradient in gradients]
    norms = [torch.linalg.vector_norm(row, dim=1, dtype=dtype) for row in rows]
    return torch.stack([norm.double().square().sum() for norm in norms])


def _first_row(parameter: nn.Parameter) -> int:
    """Row of dim 0 at which this rank's shard starts, within the rows of the parameter's own mesh."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0]


def _counts_here(parameter: nn.Parameter, is_expert: bool, layout: ParallelLayout) -> bool:
    """Whether this rank's copy is the one that is counted: the first of its replicas."""
    if layout.world == 1:
        return True
    assert layout.dense_mesh is not None and layout.expert_mesh is not None
    if layout.dense_mesh.get_local_rank("replicate"):
        return False
    if isinstance(parameter, DTensor):
        return True
    axis = (layout.expert_mesh, "expert_data") if is_expert else (layout.dense_mesh, "shard")
    return axis[0].get_local_rank(axis[1]) == 0


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _by_dtype(gradients: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        groups[gradient.dtype].append(gradient)
    return list(groups.values())
