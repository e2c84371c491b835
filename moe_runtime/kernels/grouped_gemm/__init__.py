"""The three GEMMs of a grouped linear layer, where expert e owns rows ends[e-1] <= r < ends[e].

    fprop  ragged_m_gemm_nt   y[r]  = x[r] @ w[e(r)].T          rows are ragged
    dgrad  ragged_m_gemm_nn   dx[r] = dy[r] @ w[e(r)]           rows are ragged
    wgrad  ragged_k_gemm_tn   dw[e] = dy[rows of e].T @ x[rows of e]   the contraction is ragged

Rows from ends[-1] on are never read and come out as exact zeros; an expert without rows gets an exactly zero dw.
fp32 accumulation, one rounding to the operands' dtype. No autograd here.
"""

# R routed rows   D in features   F out features   E local experts

from typing import Any

import torch
from torch import Tensor

from moe_runtime.kernels.grouped_gemm import _reference, _torch
from moe_runtime.kernels.select import Backend, Problem, Table, reference

TABLE = Table("grouped_gemm", (Backend("torch", _torch.refuses, _torch), reference(_reference)))


def ragged_m_gemm_nt(x_RD: Tensor, w_EFD: Tensor, ends_E: Tensor, *, backend: str | None = None) -> Tensor:
    """y[r] = x[r] @ w[e(r)].T, shape (R, F); zeros for r >= ends[-1]."""
    check(x_RD, w_EFD, ends_E, contracted=2)
    return _run(x_RD, w_EFD, backend).ragged_m_gemm_nt(x_RD, w_EFD, ends_E)


def ragged_m_gemm_nn(dy_RF: Tensor, w_EFD: Tensor, ends_E: Tensor, *, backend: str | None = None) -> Tensor:
    """dx[r] = dy[r] @ w[e(r)], shape (R, D); zeros for r >= ends[-1]."""
    check(dy_RF, w_EFD, ends_E, contracted=1)
    return _run(dy_RF, w_EFD, backend).ragged_m_gemm_nn(dy_RF, w_EFD, ends_E)


def ragged_k_gemm_tn(dy_RF: Tensor, x_RD: Tensor, ends_E: Tensor, *, backend: str | None = None) -> Tensor:
    """dw[e] = dy[rows of e].T @ x[rows of e], shape (E, F, D); exact zeros for an expert without rows."""
    if dy_RF.dim() != 2 or x_RD.dim() != 2 or len(dy_RF) != len(x_RD) or dy_RF.dtype != x_RD.dtype:
        raise ValueError(
            "wgrad needs dy (R, F) and x (R, D) of one dtype, got "
            f"{tuple(dy_RF.shape)} {dy_RF.dtype} and {tuple(x_RD.shape)} {x_RD.dtype}"
        )
    _check_ends(ends_E, ends_E.shape[0] if ends_E.dim() else 0, dy_RF)
    return _run(dy_RF, x_RD, backend).ragged_k_gemm_tn(dy_RF, x_RD, ends_E)


def check(rows_RK: Tensor, w_EFD: Tensor, ends_E: Tensor, *, contracted: int) -> None:
    """ValueError unless rows, weights and ends fit; `contracted` is the weight dim that the rows' columns meet."""
    if rows_RK.dim() != 2 or w_EFD.dim() != 3 or rows_RK.shape[1] != w_EFD.shape[contracted]:
        raise ValueError(
            f"expected rows (R, {w_EFD.shape[contracted] if w_EFD.dim() == 3 else '?'}) and weights (E, out, in), "
            f"got {tuple(rows_RK.shape)} and {tuple(w_EFD.shape)}"
        )
    if rows_RK.dtype != w_EFD.dtype:
        raise ValueError(f"rows and weights must have one dtype, got {rows_RK.dtype} and {w_EFD.dtype}")
    _check_ends(ends_E, w_EFD.shape[0], rows_RK)


def _check_ends(ends_E: Tensor, num_experts: int, rows_RK: Tensor) -> None:
    if ends_E.shape != (num_experts,) or ends_E.dtype != torch.int32 or ends_E.device != rows_RK.device:
        raise ValueError(
            f"ends must be int32 of shape ({num_experts},) on {rows_RK.device}, one end row per expert; "
            f"got {ends_E.dtype} of shape {tuple(ends_E.shape)} on {ends_E.device}"
        )
    if ends_E.device.type == "cpu" and num_experts:
        # Reading them costs nothing here, and a wrong end makes the product read or leave memory that is not its own.
        ends = ends_E.tolist()
        if any(a > b for a, b in zip([0, *ends], ends, strict=False)) or ends[-1] > len(rows_RK):
            raise ValueError(f"ends must not decrease and must stay within {len(rows_RK)} rows, got {ends}")


def _run(a: Tensor, b: Tensor, backend: str | None) -> Any:
    """The module of the backend that multiplies `a` and `b`."""
    return TABLE.choose(Problem((a, b)), backend)
