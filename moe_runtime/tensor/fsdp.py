"""One record of bytes an expert: what FSDP2 gathers of a quantized parameter, and the parameter in what it gathered.

    |-- row payload --|-- row scale --|-- row tensor scale --|-- column payload --| ...    uint8, each part padded to 16

A part of an expert is a view of its record, so the gathered bytes are the only copy.
"""

# E experts   B bytes of a record

from math import prod

import torch
from torch import Tensor

from moe_runtime.tensor.storage import InitValues, Records

__all__ = ["gathered", "record_bytes"]

_ALIGNMENT = 16


def record_bytes(records: Records) -> Tensor:
    """(E, B) uint8: the tensors of each expert, one after the other."""
    parts = []
    for tensor in records.tensors().values():
        flat_EB = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]
        bytes_EB = flat_EB.contiguous().view(torch.uint8)
        parts.append(torch.nn.functional.pad(bytes_EB, (0, -bytes_EB.shape[1] % _ALIGNMENT)))
    return torch.cat(parts, dim=1)


def gathered(record_EB: Tensor, template: Records) -> Records:
    """Records whose tensors are views of `record_EB`; `template` names them, with any number of experts."""
    tensors: dict[str, Tensor] = {}
    start = 0
    for name, like in template.tensors().items():
        size = prod(like.shape[1:]) * like.element_size()
        part_EB = record_EB[:, start : start + size].view(like.dtype)
        tensors[name] = part_EB.unflatten(1, like.shape[1:]) if like.dim() > 1 else part_EB[:, 0]
        start += size + (-size % _ALIGNMENT)
    return template.with_tensors(tensors, InitValues())
