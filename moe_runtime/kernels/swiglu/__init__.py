"""SwiGLU with the routing weight applied after it, and its gradient.

    a = gate * (silu(g) * u)      silu(g) = g * sigmoid(g)

g and u are the two halves of h's columns ("concatenated"), or its even and odd columns ("interleaved"). fp32 inside,
one rounding to h's dtype. At g = -inf silu is NaN (-inf * 0) and below -88.7 it is -0, as in fp32 torch ops. Other
activations are torch ops in functional/activation. No autograd here.
"""

# R routed rows   F expert width   H = 2 F

from typing import Literal

import torch
from torch import Tensor

from moe_runtime.kernels.select import Problem, Table, native, reference, triton, triton_missing
from moe_runtime.kernels.swiglu import _native, _reference

__all__ = ["TABLE", "Layout", "swiglu", "swiglu_backward"]

Layout = Literal["concatenated", "interleaved"]

if triton_missing() is None:
    from moe_runtime.kernels.swiglu import _triton

    _ON_GPU = triton(_triton, *_triton.DTYPES)
else:
    _ON_GPU = triton(None)

TABLE = Table("swiglu", (native(_native, *_native.DTYPES), _ON_GPU, reference(_reference)))


def swiglu(
    h_RH: Tensor, gate_R: Tensor | None = None, *, layout: Layout = "concatenated", backend: str | None = None
) -> Tensor:
    """a = gate * (silu(g) * u), shape (R, F), h's dtype; gate_R [R] fp32 or h's dtype, None for 1."""
    _check(h_RH, gate_R, layout)
    return TABLE.choose(Problem((h_RH,)), backend).swiglu(h_RH, gate_R, layout == "interleaved")


def swiglu_backward(
    da_RF: Tensor,
    h_RH: Tensor,
    gate_R: Tensor | None = None,
    *,
    layout: Layout = "concatenated",
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(dh, dgate) of `swiglu` for the gradient `da_RF` of a: dh (R, 2F) in h's dtype, dgate None without a gate.

    dgate[r] = sum_f da * (silu(g) * u), (R,) fp32. Its order is fixed: the same bits at any thread count.
    """
    _check(h_RH, gate_R, layout)
    if da_RF.dim() != 2 or da_RF.shape[0] != h_RH.shape[0] or da_RF.shape[1] * 2 != h_RH.shape[1]:
        raise ValueError(
            f"da must have shape ({h_RH.shape[0]}, {h_RH.shape[1] // 2}), half of h's columns; got {tuple(da_RF.shape)}"
        )
    if da_RF.dtype != h_RH.dtype:
        raise TypeError(f"da must have h's dtype {h_RH.dtype}, got {da_RF.dtype}")
    return TABLE.choose(Problem((h_RH,)), backend).swiglu_backward(da_RF, h_RH, gate_R, layout == "interleaved")


def _check(h_RH: Tensor, gate_R: Tensor | None, layout: str) -> None:
    if layout != "concatenated" and layout != "interleaved":
        raise ValueError(f'layout must be "concatenated" or "interleaved", got {layout!r}')
    if h_RH.dim() != 2 or h_RH.shape[1] % 2:
        raise ValueError(f"h must have shape (R, 2F), got {tuple(h_RH.shape)}")
    if gate_R is not None:
        if gate_R.dim() != 1 or gate_R.shape[0] != h_RH.shape[0]:
            raise ValueError(f"gate must have shape ({h_RH.shape[0]},), one per row; got {tuple(gate_R.shape)}")
        if gate_R.dtype != torch.float32 and gate_R.dtype != h_RH.dtype:
            raise TypeError(f"gate must be float32 or h's dtype {h_RH.dtype}, got {gate_R.dtype}")
