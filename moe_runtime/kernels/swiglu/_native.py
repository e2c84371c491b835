"""SwiGLU and its gradient in moe_runtime._C (csrc/cpu/swiglu.cpp), and their shapes for tracing."""

# R routed rows   F expert width   H = 2 F

import torch
from torch import Tensor

from moe_runtime.kernels.select import native_status

DTYPES = (torch.float32, torch.bfloat16)


def swiglu(h_RH: Tensor, gate_R: Tensor | None, interleaved: bool) -> Tensor:
    """One pass over h; exp is a polynomial, within 1 ulp."""
    return torch.ops.moe_runtime.swiglu.default(h_RH, gate_R, interleaved)


def swiglu_backward(
    da_RF: Tensor, h_RH: Tensor, gate_R: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor | None]:
    """One pass over da and h, the gate's gradient included."""
    dh_RH, dgate_R = torch.ops.moe_runtime.swiglu_backward.default(da_RF, h_RH, gate_R, interleaved)
    return dh_RH, None if gate_R is None else dgate_R


if native_status().available:

    @torch.library.register_fake("moe_runtime::swiglu")
    def _(h_RH: Tensor, gate_R: Tensor | None, interleaved: bool) -> Tensor:
        return h_RH.new_empty(h_RH.shape[0], h_RH.shape[1] // 2)

    @torch.library.register_fake("moe_runtime::swiglu_backward")
    def _(da_RF: Tensor, h_RH: Tensor, gate_R: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
        num_gates = 0 if gate_R is None else gate_R.shape[0]
        return h_RH.new_empty(h_RH.shape), h_RH.new_empty(num_gates, dtype=torch.float32)
