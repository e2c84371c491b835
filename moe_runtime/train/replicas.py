"""Whether ranks that hold the same tensor hold the same bits: one checksum a tensor, one gather, and who is apart.

Parameters and persistent buffers are looked at. Which ranks hold the same part of a tensor follows from the layout:
rank = replica * shard + expert_data * expert + expert_rank.
"""

# P tensors of this rank   W ranks

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_runtime.checkpoint.tensors import local_of, named_parameters
from moe_runtime.comm.layout import ParallelLayout
from moe_runtime.tensor import QuantizedTensor


@dataclass(frozen=True, slots=True)
class Difference:
    """The first tensor, in the model's order, of which ranks hold different bits."""

    name: str
    ranks: tuple[int, ...]
    others: tuple[int, ...]

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.name} on rank {ranks} differs from the same tensor on rank {', '.join(map(str, self.others))}"


@torch.no_grad()
def first_difference(model: nn.Module, layout: ParallelLayout) -> Difference | None:
    """The same answer on every rank. A collective; the model must not be changing."""
    if layout.world == 1:
        return None
    held = _held(model, layout)
    own_P = torch.stack([_checksum(tensor) for _, tensor, _ in held]).cpu()
    every_WP = [torch.empty_like(own_P) for _ in range(layout.world)]
    dist.all_gather(every_WP, own_P)
    every_PW = torch.stack(every_WP).T.tolist()
    for (name, _, period), checksums_W in zip(held, every_PW, strict=True):
        for first in range(period):
            ranks = range(first, layout.world, period)
            (common, _), *rest = Counter(checksums_W[rank] for rank in ranks).most_common()
            if rest:
                apart = tuple(rank for rank in ranks if checksums_W[rank] != common)
                return Difference(name, apart, tuple(rank for rank in ranks if rank not in apart))
    return None


def _held(model: nn.Module, layout: ParallelLayout) -> list[tuple[str, Tensor, int]]:
    """(name, local tensor, period): ranks that are a multiple of `period` apart hold the same part."""
    held: list[tuple[str, Tensor, int]] = []
    for name, parameter in named_parameters(model):
        period = layout.expert if name in layout.expert_parameters else 1
        if isinstance(parameter, DTensor):
            period = layout.shard
        local = local_of(parameter.detach())
        parts = local.records.tensors() if isinstance(local, QuantizedTensor) else {"": local}
        held += [(f"{name}.{part}" if part else name, tensor, period) for part, tensor in parts.items()]
    persistent = model.state_dict(keep_vars=True)
    held += [
        (name.removeprefix("module."), local_of(buffer), 1)
        for name, buffer in model.named_buffers()
        if name in persistent
    ]
    return held


def _checksum(tensor: Tensor) -> Tensor:
    """int64 scalar that any one changed bit changes; rows are weighted, so that rows in another order are seen."""
    bits = tensor.contiguous().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    if not bits.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    sum_R = bits.view(torch.uint8).sum(-1, dtype=torch.int64) if bits.element_size() % 4 else _word_sums(bits)
    return (sum_R * (2 * torch.arange(len(sum_R), device=tensor.device) + 1)).sum()


def _word_sums(bits: Tensor) -> Tensor:
    return bits.view(torch.int32).sum(-1, dtype=torch.int64)
