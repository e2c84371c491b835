"""The operands as a product reads them: whole rows in memory, at an aligned address.

torch's grouped_mm refuses others. The CPU's BLAS takes them, with other bits: on an AMD EPYC a 5 x 1000 x 7 product in
fp32 depends on whether its rows start at a multiple of 16 bytes.
"""

import torch
from torch import Tensor

ALIGNMENT_BYTES = 16


def dense(operand: Tensor) -> Tensor:
    """`operand`, copied unless it is contiguous and aligned."""
    # `contiguous()` would keep any stride of a dimension of size 0 or 1; grouped_mm reads them all the same.
    expected, canonical = 1, True
    for size, stride in zip(reversed(operand.shape), reversed(operand.stride()), strict=True):
        canonical = canonical and stride == expected
        expected *= max(size, 1)
    if canonical and operand.data_ptr() % ALIGNMENT_BYTES == 0:
        return operand
    return torch.empty(operand.shape, dtype=operand.dtype, device=operand.device).copy_(operand)
