"""Grouped products whose weights are dequantized inside the tile, in Triton for Hopper. Never waits for the GPU.

A program reads its tile's bytes and scales, makes the rows' dtype of them in registers, and multiplies: what is in
memory stays as it is stored. Rowwise records only: a columnwise one has the other operand's order.
"""

# Triton compiles what is below, so its types are not Python's.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

# R routed rows   D in features   F out features   E experts   M, C, K rows, columns, depth of a tile

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.core.errors import UnsupportedError
from moe_runtime.formats import Quantized
from moe_runtime.kernels.dequantize._triton import load_scaled, stored_members
from moe_runtime.kernels.dequantize._triton_codes import narrow
from moe_runtime.kernels.grouped_gemm import _tiles
from moe_runtime.kernels.grouped_gemm._triton_tiles import (
    INTERPRETED,
    Tile,
    dense,
    descriptor,
    dot,
    grouped_order,
    row_tiles,
)
from moe_runtime.kernels.tiles import num_blocks


def gemm_dequant_nt(x_RD: Tensor, w: Quantized, ends_E: Tensor, *, tile: Tile | None = None) -> Tensor:
    """y[r] = x[r] @ value(w[e(r)]).T"""
    return _ragged_m(x_RD, w, ends_E, transposed=True, tile=tile)


def gemm_dequant_nn(dy_RF: Tensor, w: Quantized, ends_E: Tensor, *, tile: Tile | None = None) -> Tensor:
    """dx[r] = dy[r] @ value(w[e(r)])"""
    return _ragged_m(dy_RF, w, ends_E, transposed=False, tile=tile)


def _ragged_m(a_RK: Tensor, w: Quantized, ends_E: Tensor, *, transposed: bool, tile: Tile | None) -> Tensor:
    if w.direction != "rowwise":
        raise UnsupportedError(f"the Triton gemm_dequant reads rowwise records, got a {w.direction} one")
    num_rows, depth = a_RK.shape
    num_experts, width = w.shape[0], w.shape[1] if transposed else w.shape[2]
    y_RC = torch.empty(num_rows, width, dtype=a_RK.dtype, device=a_RK.device)
    if not y_RC.numel():
        return y_RC
    if not num_experts or not depth:
        return y_RC.zero_()
    tile = tile or _tiles.dequant()
    table_3N = row_tiles(ends_E.contiguous(), num_rows, tile.rows)
    num_m, num_c = table_3N.shape[1], num_blocks(width, tile.columns)
    stored = stored_members(w.payload, w.scale, w.tensor_scale, w.format)
    _gemm_dequant_kernel[(num_m * num_c,)](
        y_RC,
        descriptor(dense(a_RK), [num_rows, depth], [tile.rows, tile.depth]),
        *stored.tensors,
        table_3N,
        num_m,
        num_experts,
        width,
        *stored.strides,
        **stored.meta(tile.depth if transposed else tile.columns),
        DEPTH=depth,
        TRANSPOSED=transposed,
        UPCAST=INTERPRETED,
        **tile.meta(),
    )
    return y_RC


@triton.jit(do_not_specialize=["num_m", "num_experts"])
def _gemm_dequant_kernel(
    y_ptr,
    a_desc,
    payload_ptr,
    scale_ptr,
    tensor_scale_ptr,
    table_ptr,
    num_m,
    num_experts,
    width,
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
    DEPTH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """y[r] = a[r] @ w[e(r)] (w[e(r)].T where TRANSPOSED); zeros in the tiles of expert E."""
    m, c = grouped_order(tl.program_id(0), num_m, tl.cdiv(width, BLOCK_C), GROUP)
    e = tl.load(table_ptr + m)
    start = tl.load(table_ptr + num_m + m)
    stop = tl.load(table_ptr + 2 * num_m + m)
    if start >= stop:
        return
    row_M = start.to(tl.int64) + tl.arange(0, BLOCK_M)
    column_C = c * BLOCK_C + tl.arange(0, BLOCK_C)
    y_ptrs = (y_ptr + row_M * width)[:, None] + column_C[None, :]
    mask = (row_M < stop)[:, None] & (column_C < width)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    if e == num_experts:
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)
        return
    member = e.to(tl.int64)
    tensor_scale = 1.0
    if tensor_scale_ptr is not None:
        tensor_scale = tl.load(tensor_scale_ptr + member * tensor_scale_stride)
    payload_ptr += member * payload_stride * UNIT
    scale_ptr += member * scale_stride
    # The stored matrix has the contraction along its columns where TRANSPOSED, along its rows otherwise.
    ROWS: tl.constexpr = BLOCK_C if TRANSPOSED else BLOCK_K
    COLUMNS: tl.constexpr = BLOCK_K if TRANSPOSED else BLOCK_C
    num_stored_rows = width if TRANSPOSED else DEPTH
    num_stored_columns = DEPTH if TRANSPOSED else width
    for k in range(0, DEPTH, BLOCK_K):
        a = a_desc.load([start, k])
        value, _ = load_scaled(
            payload_ptr,
            scale_ptr,
            tensor_scale,
            (c * BLOCK_C if TRANSPOSED else k) + tl.arange(0, ROWS),
            k if TRANSPOSED else c * BLOCK_C,
            num_stored_rows,
            num_stored_columns,
            FOUR_BITS,
            E5M2,
            SCALE,
            BLOCK_ROWS,
            BLOCK,
            WIDTH,
            ROWS,
            COLUMNS,
        )
        w = narrow(value, y_ptr.dtype.element_ty)
        acc = dot(a, w.T if TRANSPOSED else w, acc, UPCAST)
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)
