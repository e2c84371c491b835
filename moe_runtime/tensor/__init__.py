"""Storage: the packed expert parameter."""

import torch

from moe_runtime.tensor.grouped_tensor import GroupedTensor, _rebuild

# `torch.load(weights_only=True)` calls only what it was told about.
torch.serialization.add_safe_globals([GroupedTensor, _rebuild])

__all__ = ["GroupedTensor"]
