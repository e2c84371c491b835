"""Storage: the packed expert parameter."""

import torch

from moe_runtime.tensor.grouped_tensor import GroupedTensor

# `torch.load(weights_only=True)` rebuilds only classes it was told about.
torch.serialization.add_safe_globals([GroupedTensor])

__all__ = ["GroupedTensor"]
