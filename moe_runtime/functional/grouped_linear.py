"""The grouped linear layer: three GEMMs, written as the three equations they are.

fprop   y[r]  = x[r] @ w[e(r)].T
dgrad   dx[r] = dy[r] @ w[e(r)]
wgrad   dw[e] = dy[rows of e].T @ x[rows of e]
"""

# R routed rows   D in features   F out features   E local experts

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_runtime.functional.quantized_linear import quantized_linear
from moe_runtime.kernels.grouped_gemm import ragged_k_gemm_tn, ragged_m_gemm_nn, ragged_m_gemm_nt
from moe_runtime.precision import Recipe, recipes
from moe_runtime.runtime.schedules import WgradSlot
from moe_runtime.tensor import GroupedTensor, QuantizedTensor

_HIGH_PRECISION = recipes.HighPrecision()


@dataclass(frozen=True)
class HeldWeight:
    """A stacked weight (E, F, D) as one forward uses it: where its gradient is handed in (None: in its place), the
    recipe of the products with it, and what is learned beside it."""

    value: Tensor
    slot: WgradSlot | None = None
    recipe: Recipe = _HIGH_PRECISION
    adapter: "HeldAdapter | None" = None


@dataclass(frozen=True)
class HeldAdapter:
    """The factors of a low-rank update as one forward uses them, see functional/grouped_lora.

    a, b     (E, r, D) and (E, F, r); a first dimension of 1 is one factor for all experts
    scale    of the update
    dropout  share of the update's inputs that are dropped now
    """

    a: HeldWeight
    b: HeldWeight
    scale: float
    dropout: float = 0.0


def grouped_linear(
    x_RD: Tensor, w_EFD: Tensor, ends_E: Tensor, slot: WgradSlot | None = None, recipe: Recipe = _HIGH_PRECISION
) -> Tensor:
    """y[r] = x[r] @ w[e(r)].T, shape (R, F), for the expert e(r) that owns row r.

    x_RD    rows sorted by expert; those from ends[-1] on are not read, come out as 0 and get gradient 0
    w_EFD   stacked weights, same dtype as x; a QuantizedTensor has that nominal dtype
    ends_E  int32 cumulative rows per expert, on x's device
    slot    takes the weight gradient over, to be computed later; None computes it beside dx
    recipe  quantizes the operands, see functional/quantized_linear
    An expert without rows gets an exactly zero gradient. With R = 0 the graph stays connected.
    """
    if recipe.quantizes or isinstance(w_EFD, QuantizedTensor):
        return quantized_linear(x_RD, w_EFD, ends_E, slot, recipe)
    return _GroupedLinear.apply(x_RD, w_EFD, ends_E, slot)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, w_EFD: Tensor, ends_E: Tensor, slot: WgradSlot | None) -> Tensor:
        # x serves the weight gradient alone: a frozen weight keeps none of it.
        ctx.save_for_backward(x_RD if ctx.needs_input_grad[1] else None, w_EFD, ends_E)
        ctx.slot = slot
        return ragged_m_gemm_nt(x_RD, w_EFD, ends_E)

    @staticmethod
    def backward(ctx: Any, dy_RF: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_RD, w_EFD, ends_E = ctx.saved_tensors
        need_dx, need_dw, *_ = ctx.needs_input_grad
        dx_RD = ragged_m_gemm_nn(dy_RF, w_EFD, ends_E) if need_dx else None
        dw_EFD = None
        if need_dw and ctx.slot is None:
            dw_EFD = ragged_k_gemm_tn(dy_RF, x_RD, ends_E)
        elif need_dw:
            product = partial(ragged_k_gemm_tn, dy_RF, x_RD, ends_E)
            dw_EFD = ctx.slot.submit(product, (dy_RF, x_RD), w_EFD)
        return dx_RD, dw_EFD, None, None


def stack_experts(members: Sequence[Tensor]) -> Tensor:
    """(E, F, D) of E separate (F, D) weights, with history; quantized members give a quantized stack."""
    if all(isinstance(member, QuantizedTensor) for member in members):
        return _StackQuantized.apply(*members)
    return torch.stack(list(members))


class _StackQuantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *members: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.count = len(members)
        stacked = GroupedTensor.pack(list(members))
        stacked.clear_high_precision_init_val()
        return stacked

    @staticmethod
    def backward(ctx: Any, dw_EFD: Tensor | None) -> tuple[Tensor | None, ...]:
        # None: the gradients are elsewhere, in `main_grad`, or come after this backward.
        return (None,) * ctx.count if dw_EFD is None else dw_EFD.unbind(0)


def add_expert_bias(y_RF: Tensor, bias_EF: Tensor, ends_E: Tensor, gate_R: Tensor | None = None) -> Tensor:
    """y[r] + gate[r] * bias[e(r)]; rows from ends[-1] on stay as they are.

    gate_R  optional (R,) factors of the rows: what a layer whose input was already scaled by them must give its bias.
    """
    rows_R = torch.arange(y_RF.shape[0], device=y_RF.device, dtype=torch.int32)
    owner_R = torch.searchsorted(ends_E, rows_R, right=True)
    # One zero row stands for "no expert", so that rows past the end select it and the bias gradient is a plain sum.
    padded_EF = torch.cat([bias_EF, bias_EF.new_zeros(1, bias_EF.shape[1])])
    bias_RF = _SelectRows.apply(padded_EF, owner_R, ends_E)
    if gate_R is not None:
        # Selected, not multiplied away: the gate of a row past the end may be NaN.
        gate_R = gate_R.masked_fill(rows_R >= ends_E[-1], 0)
        bias_RF = bias_RF * gate_R.to(bias_RF.dtype)[:, None]
    return y_RF + bias_RF


class _SelectRows(torch.autograd.Function):
    """table[index], whose gradient sums each expert's rows with a grouped product: no atomics, any device."""

    @staticmethod
    def forward(ctx: Any, table_EF: Tensor, owner_R: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(ends_E)
        return table_EF.index_select(0, owner_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RF: Tensor) -> tuple[Tensor, None, None]:
        (ends_E,) = ctx.saved_tensors
        # The ones fill a 16-byte row, so that every backend takes them; column 0 holds the sum.
        ones_R8 = dy_RF.new_ones(dy_RF.shape[0], 8)
        sums_EF = ragged_k_gemm_tn(ones_R8, dy_RF, ends_E)[:, 0]
        return torch.cat([sums_EF, sums_EF.new_zeros(1, dy_RF.shape[1])]), None, None
