"""Grouped products with weights that are stored quantized, dequantized on the way: never a whole copy of them.

    fprop  gemm_dequant_nt   y[r]  = x[r] @ value(w[e(r)]).T
    dgrad  gemm_dequant_nn   dx[r] = dy[r] @ value(w[e(r)])

value() is kernels/dequantize's, rounded to the rows' dtype, so each backend multiplies the same numbers as a product
with the dequantized weight. Rows from ends[-1] on are never read and come out as exact zeros. No autograd here.
"""

# R routed rows   D in features   F out features   E local experts

from typing import Any

from torch import Tensor

from moe_runtime.formats import HighPrecision, Quantized
from moe_runtime.kernels import grouped_gemm
from moe_runtime.kernels.gemm_dequant import _reference, _whole
from moe_runtime.kernels.grouped_gemm import _hopper
from moe_runtime.kernels.select import Backend, Problem, Table, never_refuses, reference, triton_missing

__all__ = ["TABLE", "gemm_dequant_nn", "gemm_dequant_nt"]

if triton_missing() is None:
    from moe_runtime.kernels.gemm_dequant import _triton

    _TRITON = _triton
else:
    _TRITON = None


def _width(problem: Problem) -> tuple[int, ...]:
    return (problem.tensors[0].shape[-1],)


# The reference reads `ends` on the host, so a GPU gets the whole weight's values for the time of the product. The
# Triton kernel, which has none of them in memory, comes last: only who asks for it by name gets it, not being measured.
TABLE = Table(
    "gemm_dequant",
    (
        Backend("whole", never_refuses, _whole, device="cuda"),
        reference(_reference),
        _hopper.on_triton(_TRITON, _width),
    ),
)


def gemm_dequant_nt(x_RD: Tensor, w: Quantized, ends_E: Tensor, *, backend: str | None = None) -> Tensor:
    """y[r] = x[r] @ value(w[e(r)]).T, shape (R, F), x's dtype; zeros for r >= ends[-1].

    x_RD    rows sorted by expert, float32, bfloat16 or float16
    w       (E, F, D) in either direction; the Triton kernel takes the rowwise one
    ends_E  int32 end row of each expert
    """
    return _run(x_RD, w, ends_E, 2, backend).gemm_dequant_nt(x_RD, w, ends_E)


def gemm_dequant_nn(dy_RF: Tensor, w: Quantized, ends_E: Tensor, *, backend: str | None = None) -> Tensor:
    """dx[r] = dy[r] @ value(w[e(r)]), shape (R, D), dy's dtype; zeros for r >= ends[-1]. As `gemm_dequant_nt`."""
    return _run(dy_RF, w, ends_E, 1, backend).gemm_dequant_nn(dy_RF, w, ends_E)


def _run(rows_RK: Tensor, w: Quantized, ends_E: Tensor, contracted: int, backend: str | None) -> Any:
    """The module of the backend that multiplies these, once they fit."""
    if isinstance(w.format, HighPrecision) or len(w.shape) != 3:
        raise ValueError(f"expected a quantized stack (E, F, D), got {w.format.name} of shape {tuple(w.shape)}")
    # Without memory of its own: what the shape check needs is a tensor of the nominal shape.
    nominal = rows_RK.new_empty(1).expand(w.shape)
    grouped_gemm.check(rows_RK, nominal, ends_E, contracted=contracted)
    if w.payload.device != rows_RK.device:
        raise ValueError(f"rows and weights must be on one device, got {rows_RK.device} and {w.payload.device}")
    return TABLE.choose(Problem((rows_RK, w.payload)), backend)
