"""The up-projection with SwiGLU in its epilogue, in Triton for Hopper. Never waits for the GPU."""

# Triton compiles what is below, so its types are not Python's.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

# T tokens   R routed rows   D model width   F expert width   H = 2 F   E experts   M, C rows, columns of a tile

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.grouped_gemm import _tiles
from moe_runtime.kernels.grouped_gemm._triton_tiles import (
    INTERPRETED,
    Tile,
    dense,
    descriptor,
    dot,
    grouped_order,
    halves,
    row_tiles,
)
from moe_runtime.kernels.tiles import num_blocks


def gemm_gather_act(
    x_TD: Tensor,
    w_EHD: Tensor,
    ends_E: Tensor,
    gate_R: Tensor | None,
    row_index_R: Tensor | None,
    layout: str,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """h = x[index] @ w.T, a = gate * swiglu(h)"""
    num_rows = (x_TD if row_index_R is None else row_index_R).shape[0]
    (num_experts, _, depth), width = w_EHD.shape, w_EHD.shape[1] // 2
    h_RH = torch.empty(num_rows, 2 * width, dtype=x_TD.dtype, device=x_TD.device)
    a_RF = torch.empty(num_rows, width, dtype=x_TD.dtype, device=x_TD.device)
    if not h_RH.numel():
        return h_RH, a_RF
    if not num_experts or not depth:
        return h_RH.zero_(), a_RF.zero_()
    tile = tile or _tiles.gather_act(depth, gathered=row_index_R is not None)
    interleaved = layout == "interleaved"
    x_TD, w_EHD = dense(x_TD), dense(w_EHD)
    shape, block = [2 * num_experts, width, depth], [2, tile.columns // 2, tile.depth]
    if interleaved:
        shape, block = list(w_EHD.shape), [1, tile.columns, tile.depth]
    table_3N = row_tiles(ends_E.contiguous(), num_rows, tile.rows)
    num_m, num_c = table_3N.shape[1], num_blocks(2 * width, tile.columns)
    _gather_act_kernel[(num_m * num_c,)](
        h_RH,
        a_RF,
        x_TD if row_index_R is not None else descriptor(x_TD, [num_rows, depth], [tile.rows, tile.depth]),
        None if row_index_R is None else row_index_R.contiguous(),
        descriptor(w_EHD, shape, block),
        None if gate_R is None else gate_R.contiguous(),
        table_3N,
        num_m,
        num_experts,
        width,
        DEPTH=depth,
        INTERLEAVED=interleaved,
        UPCAST=INTERPRETED,
        **tile.meta(),
    )
    return h_RH, a_RF


@triton.jit
def _store(ptr, value_MC, row_M, stop, column_C, width):
    """value at rows row_M < stop and columns column_C < width of a matrix of that width."""
    tl.store(
        (ptr + row_M * width)[:, None] + column_C[None, :],
        value_MC.to(ptr.dtype.element_ty),
        mask=(row_M < stop)[:, None] & (column_C < width)[None, :],
    )


@triton.jit
def _load_rows(source, index_ptr, index_M, start, k, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr):
    """Columns k ... of the rows that index_M names, or without an index of those from `start` on."""
    if index_ptr is None:
        return source.load([start, k])
    else:
        column_K = k + tl.arange(0, BLOCK_K)
        ptrs = (source + index_M * DEPTH)[:, None] + column_K[None, :]
        if DEPTH % BLOCK_K:
            return tl.load(ptrs, mask=(column_K < DEPTH)[None, :], other=0.0)
        else:
            return tl.load(ptrs)


@triton.jit
def _store_h(h_ptr, h_MC, row_M, stop, c, width, INTERLEAVED: tl.constexpr, BLOCK_C: tl.constexpr):
    """A tile of h where its columns stand in memory, and its rounded halves."""
    ROWS: tl.constexpr = h_MC.shape[0]
    h_MC = h_MC.to(h_ptr.dtype.element_ty)
    g_MF, u_MF = halves(h_MC, ROWS, BLOCK_C, INTERLEAVED)
    h_ptr_M = h_ptr + row_M * (2 * width)
    inside_M = (row_M < stop)[:, None]
    if INTERLEAVED:
        column_C = c * BLOCK_C + tl.arange(0, BLOCK_C)
        tl.store(h_ptr_M[:, None] + column_C[None, :], h_MC, mask=inside_M & (column_C < 2 * width)[None, :])
    else:
        column_F = c * (BLOCK_C // 2) + tl.arange(0, BLOCK_C // 2)
        mask = inside_M & (column_F < width)[None, :]
        tl.store(h_ptr_M[:, None] + column_F[None, :], g_MF, mask=mask)
        tl.store((h_ptr_M + width)[:, None] + column_F[None, :], u_MF, mask=mask)
    return g_MF, u_MF


@triton.jit(do_not_specialize=["num_m", "num_experts"])
def _gather_act_kernel(
    h_ptr,
    a_ptr,
    x_source,
    index_ptr,
    w_desc,
    gate_ptr,
    table_ptr,
    num_m,
    num_experts,
    width,
    DEPTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A tile holds BLOCK_C / 2 gated columns and the linear columns of the same places."""
    m, c = grouped_order(tl.program_id(0), num_m, tl.cdiv(width, BLOCK_C // 2), GROUP)
    e = tl.load(table_ptr + m)
    start = tl.load(table_ptr + num_m + m)
    stop = tl.load(table_ptr + 2 * num_m + m)
    if start >= stop:
        return
    row_M = start.to(tl.int64) + tl.arange(0, BLOCK_M)
    column_F = c * (BLOCK_C // 2) + tl.arange(0, BLOCK_C // 2)
    acc = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    if e == num_experts:
        _store_h(h_ptr, acc, row_M, stop, c, width, INTERLEAVED, BLOCK_C)
        _store(a_ptr, tl.zeros((BLOCK_M, BLOCK_C // 2), tl.float32), row_M, stop, column_F, width)
        return
    index_M = row_M
    if index_ptr is not None:
        index_M = tl.load(index_ptr + row_M, mask=row_M < stop, other=0).to(tl.int64)
    for k in range(0, DEPTH, BLOCK_K):
        x = _load_rows(x_source, index_ptr, index_M, start, k, BLOCK_K, DEPTH)
        if INTERLEAVED:
            w = tl.reshape(w_desc.load([e, c * BLOCK_C, k]), (BLOCK_C, BLOCK_K))
        else:
            w = tl.reshape(w_desc.load([2 * e, c * (BLOCK_C // 2), k]), (BLOCK_C, BLOCK_K))
        acc = dot(x, w.T, acc, UPCAST)
    g_MF, u_MF = _store_h(h_ptr, acc, row_M, stop, c, width, INTERLEAVED, BLOCK_C)
    g_MF, u_MF = g_MF.to(tl.float32), u_MF.to(tl.float32)
    a_MF = g_MF * (1.0 / (1.0 + tl.exp(-g_MF))) * u_MF
    if gate_ptr is not None:
        a_MF = tl.load(gate_ptr + row_M, mask=row_M < stop, other=0.0).to(tl.float32)[:, None] * a_MF
    _store(a_ptr, a_MF, row_M, stop, column_F, width)
