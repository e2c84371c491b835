"""The same three steps one after the other, through the ops that compute each."""

# T tokens   R routed rows   D model width   F expert width   H = 2 F   E local experts

import torch
from torch import Tensor

from moe_runtime.kernels.grouped_gemm import ragged_m_gemm_nt
from moe_runtime.kernels.permute import gather_rows
from moe_runtime.kernels.swiglu import Layout, swiglu


def gemm_gather_act(
    x_TD: Tensor,
    w_EHD: Tensor,
    ends_E: Tensor,
    gate_R: Tensor | None,
    row_index_R: Tensor | None,
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """h = x[index] @ w.T, a = gate * swiglu(h)"""
    x_RD = x_TD if row_index_R is None else gather_rows(x_TD, row_index_R, ends_E, top_k=1)
    h_RH = ragged_m_gemm_nt(x_RD, w_EHD, ends_E)
    past_R = rows_past(ends_E, len(h_RH))
    if gate_R is not None and past_R is not None:
        # A tail's gate may be NaN; its rows are zeros.
        gate_R = gate_R.masked_fill(past_R, 0)
    return h_RH, swiglu(h_RH, gate_R, layout=layout)


def rows_past(ends_E: Tensor, num_rows: int) -> Tensor | None:
    """(R,) whether no expert owns the row; None where it is seen, without waiting for a device, that all are owned."""
    if ends_E.device.type == "cpu" and not torch.compiler.is_compiling() and int(ends_E[-1]) == num_rows:
        return None
    return torch.arange(num_rows, device=ends_E.device) >= ends_E[-1]
