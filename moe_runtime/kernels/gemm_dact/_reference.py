"""The same steps one after the other, through the ops that compute each."""

# T tokens   R routed rows   D model width   F expert width   H = 2 F   E local experts

from torch import Tensor

from moe_runtime.kernels.gemm_gather_act._reference import rows_past
from moe_runtime.kernels.grouped_gemm import ragged_m_gemm_nn
from moe_runtime.kernels.permute import gather_rows
from moe_runtime.kernels.swiglu import Layout, swiglu, swiglu_backward


def gemm_dact(
    dy_TD: Tensor,
    w_EDF: Tensor,
    saved: tuple[Tensor, Tensor | None, Layout],
    ends_E: Tensor,
    row_index_R: Tensor | None,
    activations: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """da = dy[index] @ w; dh, dgate = swiglu_backward(da, h); a = gate * swiglu(h)"""
    h_RH, gate_R, layout = saved
    dy_RD = dy_TD if row_index_R is None else gather_rows(dy_TD, row_index_R, ends_E, top_k=1)
    da_RF = ragged_m_gemm_nn(dy_RD, w_EDF, ends_E)
    if (past_R := rows_past(ends_E, len(h_RH))) is not None:
        # Selecting, not multiplying: h and the gate of a row without an expert may be NaN.
        h_RH = h_RH.masked_fill(past_R[:, None], 0)
        gate_R = None if gate_R is None else gate_R.masked_fill(past_R, 0)
    dh_RH, dgate_R = swiglu_backward(da_RF, h_RH, gate_R, layout=layout)
    a_RF = swiglu(h_RH, gate_R, layout=layout) if activations else None
    return dh_RH, a_RF, dgate_R
