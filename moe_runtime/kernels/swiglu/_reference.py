"""SwiGLU and its gradient in torch ops: the ground truth, and what runs where no kernel does. Never waits for a GPU."""

# R routed rows   F expert width   H = 2 F

import torch
from torch import Tensor


def swiglu(h_RH: Tensor, gate_R: Tensor | None, interleaved: bool) -> Tensor:
    """a = gate * (silu(g) * u)"""
    g_RF, u_RF = _halves(h_RH, interleaved)
    a_RF = g_RF * torch.sigmoid(g_RF) * u_RF
    if gate_R is not None:
        a_RF = gate_R.to(a_RF.dtype)[:, None] * a_RF
    return a_RF.to(h_RH.dtype)


def swiglu_backward(
    da_RF: Tensor, h_RH: Tensor, gate_R: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor | None]:
    """du = dp * silu(g), dg = dp * u * silu'(g) with dp = da * gate; dgate = sum_f da * (silu(g) * u)"""
    g_RF, u_RF = _halves(h_RH, interleaved)
    da_RF = da_RF.to(g_RF.dtype)
    sigmoid_RF = torch.sigmoid(g_RF)
    silu_RF = g_RF * sigmoid_RF
    dp_RF, dgate_R = da_RF, None
    if gate_R is not None:
        dp_RF = da_RF * gate_R.to(g_RF.dtype)[:, None]
        dgate_R = (da_RF * (silu_RF * u_RF)).sum(1)
    dg_RF = dp_RF * u_RF * (sigmoid_RF * (1 + g_RF * (1 - sigmoid_RF)))
    du_RF = dp_RF * silu_RF
    dh_RH = torch.stack((dg_RF, du_RF), dim=2).flatten(1) if interleaved else torch.cat((dg_RF, du_RF), dim=1)
    return dh_RH.to(h_RH.dtype), dgate_R


def _halves(h_RH: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """g and u, each (R, F), in fp32 (fp64 where h is)."""
    h_RH = h_RH if h_RH.dtype == torch.float64 else h_RH.float()
    if interleaved:
        return h_RH[:, 0::2], h_RH[:, 1::2]
    width = h_RH.shape[1] // 2
    return h_RH[:, :width], h_RH[:, width:]
