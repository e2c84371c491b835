"""All experts' values at once, then grouped_gemm's product. Never waits for a GPU; holds (E, F, D) values meanwhile."""

# R routed rows   D in features   F out features   E local experts

from torch import Tensor

from moe_runtime.formats import Quantized
from moe_runtime.kernels.dequantize import dequantize
from moe_runtime.kernels.grouped_gemm import ragged_m_gemm_nn, ragged_m_gemm_nt


def gemm_dequant_nt(x_RD: Tensor, w: Quantized, ends_E: Tensor) -> Tensor:
    """y[r] = x[r] @ value(w[e(r)]).T"""
    return ragged_m_gemm_nt(x_RD, dequantize(w, x_RD.dtype), ends_E)


def gemm_dequant_nn(dy_RF: Tensor, w: Quantized, ends_E: Tensor) -> Tensor:
    """dx[r] = dy[r] @ value(w[e(r)])"""
    return ragged_m_gemm_nn(dy_RF, dequantize(w, dy_RF.dtype), ends_E)
