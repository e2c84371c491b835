"""The grouped products in Triton for Hopper: tiles by the copy engine, counts read on the device, no host wait.

Operands come through tensor descriptors, which give zeros outside an expert. Sizes are those of _hopper's refusals.
"""

# Triton compiles what is below, so its types are not Python's.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

# R routed rows   D in features   F out features   E experts   T tokens   M, C, K rows, columns, depth of a tile

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged

from moe_runtime.kernels.grouped_gemm import _tiles
from moe_runtime.kernels.grouped_gemm._triton_tiles import (
    INTERPRETED,
    Tile,
    dense,
    descriptor,
    dot,
    grouped_order,
    largest_first,
    row_tiles,
)
from moe_runtime.kernels.tiles import num_blocks


def ragged_m_gemm_nt(x_RD: Tensor, w_EFD: Tensor, ends_E: Tensor, *, tile: Tile | None = None) -> Tensor:
    """y[r] = x[r] @ w[e(r)].T"""
    return _ragged_m(x_RD, w_EFD, ends_E, transposed=True, tile=tile)


def ragged_m_gemm_nn(dy_RF: Tensor, w_EFD: Tensor, ends_E: Tensor, *, tile: Tile | None = None) -> Tensor:
    """dx[r] = dy[r] @ w[e(r)]"""
    return _ragged_m(dy_RF, w_EFD, ends_E, transposed=False, tile=tile)


def _ragged_m(a_RK: Tensor, w: Tensor, ends_E: Tensor, *, transposed: bool, tile: Tile | None) -> Tensor:
    num_rows, depth = a_RK.shape
    num_experts, width = w.shape[0], w.shape[1] if transposed else w.shape[2]
    y_RC = torch.empty(num_rows, width, dtype=a_RK.dtype, device=a_RK.device)
    if not y_RC.numel():
        return y_RC
    if not num_experts or not depth:
        return y_RC.zero_()
    tile = tile or _tiles.ragged_m(depth)
    table_3N = row_tiles(ends_E.contiguous(), num_rows, tile.rows)
    block = [1, tile.columns, tile.depth] if transposed else [1, tile.depth, tile.columns]
    num_m, num_c = table_3N.shape[1], num_blocks(width, tile.columns)
    _ragged_m_kernel[(num_m * num_c,)](
        y_RC,
        descriptor(dense(a_RK), [num_rows, depth], [tile.rows, tile.depth]),
        descriptor(dense(w), list(w.shape), block),
        table_3N,
        num_m,
        num_experts,
        width,
        DEPTH=depth,
        TRANSPOSED=transposed,
        UPCAST=INTERPRETED,
        **tile.meta(),
    )
    return y_RC


def ragged_k_gemm_tn(
    dy_RF: Tensor,
    x_RD: Tensor,
    ends_E: Tensor,
    *,
    into_EFD: Tensor | None = None,
    accumulate: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """dw[e] = dy[rows of e].T @ x[rows of e], stored in or added to `into_EFD` where it is given"""
    num_experts, out, width = ends_E.shape[0], dy_RF.shape[1], x_RD.shape[1]
    dw_EFD = into_EFD
    if dw_EFD is None:
        dw_EFD = torch.empty(num_experts, out, width, dtype=x_RD.dtype, device=x_RD.device)
    num_rows = dy_RF.shape[0]
    if not dw_EFD.numel():
        return dw_EFD
    if not num_rows:
        return dw_EFD if accumulate else dw_EFD.zero_()
    tile = tile or _tiles.ragged_k(num_rows, num_experts)
    dy_RF, x_RD, ends_E = dense(dy_RF), dense(x_RD), ends_E.contiguous()
    num_m, num_c = num_blocks(out, tile.rows), num_blocks(width, tile.columns)
    _ragged_k_kernel[(num_experts * num_m * num_c,)](
        dw_EFD,
        create_ragged_descriptor(dy_RF, [tile.depth, tile.rows]),
        create_ragged_descriptor(x_RD, [tile.depth, tile.columns]),
        ends_E,
        largest_first(ends_E),
        num_m,
        num_c,
        out,
        width,
        ACCUMULATE=accumulate,
        INTERPRETED_ROWS=num_rows if INTERPRETED else 0,
        **tile.meta(),
    )
    return dw_EFD


@triton.jit(do_not_specialize=["num_m", "num_experts"])
def _ragged_m_kernel(
    y_ptr,
    a_desc,
    w_desc,
    table_ptr,
    num_m,
    num_experts,
    width,
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
    for k in range(0, DEPTH, BLOCK_K):
        a = a_desc.load([start, k])
        if TRANSPOSED:
            b = tl.reshape(w_desc.load([e, c * BLOCK_C, k]), (BLOCK_C, BLOCK_K)).T
        else:
            b = tl.reshape(w_desc.load([e, k, c * BLOCK_C]), (BLOCK_K, BLOCK_C))
        acc = dot(a, b, acc, UPCAST)
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_m", "num_c"])
def _ragged_k_kernel(
    dw_ptr,
    dy_desc,
    x_desc,
    ends_ptr,
    order_ptr,
    num_m,
    num_c,
    out,
    width,
    ACCUMULATE: tl.constexpr,
    INTERPRETED_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """dw[e] = dy[rows of e].T @ x[rows of e], the experts with many rows first."""
    program = tl.program_id(0)
    e = tl.load(order_ptr + program // (num_m * num_c))
    m, c = grouped_order(program % (num_m * num_c), num_m, num_c, GROUP)
    start = tl.load(ends_ptr + e - 1, mask=e > 0, other=0)
    count = tl.load(ends_ptr + e) - start
    if ACCUMULATE and count == 0:
        return
    acc = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    # The interpreter needs a bound it can read; past `count` every operand is zero.
    for k in range(0, INTERPRETED_ROWS if INTERPRETED_ROWS else count, BLOCK_K):
        dy = load_ragged(dy_desc, start, count, [k, m * BLOCK_M])
        x = load_ragged(x_desc, start, count, [k, c * BLOCK_C])
        acc = dot(dy.T, x, acc, INTERPRETED_ROWS > 0)
    row_M = m * BLOCK_M + tl.arange(0, BLOCK_M)
    column_C = c * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (row_M < out)[:, None] & (column_C < width)[None, :]
    dw_ptrs = (dw_ptr + (e.to(tl.int64) * out + row_M) * width)[:, None] + column_C[None, :]
    if ACCUMULATE:
        acc += tl.load(dw_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(dw_ptrs, acc.to(dw_ptr.dtype.element_ty), mask=mask)
