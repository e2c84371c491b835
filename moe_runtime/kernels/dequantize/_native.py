"""Dequantization in moe_runtime._C (csrc/cpu/dequantize.cpp), and its shape for tracing."""

# E members   R rows   C columns   M rows of the stored matrix   P bytes of its row

import torch
from torch import Tensor

from moe_runtime.formats import NVFP4, Format
from moe_runtime.formats.format import Direction
from moe_runtime.kernels.select import native_status

ELEMENTS = ("e4m3", "e5m2", "e2m1")  # by the number that the op takes
SCALES = ("e8m0", "e4m3", "float32")


def dequantize(
    payload_EMP: Tensor,
    scale: Tensor,
    tensor_scale_E: Tensor | None,
    fmt: Format,
    direction: Direction,
    dtype: torch.dtype,
) -> Tensor:
    """One pass; a columnwise record is transposed on the way. (E, R, C)"""
    assert fmt.encoding is not None
    columnwise = direction == "columnwise"
    block_rows, block_cols = fmt.block or (0, 0)
    return torch.ops.moe_runtime.dequantize.default(
        payload_EMP,
        scale,
        tensor_scale_E,
        ELEMENTS.index(fmt.encoding.name),
        SCALES.index("float32" if fmt.scale_encoding is None else fmt.scale_encoding.name),
        block_rows,
        block_cols,
        columnwise,
        isinstance(fmt, NVFP4) and fmt.random_hadamard and columnwise,
        dtype,
    )


if native_status().available:

    @torch.library.register_fake("moe_runtime::dequantize")
    def _(
        payload_EMP: Tensor,
        scale: Tensor,
        tensor_scale_E: Tensor | None,
        element: int,
        scale_kind: int,
        block_rows: int,
        block_cols: int,
        transposed: bool,
        rotated: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        num_members, rows, cols = payload_EMP.shape
        cols *= 2 if ELEMENTS[element] == "e2m1" else 1
        shape = (num_members, cols, rows) if transposed else (num_members, rows, cols)
        return payload_EMP.new_empty(shape, dtype=dtype)
