"""Quantizing matrices into a format's bytes, in one or both directions from one read of the input.

    row, column = quantize(x_ERC, MXFP8(), rowwise=True, columnwise=True)
    quantize_into(x_ERC, row, column)         writes new bytes into the tensors of these records

A format's own module says how its scales and elements are chosen; `_reference` is the definition of every bit. amax is
taken in float32 of the values as given. Round to nearest, ties to even, unless the format rounds stochastically. No
autograd here.
"""

# E members   R rows   C columns

import torch
from torch import Tensor

from moe_runtime.formats import NVFP4, Float8, Format, HighPrecision, Quantized
from moe_runtime.formats.format import Direction
from moe_runtime.kernels.quantize import _native, _reference
from moe_runtime.kernels.select import Problem, Table, native, reference, triton, triton_missing

__all__ = ["DTYPES", "TABLE", "quantize", "quantize_into"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

if triton_missing() is None:
    from moe_runtime.kernels.quantize import _triton

    _ON_GPU = triton(_triton, *_triton.DTYPES)
else:
    _ON_GPU = triton(None)

# The Triton kernels come last, so that only who asks for them by name gets them: they are not measured yet.
TABLE = Table("quantize", (native(_native, *DTYPES), reference(_reference), _ON_GPU))


def quantize(
    x_ERC: Tensor,
    fmt: Format,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    seed: int | None = None,
    amax: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """(rowwise, columnwise) bytes of x in `fmt`, None for a direction that was not asked for.

    x_ERC  (E, R, C) or (R, C) float32, bfloat16 or float16; E, R and C may be 0
    seed   0 to 2^63 - 1, needed by stochastic rounding and refused elsewhere
    amax   (E,) or () float32: what Float8 and NVFP4 take for the member's amax, such as a maximum over several ranks;
           larger values saturate
    """
    _check(x_ERC, fmt, rowwise, columnwise)
    row = _empty(x_ERC, fmt, "rowwise", None) if rowwise else None
    column = _empty(x_ERC, fmt, "columnwise", row) if columnwise else None
    quantize_into(x_ERC, row, column, seed=seed, amax=amax, backend=backend)
    return row, column


def quantize_into(
    x_ERC: Tensor,
    row: Quantized | None,
    column: Quantized | None = None,
    *,
    seed: int | None = None,
    amax: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """As `quantize`, into the tensors of the given records: x's shape, one format, contiguous tensors on x's device."""
    fmt = _common_format(x_ERC, row, column)
    _check(x_ERC, fmt, row is not None, column is not None)
    _check_seed(fmt, seed)
    _check_amax(x_ERC, fmt, column is not None, amax)
    stack_ERC = x_ERC if x_ERC.dim() == 3 else x_ERC[None]
    amax_E = None if amax is None else amax.contiguous().reshape(stack_ERC.shape[0])
    run = TABLE.choose(Problem((x_ERC,)), backend).quantize_into
    run(stack_ERC.detach(), fmt, _stacked(row), _stacked(column), seed, amax_E)
    if isinstance(fmt, Float8) and row is not None and column is not None and column.scale is not row.scale:
        column.scale.copy_(row.scale)


def _empty(x_ERC: Tensor, fmt: Format, direction: Direction, row: Quantized | None) -> Quantized:
    """Uninitialized storage; the scales of Float8 are those of `row`, which both directions share."""
    shape = x_ERC.shape
    shared = row.scale if row is not None and isinstance(fmt, Float8) else None
    return Quantized(
        payload=x_ERC.new_empty(fmt.payload_shape(shape, direction), dtype=fmt.payload_dtype),
        scale=x_ERC.new_empty(fmt.scale_shape(shape, direction), dtype=fmt.scale_dtype) if shared is None else shared,
        tensor_scale=x_ERC.new_empty(shape[:-2], dtype=torch.float32) if fmt.has_tensor_scale else None,
        format=fmt,
        direction=direction,
    )


def _stacked(q: Quantized | None) -> _reference.Stored | None:
    """The tensors of a record, those of a single matrix as a stack of one."""
    if q is None:
        return None
    if q.payload.dim() == 3:
        return q.payload, q.scale, q.tensor_scale
    return q.payload[None], q.scale[None], None if q.tensor_scale is None else q.tensor_scale[None]


def _common_format(x_ERC: Tensor, row: Quantized | None, column: Quantized | None) -> Format:
    """The format of the given records, which must hold x's shape in their own direction on x's device."""
    fmt: Format | None = None
    for q, direction in ((row, "rowwise"), (column, "columnwise")):
        if q is None:
            continue
        fmt = fmt or q.format
        if q.format != fmt or q.direction != direction:
            raise ValueError(f"expected a {direction} record of {fmt}, got a {q.direction} one of {q.format}")
        if q.shape != tuple(x_ERC.shape) or q.payload.device != x_ERC.device:
            expected, got = f"{tuple(x_ERC.shape)} on {x_ERC.device}", f"{q.shape} on {q.payload.device}"
            raise ValueError(f"expected a record of shape {expected}, got {got}")
    if fmt is None:
        raise ValueError("quantize_into needs a rowwise or a columnwise record, got neither")
    return fmt


def _check(x_ERC: Tensor, fmt: Format, rowwise: bool, columnwise: bool) -> None:
    if isinstance(fmt, HighPrecision):
        raise ValueError(f"expected a quantized format, got {fmt}, whose values are stored as they are")
    if x_ERC.dtype not in DTYPES:
        raise TypeError(f"x must be float32, bfloat16 or float16, got {x_ERC.dtype}")
    fmt.check_shape(x_ERC.shape, rowwise=rowwise, columnwise=columnwise)


def _check_seed(fmt: Format, seed: int | None) -> None:
    stochastic = isinstance(fmt, NVFP4) and fmt.stochastic_rounding
    if stochastic and seed is None:
        raise ValueError(f"stochastic rounding needs a seed, got None for {fmt}")
    if seed is not None and not stochastic:
        raise ValueError(f"{fmt} rounds to nearest: expected no seed, got {seed}")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed must lie in [0, 2^63), got {seed}")


def _check_amax(x_ERC: Tensor, fmt: Format, columnwise: bool, amax: Tensor | None) -> None:
    if amax is None:
        return
    if not isinstance(fmt, Float8 | NVFP4):
        raise ValueError(f"{fmt.name} takes the amax of each block: expected no amax, got one")
    if isinstance(fmt, NVFP4) and fmt.random_hadamard and columnwise:
        raise ValueError("an amax of x is not that of its rotated columns: expected none with random_hadamard, got one")
    if amax.shape != x_ERC.shape[:-2] or amax.dtype != torch.float32 or amax.device != x_ERC.device:
        raise ValueError(
            f"amax must be float32 of shape {tuple(x_ERC.shape[:-2])} on {x_ERC.device}, one a member; "
            f"got {amax.dtype} of shape {tuple(amax.shape)} on {amax.device}"
        )
