"""The up-projection with SwiGLU in its epilogue, its rows taken by index: one kernel from tokens to activations.

    h[r] = x[index[r]] @ w[e(r)].T        a[r] = gate[r] * silu(g) * u, with g and u the halves of h[r]

h is what backward needs; the rows of x in expert order never exist. Both come out as exact zeros from ends[-1] on. a is
made from h as rounded, so that backward recomputes the same bits. No autograd here.
"""

# T tokens   R routed rows   D model width   F expert width   H = 2 F   E local experts

from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels import grouped_gemm
from moe_runtime.kernels.gemm_gather_act import _reference
from moe_runtime.kernels.grouped_gemm import _hopper
from moe_runtime.kernels.select import Problem, Table, reference, triton_missing
from moe_runtime.kernels.swiglu import Layout

__all__ = ["TABLE", "Activated", "check_gate", "gemm_gather_act"]

if triton_missing() is None:
    from moe_runtime.kernels.gemm_gather_act import _cuda, _triton

    _CUDA, _TRITON = _cuda.gemm_gather_act, _triton.gemm_gather_act
else:
    _CUDA, _TRITON = None, None


def _widths(problem: Problem) -> tuple[int, ...]:
    return problem.tensors[0].shape[-1], problem.tensors[1].shape[-2] // 2


TABLE = Table(
    "gemm_gather_act",
    (_hopper.on_cuda(_CUDA, _widths), _hopper.on_triton(_TRITON, _widths), reference(_reference.gemm_gather_act)),
)


class Activated(NamedTuple):
    """h (R, 2F) before the activation, a (R, F) after it and the routing weight."""

    h_RH: Tensor
    a_RF: Tensor


def check_gate(gate_R: Tensor | None, num_rows: int, dtype: torch.dtype) -> None:
    """ValueError or TypeError unless a gate, where there is one, has a value for each row in fp32 or h's `dtype`."""
    if gate_R is None:
        return
    if gate_R.shape != (num_rows,):
        raise ValueError(f"gate must have shape ({num_rows},), one weight a row; got {tuple(gate_R.shape)}")
    if gate_R.dtype not in (torch.float32, dtype):
        raise TypeError(f"gate must be float32 or h's dtype {dtype}, got {gate_R.dtype}")


def gemm_gather_act(
    x_TD: Tensor,
    w_EHD: Tensor,
    ends_E: Tensor,
    gate_R: Tensor | None = None,
    *,
    row_index_R: Tensor | None = None,
    layout: Layout = "concatenated",
    backend: str | None = None,
) -> Activated:
    """h and a of all rows.

    x_TD         rows (T, D); with `row_index_R` [R] int32 row r is x[row_index[r]], without it x[r]
    w_EHD        (E, 2F, D) in x's dtype, gated and linear half as `layout` says
    ends_E       int32 end row of each expert
    gate_R       (R,) fp32 or x's dtype, None for 1
    """
    grouped_gemm.check(x_TD, w_EHD, ends_E, contracted=2, row_index_R=row_index_R)
    num_rows = (x_TD if row_index_R is None else row_index_R).shape[0]
    if w_EHD.shape[1] % 2:
        raise ValueError(f"w must have shape (E, 2F, D), got {tuple(w_EHD.shape)}")
    if layout not in ("concatenated", "interleaved"):
        raise ValueError(f'layout must be "concatenated" or "interleaved", got {layout!r}')
    check_gate(gate_R, num_rows, x_TD.dtype)
    run = TABLE.choose(Problem((x_TD, w_EHD), layout), backend)
    return Activated(*run(x_TD, w_EHD, ends_E, gate_R, row_index_R, layout))
