"""Routed rows back to token order: each token's sum over its K choices.

Routing weights are applied before (in kernels/swiglu); the way out is in kernels/permute. No autograd here.
"""

# T tokens   K top-k   R routed rows   D model width

from torch import Tensor

from moe_runtime.kernels.combine import _native, _reference
from moe_runtime.kernels.select import Problem, Table, native, reference, triton, triton_missing

__all__ = ["TABLE", "gather_sum"]

if triton_missing() is None:
    from moe_runtime.kernels.combine import _triton

    _ON_GPU = triton(_triton.gather_sum, *_triton.DTYPES)
else:
    _ON_GPU = triton(None)

TABLE = Table("gather_sum", (native(_native.gather_sum, *_native.DTYPES), _ON_GPU, reference(_reference.gather_sum)))


def gather_sum(y_RD: Tensor, row_TK: Tensor, *, backend: str | None = None) -> Tensor:
    """out[t] = sum_k y[row[t, k]] over increasing k, from +0 in fp32, rounded once to y's dtype; shape (T, D).

    row_TK [T, K] int32 is a Route's; a row of -1 contributes nothing and unnamed rows of y are not read. No atomics:
    the same bits at any thread count. Also the gradient of permute.gather_rows.
    """
    if y_RD.dim() != 2 or row_TK.dim() != 2:
        raise ValueError(f"expected y (R, D) and row (T, K), got {tuple(y_RD.shape)} and {tuple(row_TK.shape)}")
    return TABLE.choose(Problem((y_RD,)), backend)(y_RD, row_TK)
