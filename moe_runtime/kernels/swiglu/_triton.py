"""SwiGLU and its gradient in Triton: one pass over h, fp32 inside. The gate's gradient is summed in a fixed order.

The GPU's exp is a base-2 one on a rounded argument: its relative error grows with |g|, to about 1e-7 |g|.
"""

# Triton compiles what is below, so its types are not Python's.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportGeneralTypeIssues=false

# R routed rows   F expert width   H = 2 F   C columns of a tile

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.tiles import num_blocks, row_tile

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_FORWARD_ELEMENTS, _BACKWARD_ELEMENTS = 2048, 1024


def swiglu(h_RH: Tensor, gate_R: Tensor | None, interleaved: bool) -> Tensor:
    """a = gate * (silu(g) * u)"""
    h_RH = h_RH.contiguous()
    num_rows, width = h_RH.shape[0], h_RH.shape[1] // 2
    a_RF = h_RH.new_empty(num_rows, width)
    if not a_RF.numel():
        return a_RF
    rows, columns = row_tile(width, _FORWARD_ELEMENTS)
    _swiglu_kernel[(num_blocks(num_rows, rows), num_blocks(width, columns))](
        a_RF,
        h_RH,
        None if gate_R is None else gate_R.contiguous(),
        num_rows,
        width,
        INTERLEAVED=interleaved,
        ROWS=rows,
        COLUMNS=columns,
    )
    return a_RF


def swiglu_backward(
    da_RF: Tensor, h_RH: Tensor, gate_R: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor | None]:
    """dh and dgate; a program owns whole rows, so that each dgate is one program's sum."""
    da_RF, h_RH = da_RF.contiguous(), h_RH.contiguous()
    num_rows, width = da_RF.shape
    dh_RH = torch.empty_like(h_RH)
    dgate_R = None if gate_R is None else h_RH.new_empty(num_rows, dtype=torch.float32)
    if not num_rows:
        return dh_RH, dgate_R
    rows, columns = row_tile(width, _BACKWARD_ELEMENTS)
    _swiglu_backward_kernel[(num_blocks(num_rows, rows),)](
        dh_RH,
        dgate_R,
        da_RF,
        h_RH,
        None if gate_R is None else gate_R.contiguous(),
        num_rows,
        WIDTH=width,
        INTERLEAVED=interleaved,
        ROWS=rows,
        COLUMNS=columns,
    )
    return dh_RH, dgate_R


@triton.jit
def _load_halves(h_ptr_R, inside_R, start, width, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """g and u of columns start ..., in fp32; zeros outside. `h_ptr_R` points at the first column of each row."""
    if INTERLEAVED:
        column_H = 2 * start + tl.arange(0, 2 * COLUMNS)
        mask_RH = inside_R[:, None] & (column_H < 2 * width)[None, :]
        h_RH = tl.load(h_ptr_R[:, None] + column_H[None, :], mask=mask_RH, other=0.0)
        g_RC, u_RC = tl.split(tl.reshape(h_RH, (ROWS, COLUMNS, 2)))
    else:
        column_C = start + tl.arange(0, COLUMNS)
        mask_RC = inside_R[:, None] & (column_C < width)[None, :]
        g_RC = tl.load(h_ptr_R[:, None] + column_C[None, :], mask=mask_RC, other=0.0)
        u_RC = tl.load((h_ptr_R + width)[:, None] + column_C[None, :], mask=mask_RC, other=0.0)
    return g_RC.to(tl.float32), u_RC.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_kernel(
    a_ptr,
    h_ptr,
    gate_ptr,
    num_rows,
    width,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """a = gate * (silu(g) * u)"""
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * COLUMNS
    inside_R = row_R < num_rows
    g_RC, u_RC = _load_halves(h_ptr + row_R * (2 * width), inside_R, start, width, INTERLEAVED, ROWS, COLUMNS)
    a_RC = g_RC * (1.0 / (1.0 + tl.exp(-g_RC))) * u_RC
    if gate_ptr is not None:
        a_RC = tl.load(gate_ptr + row_R, mask=inside_R, other=0.0).to(tl.float32)[:, None] * a_RC
    column_C = start + tl.arange(0, COLUMNS)
    tl.store(
        (a_ptr + row_R * width)[:, None] + column_C[None, :],
        a_RC.to(a_ptr.dtype.element_ty),
        mask=inside_R[:, None] & (column_C < width)[None, :],
    )


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_backward_kernel(
    dh_ptr,
    dgate_ptr,
    da_ptr,
    h_ptr,
    gate_ptr,
    num_rows,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """du = dp * silu(g), dg = dp * u * silu'(g) with dp = da * gate; dgate = sum_f da * (silu(g) * u)"""
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside_R = row_R < num_rows
    h_ptr_R, dh_ptr_R, da_ptr_R = h_ptr + row_R * (2 * WIDTH), dh_ptr + row_R * (2 * WIDTH), da_ptr + row_R * WIDTH
    gate_R = tl.full((ROWS,), 1.0, tl.float32)
    if gate_ptr is not None:
        gate_R = tl.load(gate_ptr + row_R, mask=inside_R, other=0.0).to(tl.float32)
    dgate_RC = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        column_C = start + tl.arange(0, COLUMNS)
        mask_RC = inside_R[:, None] & (column_C < WIDTH)[None, :]
        da_RC = tl.load(da_ptr_R[:, None] + column_C[None, :], mask=mask_RC, other=0.0).to(tl.float32)
        g_RC, u_RC = _load_halves(h_ptr_R, inside_R, start, WIDTH, INTERLEAVED, ROWS, COLUMNS)
        sigmoid_RC = 1.0 / (1.0 + tl.exp(-g_RC))
        silu_RC = g_RC * sigmoid_RC
        dgate_RC += da_RC * (silu_RC * u_RC)
        dp_RC = da_RC * gate_R[:, None]
        dg_RC = (dp_RC * u_RC * (sigmoid_RC * (1.0 + g_RC * (1.0 - sigmoid_RC)))).to(dh_ptr.dtype.element_ty)
        du_RC = (dp_RC * silu_RC).to(dh_ptr.dtype.element_ty)
        if INTERLEAVED:
            column_H = 2 * start + tl.arange(0, 2 * COLUMNS)
            mask_RH = inside_R[:, None] & (column_H < 2 * WIDTH)[None, :]
            dh_RH = tl.reshape(tl.join(dg_RC, du_RC), (ROWS, 2 * COLUMNS))
            tl.store(dh_ptr_R[:, None] + column_H[None, :], dh_RH, mask=mask_RH)
        else:
            tl.store(dh_ptr_R[:, None] + column_C[None, :], dg_RC, mask=mask_RC)
            tl.store((dh_ptr_R + WIDTH)[:, None] + column_C[None, :], du_RC, mask=mask_RC)
    if gate_ptr is not None:
        tl.store(dgate_ptr + row_R, tl.sum(dgate_RC, axis=1), mask=inside_R)
