"""Quantization in moe_runtime._C (csrc/cpu/quantize_*.cpp), and what tracing needs to know of it."""

# E members   R rows   C columns

import torch
from torch import Tensor

from moe_runtime.formats import MXFP4, MXFP8, NVFP4, Float8, Format, FP8Block
from moe_runtime.kernels.quantize._reference import Stored
from moe_runtime.kernels.select import native_status

ELEMENTS = ("e4m3", "e5m2", "e2m1")  # by the number that the ops take

_OPS = ("quantize_mx", "quantize_fp8_block", "quantize_float8", "quantize_nvfp4")


def quantize_into(
    x_ERC: Tensor, fmt: Format, row: Stored | None, column: Stored | None, seed: int | None, amax_E: Tensor | None
) -> None:
    """Both directions from one read of x; a format with a scale for the member reads x once more, for its amax."""
    ops = torch.ops.moe_runtime
    row_payload, row_scale, row_tensor_scale_E = row or (None, None, None)
    column_payload, column_scale, column_tensor_scale_E = column or (None, None, None)
    element = ELEMENTS.index(fmt.encoding.name) if fmt.encoding is not None else -1
    if isinstance(fmt, MXFP8 | MXFP4):
        ops.quantize_mx.default(x_ERC, element, row_payload, row_scale, column_payload, column_scale)
    elif isinstance(fmt, FP8Block):
        options = (fmt.two_dimensional, fmt.power_of_two)
        ops.quantize_fp8_block.default(x_ERC, element, *options, row_payload, row_scale, column_payload, column_scale)
    elif isinstance(fmt, Float8):
        scale_E = column_scale if row_scale is None else row_scale
        ops.quantize_float8.default(x_ERC, element, fmt.power_of_two, amax_E, row_payload, column_payload, scale_E)
    elif isinstance(fmt, NVFP4):
        ops.quantize_nvfp4.default(
            x_ERC,
            fmt.two_dimensional,
            fmt.random_hadamard,
            seed,
            amax_E,
            row_payload,
            row_scale,
            row_tensor_scale_E,
            column_payload,
            column_scale,
            column_tensor_scale_E,
        )
    else:
        raise TypeError(f"expected a quantized format, got {fmt!r}")


if native_status().available:
    for _op in _OPS:
        torch.library.register_fake(f"moe_runtime::{_op}", lambda *arguments: None)
