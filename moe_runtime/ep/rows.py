"""Moving rows between token order and expert order, each way the other's gradient.

gather      y[r]   = x[slot[r] // K]            its gradient is sum_rows
sum_rows    out[t] = sum_k y[row[t, k]]         its gradient is gather

On a padded route, where a row may have no token, both are sums over named rows: of one or no row, and of K.
"""

# T tokens   K top-k   R routed rows (= T * K)   D model width   E local experts

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_runtime.ep.capacity import PaddedRoute
from moe_runtime.kernels.combine import gather_sum
from moe_runtime.kernels.permute import Route, gather_rows


def gather(x_TD: Tensor, route: Route | PaddedRoute) -> Tensor:
    """y[r] = x[slot[r] // K], shape (R, D); rows of dropped slots are 0 and give no gradient."""
    if isinstance(route, PaddedRoute):
        return _SumNamed.apply(x_TD, _token_of(route), route.row_TK)
    return _Gather.apply(x_TD, route.slot_R, route.row_TK, route.ends_E)


def sum_rows(y_RD: Tensor, route: Route | PaddedRoute) -> Tensor:
    """out[t] = sum_k y[row[t, k]] in fp32, rounded once to y's dtype; dropped slots add nothing."""
    if isinstance(route, PaddedRoute):
        return _SumNamed.apply(y_RD, route.row_TK, _token_of(route))
    return _SumRows.apply(y_RD, route.slot_R, route.row_TK, route.ends_E)


def gather_gates(gates_TK: Tensor, route: Route | PaddedRoute) -> Tensor:
    """gate[r] = gates[slot[r]], shape (R,): each routed row's own weight; 0 for a dropped slot, whatever it held."""
    return _GatherGates.apply(gates_TK, route.slot_R, route.row_TK, route.ends_E)


def _token_of(route: PaddedRoute) -> Tensor:
    """The token of each row, int32 (R, 1); -1 for a row without one. No choice (K = 0) leaves no row with one."""
    top_k = max(route.row_TK.shape[1], 1)
    token_R = torch.div(route.slot_R, top_k, rounding_mode="floor")
    return token_R.masked_fill(route.slot_R < 0, -1)[:, None]


class _SumNamed(torch.autograd.Function):
    """out[i] = sum_j values[rows[i, j]]; `inverse` names, for each of the values, the rows of out that it went to."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return gather_sum(values, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsum: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gather_sum(dsum, inverse), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, slot_R: Tensor, row_TK: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return gather_rows(x_TD, slot_R, ends_E, top_k=row_TK.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, None, None, None]:
        (row_TK,) = ctx.saved_tensors
        return gather_sum(dy_RD, row_TK), None, None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, slot_R: Tensor, row_TK: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(slot_R, ends_E)
        ctx.top_k = row_TK.shape[1]
        return gather_sum(y_RD, row_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: Tensor) -> tuple[Tensor, None, None, None]:
        slot_R, ends_E = ctx.saved_tensors
        return gather_rows(dout_TD, slot_R, ends_E, top_k=ctx.top_k), None, None, None


class _GatherGates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates_TK: Tensor, slot_R: Tensor, row_TK: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        if not gates_TK.numel():
            return gates_TK.new_zeros(slot_R.shape[0])
        past_R = (torch.arange(slot_R.shape[0], device=slot_R.device) >= ends_E[-1]) | (slot_R < 0)
        return gates_TK.reshape(-1).index_select(0, slot_R.clamp(min=0)).masked_fill_(past_R, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dgate_R: Tensor) -> tuple[Tensor, None, None, None]:
        (row_TK,) = ctx.saved_tensors
        # A slot has one row at most, so the gradient is a selection too; a dropped slot (-1) gets exactly 0.
        if not dgate_R.shape[0]:
            return dgate_R.new_zeros(row_TK.shape), None, None, None
        picked_TK = dgate_R.index_select(0, row_TK.reshape(-1).clamp(min=0)).view(row_TK.shape)
        return picked_TK.masked_fill(row_TK < 0, 0), None, None, None
