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

from moe_runtime.kernels.grouped_gemm import _hopper, _reference, _torch
from moe_runtime.kernels.permute import gather_rows
from moe_runtime.kernels.select import Backend, Problem, Table, reference, triton_missing

__all__ = ["TABLE", "check", "ragged_k_gemm_tn", "ragged_m_gemm_nn", "ragged_m_gemm_nt"]

if triton_missing() is None:
    from moe_runtime.kernels.grouped_gemm import _cuda, _triton

    _CUDA, _TRITON = _cuda, _triton
else:
    _CUDA, _TRITON = None, None


def _widths(problem: Problem) -> tuple[int, ...]:
    return problem.tensors[0].shape[-1], problem.tensors[1].shape[-1]


TABLE = Table(
    "grouped_gemm",
    (
        _hopper.on_cuda(_CUDA, _widths, _hopper.loses_to_torch),
        Backend("torch", _torch.refuses, _torch),
        _hopper.on_triton(_TRITON, _widths),
        reference(_reference),
    ),
)


def ragged_m_gemm_nt(x_RD: Tensor, w_EFD: Tensor, ends_E: Tensor, *, backend: str | None = None) -> Tensor:
    """y[r] = x[r] @ w[e(r)].T, shape (R, F); zeros for r >= ends[-1]."""
    check(x_RD, w_EFD, ends_E, contracted=2)
    return _run(x_RD, w_EFD, backend).ragged_m_gemm_nt(x_RD, w_EFD, ends_E)


def ragged_m_gemm_nn(dy_RF: Tensor, w_EFD: Tensor, ends_E: Tensor, *, backend: str | None = None) -> Tensor:
    """dx[r] = dy[r] @ w[e(r)], shape (R, D); zeros for r >= ends[-1]."""
    check(dy_RF, w_EFD, ends_E, contracted=1)
    return _run(dy_RF, w_EFD, backend).ragged_m_gemm_nn(dy_RF, w_EFD, ends_E)


def ragged_k_gemm_tn(
    dy_RF: Tensor,
    x_RD: Tensor,
    ends_E: Tensor,
    *,
    dy_index_R: Tensor | None = None,
    x_index_R: Tensor | None = None,
    into_EFD: Tensor | None = None,
    accumulate: bool = False,
    backend: str | None = None,
) -> Tensor:
    """dw[e] = dy[rows of e].T @ x[rows of e], shape (E, F, D); exact zeros for an expert without rows.

    dy_index_R, x_index_R  int32 (R,): row r of that operand is its row index[r], as gemm_gather_act has it
    into_EFD               contiguous tensor to store in, x's dtype or fp32; returned
    accumulate             add to what `into_EFD` holds; experts without rows are left alone
    """
    num_dy, num_x = len(dy_RF if dy_index_R is None else dy_index_R), len(x_RD if x_index_R is None else x_index_R)
    if dy_RF.dim() != 2 or x_RD.dim() != 2 or num_dy != num_x or dy_RF.dtype != x_RD.dtype:
        raise ValueError(
            "wgrad needs dy (R, F) and x (R, D) of one dtype, got "
            f"{tuple(dy_RF.shape)} {dy_RF.dtype} and {tuple(x_RD.shape)} {x_RD.dtype}"
        )
    _check_index(dy_index_R, dy_RF)
    _check_index(x_index_R, x_RD)
    _check_ends(ends_E, ends_E.shape[0] if ends_E.dim() else 0, dy_RF if dy_index_R is None else dy_index_R)
    _check_into(into_EFD, (ends_E.shape[0], dy_RF.shape[1], x_RD.shape[1]), x_RD, accumulate)
    run = _run(dy_RF, x_RD, backend)
    if run is not _CUDA or x_index_R is not None:
        dy_RF, dy_index_R = _rows(dy_RF, dy_index_R, ends_E), None
    if run is not _CUDA:
        x_RD, x_index_R = _rows(x_RD, x_index_R, ends_E), None
    if run is _CUDA:
        return run.ragged_k_gemm_tn(
            dy_RF,
            x_RD,
            ends_E,
            dy_index_R=dy_index_R,
            x_index_R=x_index_R,
            into_EFD=into_EFD,
            accumulate=accumulate,
        )
    if into_EFD is None:
        return run.ragged_k_gemm_tn(dy_RF, x_RD, ends_E)
    if run is _TRITON:
        return run.ragged_k_gemm_tn(dy_RF, x_RD, ends_E, into_EFD=into_EFD, accumulate=accumulate)
    dw_EFD = run.ragged_k_gemm_tn(dy_RF, x_RD, ends_E)
    return into_EFD.add_(dw_EFD) if accumulate else into_EFD.copy_(dw_EFD)


def _rows(rows: Tensor, index_R: Tensor | None, ends_E: Tensor) -> Tensor:
    return rows if index_R is None else gather_rows(rows, index_R, ends_E, top_k=1)


def _check_into(into_EFD: Tensor | None, shape: tuple[int, ...], x_RD: Tensor, accumulate: bool) -> None:
    if into_EFD is None:
        if accumulate:
            raise ValueError("accumulate needs a tensor to add to, got into_EFD=None")
        return
    if into_EFD.shape != shape or into_EFD.dtype not in (x_RD.dtype, torch.float32) or not into_EFD.is_contiguous():
        raise ValueError(
            f"into must be contiguous, float32 or {x_RD.dtype}, of shape {shape}; "
            f"got {into_EFD.dtype} of shape {tuple(into_EFD.shape)} and strides {into_EFD.stride()}"
        )


def check(
    rows_RK: Tensor, w_EFD: Tensor, ends_E: Tensor, *, contracted: int, row_index_R: Tensor | None = None
) -> None:
    """ValueError unless rows, weights, ends and index fit; `contracted` is the weight dim the rows' columns meet."""
    if rows_RK.dim() != 2 or w_EFD.dim() != 3 or rows_RK.shape[1] != w_EFD.shape[contracted]:
        raise ValueError(
            f"expected rows (R, {w_EFD.shape[contracted] if w_EFD.dim() == 3 else '?'}) and weights (E, out, in), "
            f"got {tuple(rows_RK.shape)} and {tuple(w_EFD.shape)}"
        )
    if rows_RK.dtype != w_EFD.dtype:
        raise ValueError(f"rows and weights must have one dtype, got {rows_RK.dtype} and {w_EFD.dtype}")
    _check_index(row_index_R, rows_RK)
    _check_ends(ends_E, w_EFD.shape[0], rows_RK if row_index_R is None else row_index_R)


def _check_index(row_index_R: Tensor | None, rows: Tensor) -> None:
    if row_index_R is None:
        return
    if row_index_R.dim() != 1 or row_index_R.dtype != torch.int32 or row_index_R.device != rows.device:
        raise ValueError(
            f"row_index must be int32 of shape (R,) on {rows.device}, the row that each routed row is; "
            f"got {row_index_R.dtype} of shape {tuple(row_index_R.shape)} on {row_index_R.device}"
        )


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
