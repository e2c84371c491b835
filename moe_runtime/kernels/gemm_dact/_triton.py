"""The down-projection's data gradient with SwiGLU's backward in its epilogue, in Triton for Hopper.

Each program writes its tile's part of dgate beside the others; their sum has a fixed order. Never waits for the GPU.
"""

# Triton compiles what is below, so its types are not Python's.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportUnboundVariable=false

# T tokens   R routed rows   D model width   F expert width   H = 2 F   E experts   M, C rows, columns of a tile
# N column tiles

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.gemm_gather_act._triton import _load_rows, _store
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


def gemm_dact(
    dy_TD: Tensor,
    w_EDF: Tensor,
    saved: tuple[Tensor, Tensor | None, str],
    ends_E: Tensor,
    row_index_R: Tensor | None,
    activations: bool,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """da = dy[index] @ w; dh, dgate = swiglu_backward(da, h); a = gate * swiglu(h)"""
    h_RH, gate_R, layout = saved
    num_rows = h_RH.shape[0]
    num_experts, depth, width = w_EDF.shape
    h_RH = h_RH.contiguous()
    dh_RH = torch.empty_like(h_RH)
    a_RF = h_RH.new_empty(num_rows, width) if activations else None
    if not h_RH.numel() or not num_experts or not depth:
        dgate_R = None if gate_R is None else h_RH.new_zeros(num_rows, dtype=torch.float32)
        return dh_RH.zero_(), None if a_RF is None else a_RF.zero_(), dgate_R
    tile = tile or _tiles.dact()
    table_3N = row_tiles(ends_E.contiguous(), num_rows, tile.rows)
    num_m, num_c = table_3N.shape[1], num_blocks(width, tile.columns)
    dgate_NR = None if gate_R is None else h_RH.new_empty(num_c, num_rows, dtype=torch.float32)
    dy_TD = dense(dy_TD)
    _dact_kernel[(num_m * num_c,)](
        dh_RH,
        a_RF,
        dgate_NR,
        dy_TD if row_index_R is not None else descriptor(dy_TD, [num_rows, depth], [tile.rows, tile.depth]),
        None if row_index_R is None else row_index_R.contiguous(),
        descriptor(dense(w_EDF), [num_experts, depth, width], [1, tile.depth, tile.columns]),
        h_RH,
        None if gate_R is None else gate_R.contiguous(),
        table_3N,
        num_m,
        num_experts,
        num_rows,
        width,
        DEPTH=depth,
        INTERLEAVED=layout == "interleaved",
        UPCAST=INTERPRETED,
        **tile.meta(),
    )
    if dgate_NR is None:
        return dh_RH, a_RF, None
    return dh_RH, a_RF, dgate_NR[0] if num_c == 1 else dgate_NR.sum(0)


@triton.jit
def _differentiate(
    dh_ptr,
    a_ptr,
    h_ptr,
    da_MF,
    gate_M,
    row_M,
    read,
    stop,
    column,
    width,
    INTERLEAVED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store dh and a of COLUMNS columns from `column` on; returns the sum over them of da * (silu(g) * u).

    h is zero in rows from `read` on; rows from `stop` on are not written.
    """
    ROWS: tl.constexpr = da_MF.shape[0]
    inside_M, read_M = (row_M < stop)[:, None], (row_M < read)[:, None]
    column_F = column + tl.arange(0, COLUMNS)
    if INTERLEAVED:
        column_H = 2 * column + tl.arange(0, 2 * COLUMNS)
        h_offsets = (row_M * (2 * width))[:, None] + column_H[None, :]
        inside_H = (column_H < 2 * width)[None, :]
        h_MH = tl.load(h_ptr + h_offsets, mask=read_M & inside_H, other=0.0)
        g_MF, u_MF = halves(h_MH, ROWS, 2 * COLUMNS, True)
    else:
        offsets = (row_M * (2 * width))[:, None] + column_F[None, :]
        inside_F = (column_F < width)[None, :]
        g_MF = tl.load(h_ptr + offsets, mask=read_M & inside_F, other=0.0)
        u_MF = tl.load(h_ptr + width + offsets, mask=read_M & inside_F, other=0.0)
    g_MF, u_MF = g_MF.to(tl.float32), u_MF.to(tl.float32)
    sigmoid_MF = 1.0 / (1.0 + tl.exp(-g_MF))
    silu_MF = g_MF * sigmoid_MF
    product_MF = silu_MF * u_MF
    if a_ptr is not None:
        _store(a_ptr, gate_M[:, None] * product_MF, row_M, stop, column_F, width)
    dp_MF = da_MF * gate_M[:, None]
    dg_MF = (dp_MF * u_MF * (sigmoid_MF * (1.0 + g_MF * (1.0 - sigmoid_MF)))).to(dh_ptr.dtype.element_ty)
    du_MF = (dp_MF * silu_MF).to(dh_ptr.dtype.element_ty)
    if INTERLEAVED:
        tl.store(dh_ptr + h_offsets, tl.reshape(tl.join(dg_MF, du_MF), (ROWS, 2 * COLUMNS)), mask=inside_M & inside_H)
    else:
        tl.store(dh_ptr + offsets, dg_MF, mask=inside_M & inside_F)
        tl.store(dh_ptr + width + offsets, du_MF, mask=inside_M & inside_F)
    return tl.sum(da_MF * product_MF, axis=1)


@triton.jit(do_not_specialize=["num_m", "num_experts", "num_rows"])
def _dact_kernel(
    dh_ptr,
    a_ptr,
    dgate_ptr,
    dy_source,
    index_ptr,
    w_desc,
    h_ptr,
    gate_ptr,
    table_ptr,
    num_m,
    num_experts,
    num_rows,
    width,
    DEPTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile of da in registers, then its part of dh, a and dgate, half of its columns at a time."""
    m, c = grouped_order(tl.program_id(0), num_m, tl.cdiv(width, BLOCK_C), GROUP)
    e = tl.load(table_ptr + m)
    start = tl.load(table_ptr + num_m + m)
    stop = tl.load(table_ptr + 2 * num_m + m)
    if start >= stop:
        return
    row_M = start.to(tl.int64) + tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    owned = e < num_experts
    if owned:
        index_M = row_M
        if index_ptr is not None:
            index_M = tl.load(index_ptr + row_M, mask=row_M < stop, other=0).to(tl.int64)
        for k in range(0, DEPTH, BLOCK_K):
            dy = _load_rows(dy_source, index_ptr, index_M, start, k, BLOCK_K, DEPTH)
            w = tl.reshape(w_desc.load([e, k, c * BLOCK_C]), (BLOCK_K, BLOCK_C))
            acc = dot(dy, w, acc, UPCAST)
    # A tail is written as zeros: nothing of it is read.
    read = tl.where(owned, stop, start)
    gate_M = tl.full((BLOCK_M,), 1.0, tl.float32)
    if gate_ptr is not None:
        gate_M = tl.load(gate_ptr + row_M, mask=row_M < read, other=0.0).to(tl.float32)
    # A part of the columns at a time, or h and the results would not fit the registers beside da.
    PART: tl.constexpr = BLOCK_C // 4
    column = c * BLOCK_C
    first, second = halves(acc, BLOCK_M, BLOCK_C, False)
    sum_M = tl.zeros((BLOCK_M,), tl.float32)
    for half in tl.static_range(2):
        both = first if half == 0 else second
        left, right = halves(both, BLOCK_M, BLOCK_C // 2, False)
        for quarter in tl.static_range(2):
            da_MF = left if quarter == 0 else right
            at = column + (2 * half + quarter) * PART
            sum_M += _differentiate(
                dh_ptr, a_ptr, h_ptr, da_MF, gate_M, row_M, read, stop, at, width, INTERLEAVED, PART
            )
    if gate_ptr is not None:
        tl.store(dgate_ptr + c.to(tl.int64) * num_rows + row_M, sum_M, mask=row_M < stop)
