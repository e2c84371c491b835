"""The experts of one layer as one function: what backward needs is saved, the rest is computed again.

    h[r] = x[r] @ gate_up[e(r)].T       a[r] = gate[r] * silu(g) * u       y[r] = a[r] @ down[e(r)].T

With `tokens` (all experts here), row r is token token[r] and out[t] = sum_k y[row[t, k]]: rows in expert order exist
only inside kernels. Without (after an exchange), rows come in expert order and leave so.

Backward starts from dy and h alone: dh, the activations and dgate come from one product, so that neither the
activations nor y are kept. Saved: x, h (4 F bytes a row in bfloat16), the weights, and at most 12 bytes a row.
"""

# T tokens   K top-k   R routed rows   D model width   F expert width   H = 2 F   E local experts

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_runtime.functional.activation import Layout
from moe_runtime.functional.grouped_linear import HeldWeight
from moe_runtime.kernels.combine import gather_sum
from moe_runtime.kernels.gemm_dact import Preactivation, gemm_dact
from moe_runtime.kernels.gemm_gather_act import gemm_gather_act
from moe_runtime.kernels.grouped_gemm import ragged_k_gemm_tn, ragged_m_gemm_nn, ragged_m_gemm_nt
from moe_runtime.kernels.permute import gather_rows
from moe_runtime.runtime.schedules import WgradSlot

# From an H200: up to these expert widths a product takes rows by index, past them rows written out first are faster.
_MAX_WIDTH_DY_BY_INDEX, _MAX_WIDTH_X_BY_INDEX = 1536, 3072


class TokenRows(NamedTuple):
    """How routed rows and tokens name each other when all experts are here."""

    token_R: Tensor  # [R] int32: the token of each row
    row_TK: Tensor  # [T, K] int32: the row of each choice; -1 for a dropped one


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spec:
    layout: Layout
    up_slot: WgradSlot | None
    down_slot: WgradSlot | None


def moe_mlp(
    x: Tensor,
    gate_R: Tensor | None,
    ends_E: Tensor,
    gate_up: HeldWeight,
    down: HeldWeight,
    *,
    tokens: TokenRows | None = None,
    layout: Layout = "concatenated",
) -> Tensor:
    """SwiGLU experts over routed rows; (T, D) with `tokens`, (R, D) without, x's dtype.

    x        (T, D) tokens, or (R, D) rows sorted by expert; those from ends[-1] on are not read
    gate_R   (R,) routing weight of each row, fp32 or x's dtype, None for 1; a gradient flows back to it
    ends_E   int32 (E,) end row of each expert
    gate_up  (E, 2F, D), `down` (E, D, F); where a weight has a slot, its gradient is handed in there
    Does not wait for a GPU. The same inputs give the same bits.
    """
    spec = _Spec(layout=layout, up_slot=gate_up.slot, down_slot=down.slot)
    token_R, row_TK = tokens if tokens is not None else (None, None)
    return _MoEMLP.apply(x, gate_R, gate_up.value, down.value, ends_E, token_R, row_TK, spec)


class _MoEMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_R: Tensor | None,
        w_EHD: Tensor,
        w_EDF: Tensor,
        ends_E: Tensor,
        token_R: Tensor | None,
        row_TK: Tensor | None,
        spec: _Spec,
    ) -> Tensor:
        h_RH, a_RF = gemm_gather_act(x, w_EHD, ends_E, gate_R, row_index_R=token_R, layout=spec.layout)
        y_RD = ragged_m_gemm_nt(a_RF, w_EDF, ends_E)
        # x serves the weight gradient alone.
        ctx.save_for_backward(
            x if ctx.needs_input_grad[2] else None, h_RH, gate_R, w_EHD, w_EDF, ends_E, token_R, row_TK
        )
        ctx.spec = spec
        return y_RD if row_TK is None else gather_sum(y_RD, row_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, h_RH, gate_R, w_EHD, w_EDF, ends_E, token_R, row_TK = ctx.saved_tensors
        need_dx, need_dgate, need_up, need_down = ctx.needs_input_grad[:4]
        index_R = token_R
        if token_R is not None and (w_EDF.shape[2] > _MAX_WIDTH_DY_BY_INDEX or not dy.is_cuda):
            dy, index_R = gather_rows(dy, token_R, ends_E, top_k=1), None
        dh_RH, a_RF, dgate_R = gemm_dact(
            dy, w_EDF, Preactivation(h_RH, gate_R, ctx.spec.layout), ends_E, row_index_R=index_R, activations=need_down
        )
        d_down = d_up = dx = None
        if need_down and a_RF is not None:
            d_down = _hand_in(ctx.spec.down_slot, _Product(dy, a_RF, ends_E, dy_index_R=index_R), w_EDF)
        if need_dx:
            dx = ragged_m_gemm_nn(dh_RH, w_EHD, ends_E)
            dx = dx if row_TK is None else gather_sum(dx, row_TK)
        if need_up:
            d_up = _hand_in(ctx.spec.up_slot, _Product(dh_RH, x, ends_E, x_index_R=token_R), w_EHD)
        dgate_R = dgate_R.to(gate_R.dtype) if need_dgate and dgate_R is not None else None
        return dx, dgate_R, d_up, d_down, None, None, None, None


class _Product(NamedTuple):
    """A weight gradient to compute: dy.T @ x over the rows of each expert."""

    dy: Tensor
    x: Tensor
    ends_E: Tensor
    dy_index_R: Tensor | None = None
    x_index_R: Tensor | None = None

    def compute(self, *, into_EFD: Tensor | None = None, accumulate: bool = False) -> Tensor:
        """(E, out, in), stored in or added to `into_EFD` where it is given"""
        x, x_index_R = self.x, self.x_index_R
        if x_index_R is not None and self.dy.shape[1] > 2 * _MAX_WIDTH_X_BY_INDEX:
            # Written out only here: a product that waits holds tokens, not rows.
            x, x_index_R = gather_rows(x, x_index_R, self.ends_E, top_k=1), None
        return ragged_k_gemm_tn(
            self.dy,
            x,
            self.ends_E,
            dy_index_R=self.dy_index_R,
            x_index_R=x_index_R,
            into_EFD=into_EFD,
            accumulate=accumulate,
        )


def _hand_in(slot: WgradSlot | None, product: _Product, weight: Tensor) -> Tensor | None:
    """The gradient now, or what autograd gets in its place."""
    return product.compute() if slot is None else slot.submit(product.compute, (product.dy, product.x), weight)
