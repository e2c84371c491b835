"""What stands between the up- and the down-projection, with the routing weight applied after it.

    swiglu          a = gate * silu(g) * u
    geglu           a = gate * gelu(g) * u             (the exact gelu)
    geglu_tanh      a = gate * gelu_tanh(g) * u
    swiglu_clamped  a = gate * (c sigmoid(1.702 c)) * (clamp(u, -7, 7) + 1), c = min(g, 7)    as gpt-oss has it
    relu2           a = gate * relu(h)^2               no gated half

g and u are the gated and the linear half of h's columns: the first and second half ("concatenated"), or the even and
odd columns ("interleaved"). The layout is always said, never guessed from a size.
"""

# R routed rows   H columns of h (2F, or F without a gated half)   F expert width

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moe_runtime.kernels.swiglu import swiglu, swiglu_backward

Activation = Literal["swiglu", "geglu", "geglu_tanh", "swiglu_clamped", "relu2"]
Layout = Literal["concatenated", "interleaved"]
UNGATED: tuple[Activation, ...] = ("relu2",)

_CLAMP_LIMIT, _CLAMP_ALPHA = 7.0, 1.702


def check_activation(activation: str, layout: str) -> None:
    """ValueError unless both names are known."""
    if activation not in get_args(Activation):
        raise ValueError(f"activation must be one of {', '.join(get_args(Activation))}; got {activation!r}")
    if layout not in get_args(Layout):
        raise ValueError(f"gate_up_layout must be one of {', '.join(get_args(Layout))}; got {layout!r}")


def activate(h_RH: Tensor, gate_R: Tensor | None, *, activation: Activation, layout: Layout) -> Tensor:
    """The activation named, times each row's routing weight; shape (R, F), h's dtype, fp32 inside."""
    if activation == "swiglu":
        return _SwiGLU.apply(h_RH, gate_R, layout)
    a_RF = _relu_squared(h_RH) if activation == "relu2" else _gated(h_RH, activation, layout)
    if gate_R is not None:
        a_RF = a_RF * gate_R.float()[:, None]
    return a_RF.to(h_RH.dtype)


def _relu_squared(h_RF: Tensor) -> Tensor:
    return F.relu(h_RF.float()).square()


def _gated(h_RH: Tensor, activation: Activation, layout: Layout) -> Tensor:
    if layout == "concatenated":
        g_RF, u_RF = h_RH.float().chunk(2, dim=-1)
    else:
        g_RF, u_RF = h_RH.float()[:, 0::2], h_RH.float()[:, 1::2]
    return _GATED[activation](g_RF, u_RF)


def _clamped_swiglu(g_RF: Tensor, u_RF: Tensor) -> Tensor:
    g_RF = g_RF.clamp(max=_CLAMP_LIMIT)
    u_RF = u_RF.clamp(min=-_CLAMP_LIMIT, max=_CLAMP_LIMIT)
    return g_RF * torch.sigmoid(_CLAMP_ALPHA * g_RF) * (u_RF + 1)


_GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "geglu": lambda g_RF, u_RF: F.gelu(g_RF) * u_RF,
    "geglu_tanh": lambda g_RF, u_RF: F.gelu(g_RF, approximate="tanh") * u_RF,
    "swiglu_clamped": _clamped_swiglu,
}


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_RH: Tensor, gate_R: Tensor | None, layout: Layout) -> Tensor:
        ctx.save_for_backward(h_RH, gate_R)
        ctx.layout = layout
        return swiglu(h_RH, gate_R, layout=layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, da_RF: Tensor) -> tuple[Tensor, Tensor | None, None]:
        h_RH, gate_R = ctx.saved_tensors
        dh_RH, dgate_R = swiglu_backward(da_RF, h_RH, gate_R, layout=ctx.layout)
        return dh_RH, None if gate_R is None or dgate_R is None else dgate_R.to(gate_R.dtype), None
