"""The down-projection's data gradient with SwiGLU's backward in its epilogue: what a layer's backward begins with.

    da[r] = dy[index[r]] @ w[e(r)]            never stored
    dh    = swiglu's gradient at h for gate * da
    a     = gate * silu(g) * u                again, for the weight gradient
    dgate = sum_f da * (silu(g) * u)          so that neither a nor the layer's output need be kept

da stays in fp32 where the kernels are fused. No autograd here.
"""

# T tokens   R routed rows   D model width   F expert width   H = 2 F   E local experts

from typing import NamedTuple

from torch import Tensor

from moe_runtime.kernels import grouped_gemm
from moe_runtime.kernels.gemm_dact import _reference
from moe_runtime.kernels.gemm_gather_act import check_gate
from moe_runtime.kernels.grouped_gemm import _hopper
from moe_runtime.kernels.select import Problem, Table, reference, triton_missing
from moe_runtime.kernels.swiglu import Layout

__all__ = ["TABLE", "ActivationGradients", "Preactivation", "gemm_dact"]

if triton_missing() is None:
    from moe_runtime.kernels.gemm_dact import _cuda, _triton

    _CUDA, _TRITON = _cuda.gemm_dact, _triton.gemm_dact
else:
    _CUDA, _TRITON = None, None


def _widths(problem: Problem) -> tuple[int, ...]:
    return problem.tensors[0].shape[-1], problem.tensors[1].shape[-1]


TABLE = Table(
    "gemm_dact",
    (_hopper.on_cuda(_CUDA, _widths), _hopper.on_triton(_TRITON, _widths), reference(_reference.gemm_dact)),
)


class Preactivation(NamedTuple):
    """What a forward left: h (R, 2F) before the activation, and the routing weight (R,), None for 1."""

    h_RH: Tensor
    gate_R: Tensor | None = None
    layout: Layout = "concatenated"


class ActivationGradients(NamedTuple):
    """dh (R, 2F), the activations a (R, F) if asked for, and dgate (R,) fp32, None without a gate."""

    dh_RH: Tensor
    a_RF: Tensor | None
    dgate_R: Tensor | None


def gemm_dact(
    dy_TD: Tensor,
    w_EDF: Tensor,
    saved: Preactivation,
    ends_E: Tensor,
    *,
    row_index_R: Tensor | None = None,
    activations: bool = True,
    backend: str | None = None,
) -> ActivationGradients:
    """dh, a and dgate of all rows; exact zeros from ends[-1] on.

    dy_TD        gradient rows (T, D); with `row_index_R` [R] int32 row r is dy[row_index[r]], without it dy[r]
    w_EDF        the down-projection (E, D, F)
    saved        h as gemm_gather_act gave it, in dy's dtype; a gate in fp32 or dy's dtype
    activations  whether to store a: weight gradients need it
    """
    grouped_gemm.check(dy_TD, w_EDF, ends_E, contracted=1, row_index_R=row_index_R)
    h_RH, gate_R, layout = saved
    num_rows = (dy_TD if row_index_R is None else row_index_R).shape[0]
    if h_RH.shape != (num_rows, 2 * w_EDF.shape[2]) or h_RH.dtype != dy_TD.dtype:
        raise ValueError(
            f"h must be {dy_TD.dtype} of shape ({num_rows}, {2 * w_EDF.shape[2]}), got {h_RH.dtype} {tuple(h_RH.shape)}"
        )
    if layout not in ("concatenated", "interleaved"):
        raise ValueError(f'layout must be "concatenated" or "interleaved", got {layout!r}')
    check_gate(gate_R, num_rows, dy_TD.dtype)
    run = TABLE.choose(Problem((dy_TD, w_EDF), layout), backend)
    return ActivationGradients(*run(dy_TD, w_EDF, saved, ends_E, row_index_R, activations))
