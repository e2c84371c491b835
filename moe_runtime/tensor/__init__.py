"""Storage: the packed expert parameter, plain or quantized, and the quantizer that a quantized one owns."""

import torch

from moe_runtime.tensor.grouped_tensor import GroupedTensor, QuantizedGroupedTensor, _rebuild
from moe_runtime.tensor.quantized_tensor import QuantizedTensor, rebuild_quantized
from moe_runtime.tensor.quantizer import Quantizer

# `torch.load(weights_only=True)` calls only what it was told about.
torch.serialization.add_safe_globals(
    [GroupedTensor, QuantizedGroupedTensor, QuantizedTensor, _rebuild, rebuild_quantized]
)

__all__ = ["GroupedTensor", "QuantizedGroupedTensor", "QuantizedTensor", "Quantizer"]
