"""Dequantization in Triton: one pass, a columnwise record transposed on the way. Never waits for the GPU."""

# Triton compiles what is below, so its types are not Python's.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportCallIssue=false

# E members   R rows   C columns   M, N rows and columns of the stored matrix   P bytes of its row   X, Y blocks

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.formats import E2M1, HADAMARD_SIGNS, NVFP4, Format
from moe_runtime.formats.format import Direction
from moe_runtime.kernels.dequantize._triton_codes import (
    decode_e2m1,
    decode_fp8,
    decode_scale,
    narrow,
    torch_nan,
)
from moe_runtime.kernels.tiles import num_blocks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_SIGN_BITS = sum(1 << i for i, sign in enumerate(HADAMARD_SIGNS) if sign < 0)
_ALIGNMENT_BYTES = 16
_WORD = 4  # bytes of an int32, in which four-bit elements are read
_LONG = (64, 128)  # rows and columns of a tile that is stored as it is read
_SQUARE = (64, 64)  # of one that is transposed


def dequantize(
    payload_EMP: Tensor,
    scale: Tensor,
    tensor_scale_E: Tensor | None,
    fmt: Format,
    direction: Direction,
    dtype: torch.dtype,
) -> Tensor:
    """element * scale, or element * (scale * tensor_scale), in float32; then one rounding to `dtype`. (E, R, C)"""
    assert fmt.encoding is not None
    columnwise = direction == "columnwise"
    num_members, num_rows, num_columns = payload_EMP.shape
    num_columns *= 2 if fmt.encoding is E2M1 else 1
    shape = (num_members, num_columns, num_rows) if columnwise else (num_members, num_rows, num_columns)
    x_ERC = torch.empty(shape, dtype=dtype, device=payload_EMP.device)
    if not x_ERC.numel():
        return x_ERC
    rows, columns = _SQUARE if columnwise else _LONG
    num_tiles = num_members * num_blocks(num_rows, rows) * num_blocks(num_columns, columns)
    stored = stored_members(payload_EMP, scale, tensor_scale_E, fmt)
    _dequantize_kernel[(num_tiles,)](
        x_ERC,
        *stored.tensors,
        num_rows,
        num_columns,
        *stored.strides,
        **stored.meta(columns),
        TRANSPOSED=columnwise,
        SIGNS=_SIGN_BITS if isinstance(fmt, NVFP4) and fmt.random_hadamard and columnwise else None,
        M=rows,
        N=columns,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return x_ERC


@dataclass(frozen=True, slots=True)
class StoredMembers:
    """A record as kernels read it: payload, scale and tensor scale, and how far apart their members are."""

    tensors: tuple[Tensor, Tensor, Tensor | None]
    strides: tuple[int, int, int]
    unit: int
    format: Format

    def meta(self, columns: int) -> dict[str, Any]:
        """What `load_scaled` must know when it is compiled, for tiles of that many stored columns."""
        fmt = self.format
        assert fmt.encoding is not None
        block_rows, block_columns = fmt.block or (0, columns)
        return {
            "UNIT": self.unit,
            "FOUR_BITS": fmt.encoding is E2M1,
            "E5M2": fmt.encoding.name == "e5m2",
            "SCALE": "float32" if fmt.scale_encoding is None else fmt.scale_encoding.name,
            "BLOCK_ROWS": block_rows,
            "BLOCK": min(block_columns, columns),
            "WIDTH": block_columns,
        }


def stored_members(payload_EMP: Tensor, scale: Tensor, tensor_scale_E: Tensor | None, fmt: Format) -> StoredMembers:
    """Four-bit elements as int32 words; copies only of what is not dense within a member."""
    four_bits = fmt.encoding is E2M1
    stored_EMP = dense_members(payload_EMP, _WORD if four_bits else 1)
    stored_EMP = stored_EMP.view(torch.int32) if four_bits else stored_EMP
    scale = dense_members(scale)
    payload_stride, unit = member_stride(stored_EMP)
    strides = (payload_stride, scale.stride(0), 0 if tensor_scale_E is None else tensor_scale_E.stride(0))
    return StoredMembers((stored_EMP, scale, tensor_scale_E), strides, unit, fmt)


def dense_members(stored: Tensor, alignment: int = 1) -> Tensor:
    """The tensor itself where each member is dense, any stride apart, at multiples of `alignment` bytes; or a copy."""
    if stored.dim() == 1:
        return stored
    if stored.shape[0] == 1:
        stored = stored[0][None]  # whose stride no one chose
    apart = stored.stride(0) * stored.element_size()
    if apart % alignment or stored.data_ptr() % alignment or not stored[0].is_contiguous():
        return stored.clone(memory_format=torch.contiguous_format)
    return stored


def member_stride(stored: Tensor) -> tuple[int, int]:
    """(stride, unit) with stride * unit elements from a member to the next; whole 16 bytes show that loads may be wide.

    Only a unit that is known when the kernel is compiled tells it so; records of FSDP2 stand 16 bytes apart.
    """
    unit = _ALIGNMENT_BYTES // stored.element_size()
    return (stored.stride(0), 1) if stored.stride(0) % unit else (stored.stride(0) // unit, unit)


@triton.jit
def _load_values(
    payload_ptr,
    row_M,
    column,
    num_rows,
    num_columns,
    FOUR_BITS: tl.constexpr,
    E5M2: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Elements (M, N) in float32, of columns `column` .., zeros outside."""
    inside_M = row_M < num_rows
    if FOUR_BITS:
        word_W = column // 8 + tl.arange(0, N // 8)
        width = num_columns // 8
        pointers = payload_ptr + (row_M.to(tl.int64) * width)[:, None] + word_W[None, :]
        word_MW = tl.load(pointers, mask=inside_M[:, None] & (word_W < width)[None, :], other=0)
        value_MN = decode_e2m1(word_MW, M, N // 8)
    else:
        column_N = column + tl.arange(0, N)
        pointers = payload_ptr + (row_M.to(tl.int64) * num_columns)[:, None] + column_N[None, :]
        code_MN = tl.load(pointers, mask=inside_M[:, None] & (column_N < num_columns)[None, :], other=0)
        value_MN = decode_fp8(code_MN, E5M2)
    return value_MN


@triton.jit
def _butterfly(y_MN, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """(low + high, low - high) of columns D apart, in their places."""
    low, high = tl.split(tl.permute(tl.reshape(y_MN, (M, N // (2 * D), 2, D)), (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), (M, N))


@triton.jit
def _rotate_back(y_MN, SIGNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """d * (H y / 4) of each 16 adjacent columns; bit i of SIGNS set where d is -1."""
    y = _butterfly(y_MN, 1, M, N)
    y = _butterfly(y, 2, M, N)
    y = _butterfly(y, 4, M, N)
    y = _butterfly(y, 8, M, N)
    flipped_N = ((SIGNS >> (tl.arange(0, N) % 16)) & 1) << 31
    return ((y * 0.25).to(tl.int32, bitcast=True) ^ flipped_N[None, :]).to(tl.float32, bitcast=True)


@triton.jit
def _spread(value_MX, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """(M, N): the value of each element's block."""
    return tl.reshape(tl.broadcast_to(value_MX[:, :, None], (M, N // BLOCK, BLOCK)), (M, N))


@triton.jit
def load_scaled(
    payload_ptr,
    scale_ptr,
    tensor_scale,
    row_M,
    column,
    num_rows,
    num_columns,
    FOUR_BITS: tl.constexpr,
    E5M2: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Values (M, N) of one member in float32, and the scales they were multiplied by, one for BLOCK columns.

    Blocks are BLOCK_ROWS x WIDTH of the stored matrix, 0 rows: all of it. Zeros outside.
    """
    value_MN = _load_values(payload_ptr, row_M, column, num_rows, num_columns, FOUR_BITS, E5M2, M, N)
    if BLOCK_ROWS == 0:
        scale_MX = tl.load(scale_ptr)
        value_MN = value_MN * scale_MX
    else:
        start_X = column // WIDTH + tl.arange(0, N // BLOCK) * BLOCK // WIDTH
        start_M = (row_M // BLOCK_ROWS).to(tl.int64) * (num_columns // WIDTH)
        inside_MX = (row_M < num_rows)[:, None] & (start_X < num_columns // WIDTH)[None, :]
        scale_MX = tl.load(scale_ptr + start_M[:, None] + start_X[None, :], mask=inside_MX, other=0)
        scale_MX = decode_scale(scale_MX, tensor_scale, SCALE)
        value_MN = value_MN * _spread(scale_MX, M, N, BLOCK)
    return value_MN, scale_MX


@triton.jit
def _dequantize_kernel(
    x_ptr,
    payload_ptr,
    scale_ptr,
    tensor_scale_ptr,
    num_rows,
    num_columns,
    payload_stride,
    scale_stride,
    tensor_scale_stride,
    UNIT: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    E5M2: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SIGNS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """A tile of M x N."""
    across = tl.cdiv(num_columns, N)
    tiles = tl.cdiv(num_rows, M) * across
    member = (tl.program_id(0) // tiles).to(tl.int64)
    row_M = (tl.program_id(0) % tiles) // across * M + tl.arange(0, M)
    column = (tl.program_id(0) % tiles) % across * N
    tensor_scale = 1.0
    if tensor_scale_ptr is not None:
        tensor_scale = tl.load(tensor_scale_ptr + member * tensor_scale_stride)
    value_MN, scale_MX = load_scaled(
        payload_ptr + member * payload_stride * UNIT,
        scale_ptr + member * scale_stride,
        tensor_scale,
        row_M,
        column,
        num_rows,
        num_columns,
        FOUR_BITS,
        E5M2,
        SCALE,
        BLOCK_ROWS,
        BLOCK,
        WIDTH,
        M,
        N,
    )
    if SIGNS is not None:
        value_MN = _rotate_back(value_MN, SIGNS, M, N)
    # Elements of four bits are numbers: only their scale can be none.
    number_MN = _spread(scale_MX == scale_MX, M, N, BLOCK) if FOUR_BITS and SIGNS is None else value_MN == value_MN
    x_MN = torch_nan(narrow(value_MN, x_ptr.dtype.element_ty), number_MN)
    column_N = column + tl.arange(0, N)
    inside_MN = (row_M < num_rows)[:, None] & (column_N < num_columns)[None, :]
    if TRANSPOSED:
        start_N = (member * num_columns + column_N) * num_rows
        pointers = x_ptr + start_N[:, None] + row_M[None, :]
        tl.store(pointers, tl.trans(x_MN), mask=tl.trans(inside_MN))
    else:
        start_M = (member * num_rows + row_M) * num_columns
        tl.store(x_ptr + start_M[:, None] + column_N[None, :], x_MN, mask=inside_MN)
