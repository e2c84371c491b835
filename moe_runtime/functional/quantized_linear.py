"""The grouped linear layer with quantized operands: the same three equations, of the values that the bytes stand for.

fprop   y[r]  = Q(x)[r] @ Q(w)[e(r)].T                  rowwise operands
dgrad   dx[r] = Q(dy)[r] @ Q(w)[e(r)]                   dy rowwise, w columnwise
wgrad   dw[e] = Q(dy)[rows of e].T @ Q(x)[rows of e]    both columnwise: blocks along the rows

Operands are dequantized to the rows' dtype, the weight inside the product, and multiplied with fp32 accumulation, which
is what hardware that has the format computes, and what hardware that lacks it computes as well. A recipe's
`backward_override` puts the rowwise values, or the originals, in the place of dgrad's and wgrad's operands. A weight
that is stored quantized is used as it is, under a recipe of its format or under none.
"""

# R routed rows   P rows with padding   D in features   F out features   E local experts

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_runtime.formats import NVFP4, Direction, Float8, Format, Quantized
from moe_runtime.functional.padding import PaddedRows, padded_rows
from moe_runtime.kernels.dequantize import dequantize
from moe_runtime.kernels.gemm_dequant import gemm_dequant_nn, gemm_dequant_nt
from moe_runtime.kernels.grouped_gemm import ragged_k_gemm_tn, ragged_m_gemm_nn
from moe_runtime.kernels.quantize import quantize
from moe_runtime.precision import Recipe
from moe_runtime.runtime.schedules import WgradSlot
from moe_runtime.tensor import QuantizedTensor

__all__ = ["check_weight", "quantized_linear"]


def check_weight(weight: Tensor, recipe: Recipe, name: str) -> None:
    """ValueError, before anything is multiplied, for a stored weight that `recipe` cannot use; `name`: the layer's."""
    if not isinstance(weight, QuantizedTensor) or not recipe.quantizes:
        return
    stored = weight.quantizer.format
    if stored != recipe.weight:
        raise ValueError(f"{name}: the weight is stored as {stored}, the recipe {recipe} multiplies by {recipe.weight}")
    reads_columnwise = recipe.quantized_backward and torch.is_grad_enabled()
    if reads_columnwise and not weight.columnwise:
        raise ValueError(
            f"{name}: the weight is stored row-wise only ({stored}), and the quantized backward of {recipe} reads the "
            'columnwise direction: expected a recipe with backward_override="dequantized" or "high_precision", or '
            "weights built without omit_columnwise_primary_weight_storage and outside torch.no_grad()"
        )


def quantized_linear(x_RD: Tensor, w_EFD: Tensor, ends_E: Tensor, slot: WgradSlot | None, recipe: Recipe) -> Tensor:
    """As `grouped_linear`, by `recipe`; w_EFD may be a QuantizedTensor, whose gradient is a plain tensor."""
    if x_RD.dtype != w_EFD.dtype:
        raise TypeError(f"rows and weight must have one dtype, got {x_RD.dtype} and {w_EFD.dtype}")
    # Asked for here: inside a Function's forward no gradient is ever recorded.
    records = torch.is_grad_enabled() and (x_RD.requires_grad or w_EFD.requires_grad)
    seed = None
    if records and recipe.quantized_backward and _stochastic(recipe.gradient):
        # Drawn in forward, whose random state activation checkpointing restores.
        seed = int(torch.randint(2**62, (), device="cpu").item())
    return _QuantizedLinear.apply(x_RD, w_EFD, ends_E, slot, _Call(recipe, records, seed))


@dataclass(frozen=True, slots=True)
class _Call:
    """What one forward was asked for. `records`: whether a backward may follow; `seed`: of stochastic rounding."""

    recipe: Recipe
    records: bool
    seed: int | None


@dataclass(frozen=True, slots=True)
class _Saved:
    """How an operand was saved for backward: its tensors are ctx.saved_tensors[start:stop]."""

    start: int
    stop: int
    form: tuple[Format, Direction] | None  # of a record; None: the one tensor is the operand itself

    def load(self, saved: Sequence[Tensor]) -> Any:
        first, *rest = saved[self.start : self.stop]
        if self.form is None:
            return first
        fmt, direction = self.form
        tensor_scale = rest[1] if len(rest) > 1 else None
        return Quantized(payload=first, scale=rest[0], tensor_scale=tensor_scale, format=fmt, direction=direction)


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, w_EFD: Tensor, ends_E: Tensor, slot: WgradSlot | None, call: _Call) -> Tensor:
        recipe = call.recipe
        need_dx, need_dw = (call.records and needed for needed in ctx.needs_input_grad[:2])
        quantized_backward = recipe.quantized_backward
        row, column = _weight_records(w_EFD, recipe, columnwise=quantized_backward and need_dx)
        x_row = None
        x_used_RD = x_RD
        if recipe.quantizes:
            x_row = _rowwise(x_RD, recipe.input, ends_E)
            x_used_RD = dequantize(x_row, x_RD.dtype)
        y_RF = gemm_dequant_nt(x_used_RD, row, ends_E)

        ctx.slot, ctx.recipe, ctx.seed = slot, recipe, call.seed
        x_kept: Any = None
        w_kept: Any = None
        if need_dw:
            x_kept = x_RD if not recipe.quantizes or recipe.backward_override == "high_precision" else x_row
            if quantized_backward:
                x_kept = _columnwise(_layout(ends_E, x_RD.shape[0], recipe.input).gather(x_RD), recipe.input)
        if need_dx:
            w_kept = column if quantized_backward else row
            # A parameter is saved as itself: what shards it frees its bytes after forward, and gathers them again.
            if isinstance(w_EFD, QuantizedTensor) or recipe.backward_override == "high_precision":
                w_kept = w_EFD
        _save(ctx, ends_E, w_EFD, x_kept, w_kept)
        return y_RF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RF: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        saved = ctx.saved_tensors
        ends_E, w_EFD, recipe, dtype = saved[0], saved[1], ctx.recipe, dy_RF.dtype
        x_kept, w_kept = (part and part.load(saved) for part in (ctx.x_part, ctx.w_part))
        need_dx, need_dw, *_ = ctx.needs_input_grad
        dx_RD = dw_EFD = None
        if need_dx:
            direction = "columnwise" if recipe.quantized_backward else "rowwise"
            dy_used_RF = dy_RF
            if recipe.quantized_backward:
                dy_used_RF = dequantize(_rowwise(dy_RF, recipe.gradient, ends_E, ctx.seed), dtype)
            w = _stored(w_kept, direction)
            if isinstance(w, Quantized):
                dx_RD = gemm_dequant_nn(dy_used_RF, w, ends_E)
            else:
                dx_RD = ragged_m_gemm_nn(dy_used_RF, w, ends_E)
        if need_dw:
            layout, dy_kept = None, dy_RF
            if recipe.quantized_backward:
                layout = _layout(ends_E, dy_RF.shape[0], recipe.gradient)
                dy_kept = _columnwise(layout.gather(dy_RF), recipe.gradient, ctx.seed)
            ends_E = ends_E if layout is None else layout.ends_E

            def wgrad(*, into_EFD: Tensor | None = None, accumulate: bool = False) -> Tensor:
                dy_PF, x_PD = (_values(kept, dtype) for kept in (dy_kept, x_kept))
                return ragged_k_gemm_tn(dy_PF, x_PD, ends_E, into_EFD=into_EFD, accumulate=accumulate)

            operands = (*_tensors(dy_kept), *_tensors(x_kept))
            dw_EFD = wgrad() if ctx.slot is None else ctx.slot.submit(wgrad, operands, w_EFD)
        return dx_RD, dw_EFD, None, None, None


def _weight_records(w_EFD: Tensor, recipe: Recipe, *, columnwise: bool) -> tuple[Quantized, Quantized | None]:
    if isinstance(w_EFD, QuantizedTensor):
        row, column = w_EFD.record("rowwise"), w_EFD.record("columnwise")
        if row is None or (columnwise and column is None):
            missing = "rowwise" if row is None else "columnwise"
            raise ValueError(f"the {missing} bytes of this weight are needed and not stored: {w_EFD!r}")
        return row, column
    row, column = quantize(w_EFD.contiguous(), recipe.weight, rowwise=True, columnwise=columnwise)
    assert row is not None
    return row, column


def _rowwise(x_RD: Tensor, fmt: Format, ends_E: Tensor, seed: int | None = None) -> Quantized:
    if isinstance(fmt, Float8 | NVFP4):
        # What nobody owns must not enter the amax of the rest.
        owned_R = torch.arange(x_RD.shape[0], device=x_RD.device) < ends_E[-1]
        x_RD = torch.where(owned_R[:, None], x_RD, 0)
    row, _ = quantize(x_RD.contiguous(), fmt, rowwise=True, seed=seed)
    assert row is not None
    return row


def _columnwise(x_PD: Tensor, fmt: Format, seed: int | None = None) -> Quantized:
    _, column = quantize(x_PD, fmt, rowwise=False, columnwise=True, seed=seed)
    assert column is not None
    return column


def _layout(ends_E: Tensor, num_rows: int, fmt: Format) -> PaddedRows:
    return padded_rows(ends_E, num_rows, 1 if fmt.block is None else fmt.block.cols)


def _stochastic(fmt: Format) -> bool:
    return isinstance(fmt, NVFP4) and fmt.stochastic_rounding


def _stored(kept: Any, direction: Any) -> Any:
    """The record of a weight that was saved as itself; anything else as it is."""
    if not isinstance(kept, QuantizedTensor):
        return kept
    record = kept.record(direction)
    if record is None:
        raise RuntimeError(f"the {direction} bytes of a weight were dropped between its forward and its backward")
    return record


def _values(kept: Any, dtype: torch.dtype) -> Tensor:
    return dequantize(kept, dtype) if isinstance(kept, Quantized) else kept


def _tensors(kept: Any) -> tuple[Tensor, ...]:
    if not isinstance(kept, Quantized):
        return (kept,)
    return (kept.payload, kept.scale, *(() if kept.tensor_scale is None else (kept.tensor_scale,)))


def _save(ctx: Any, ends_E: Tensor, w_EFD: Tensor, x_kept: Any, w_kept: Any) -> None:
    tensors = [ends_E, w_EFD]
    parts: list[_Saved | None] = []
    for kept in (x_kept, w_kept):
        if kept is None:
            parts.append(None)
            continue
        start = len(tensors)
        tensors += _tensors(kept)
        form = (kept.format, kept.direction) if isinstance(kept, Quantized) else None
        parts.append(_Saved(start, len(tensors), form))
    ctx.x_part, ctx.w_part = parts
    ctx.save_for_backward(*tensors)
