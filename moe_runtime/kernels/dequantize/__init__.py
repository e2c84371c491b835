"""The values of quantized bytes, in the matrix's own orientation whichever direction stored them.

    value = element * scale          NVFP4: element * (scale * tensor_scale)

float32 inside, one rounding to the dtype asked for. A NaN scale makes its block NaN. A rotated operand (NVFP4 with
random_hadamard, columnwise) is rotated back. No autograd here.
"""

# E members   R rows   C columns

import torch
from torch import Tensor

from moe_runtime.formats import HighPrecision, Quantized
from moe_runtime.kernels.dequantize import _native, _reference
from moe_runtime.kernels.select import Problem, Table, native, reference, triton, triton_missing

__all__ = ["DTYPES", "TABLE", "dequantize"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

if triton_missing() is None:
    from moe_runtime.kernels.dequantize import _triton

    _ON_GPU = triton(_triton, torch.uint8)
else:
    _ON_GPU = triton(None)

# The Triton kernels come last, so that only who asks for them by name gets them: they are not measured yet.
TABLE = Table("dequantize", (native(_native, torch.uint8), reference(_reference), _ON_GPU), probe_dtype=torch.uint8)


def dequantize(q: Quantized, dtype: torch.dtype = torch.bfloat16, *, backend: str | None = None) -> Tensor:
    """(E, R, C) or (R, C) contiguous values of `q` in `dtype`: float32, bfloat16 or float16."""
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    if isinstance(q.format, HighPrecision):
        raise ValueError(f"expected a quantized format, got {q.format}, whose values are stored as they are")
    run = TABLE.choose(Problem((q.payload,)), backend).dequantize
    one = q.payload.dim() == 2
    payload, scale, tensor_scale = (
        t[None] if one and t is not None else t for t in (q.payload, q.scale, q.tensor_scale)
    )
    x_ERC = run(payload, scale, tensor_scale, q.format, q.direction, dtype)
    return x_ERC[0] if one else x_ERC
