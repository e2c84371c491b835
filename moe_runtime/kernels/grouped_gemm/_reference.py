"""The grouped products as a loop over experts. Reads `ends` on the host: on a GPU that waits for the device."""

# R routed rows   D in features   F out features   E local experts

from collections.abc import Iterator

from torch import Tensor

from moe_runtime.kernels.grouped_gemm._operands import dense


def ragged_m_gemm_nt(x_RD: Tensor, w_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """y[r] = x[r] @ w[e(r)].T"""
    x_RD, w_EFD = dense(x_RD), dense(w_EFD)
    y_RF = x_RD.new_zeros(x_RD.shape[0], w_EFD.shape[1])
    for e, start, end in _groups(ends_E):
        y_RF[start:end] = x_RD[start:end] @ w_EFD[e].T
    return y_RF


def ragged_m_gemm_nn(dy_RF: Tensor, w_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """dx[r] = dy[r] @ w[e(r)]"""
    dy_RF, w_EFD = dense(dy_RF), dense(w_EFD)
    dx_RD = dy_RF.new_zeros(dy_RF.shape[0], w_EFD.shape[2])
    for e, start, end in _groups(ends_E):
        dx_RD[start:end] = dy_RF[start:end] @ w_EFD[e]
    return dx_RD


def ragged_k_gemm_tn(dy_RF: Tensor, x_RD: Tensor, ends_E: Tensor) -> Tensor:
    """dw[e] = dy[rows of e].T @ x[rows of e]"""
    dy_RF, x_RD = dense(dy_RF), dense(x_RD)
    dw_EFD = x_RD.new_zeros(ends_E.shape[0], dy_RF.shape[1], x_RD.shape[1])
    for e, start, end in _groups(ends_E):
        dw_EFD[e] = dy_RF[start:end].T @ x_RD[start:end]
    return dw_EFD


def _groups(ends_E: Tensor) -> Iterator[tuple[int, int, int]]:
    start = 0
    for e, end in enumerate(ends_E.tolist()):
        if end > start:
            yield e, start, end
        start = end
