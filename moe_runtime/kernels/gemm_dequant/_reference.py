"""One expert's values at a time: at no moment more than (F, D) of them. Reads `ends` on the host."""

# R routed rows   D in features   F out features   E local experts

from collections.abc import Callable

from torch import Tensor

from moe_runtime.formats import Quantized
from moe_runtime.kernels.dequantize import dequantize
from moe_runtime.kernels.grouped_gemm import ragged_m_gemm_nn, ragged_m_gemm_nt


def gemm_dequant_nt(x_RD: Tensor, w: Quantized, ends_E: Tensor) -> Tensor:
    """y[r] = x[r] @ value(w[e(r)]).T"""
    return _each(x_RD, w, ends_E, w.shape[1], ragged_m_gemm_nt)


def gemm_dequant_nn(dy_RF: Tensor, w: Quantized, ends_E: Tensor) -> Tensor:
    """dx[r] = dy[r] @ value(w[e(r)])"""
    return _each(dy_RF, w, ends_E, w.shape[2], ragged_m_gemm_nn)


def _each(rows_RK: Tensor, w: Quantized, ends_E: Tensor, width: int, product: Callable[..., Tensor]) -> Tensor:
    out = rows_RK.new_zeros(rows_RK.shape[0], width)
    start = 0
    for e, end in enumerate(ends_E.tolist()):
        if end > start:
            values = dequantize(w.member(e), rows_RK.dtype)
            out[start:end] = product(rows_RK[start:end], values[None], ends_E.new_tensor([end - start]))
        start = end
    return out
