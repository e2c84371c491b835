"""Tokens to expert order: where each routed row comes from, and the gather that puts it there.

    slot      s = t * K + k, one of a token's K choices of expert
    route     the stable counting sort of slots by expert, and its inverse
    gather    y[r] = x[slot[r] // K]
    offset    row * width + column, which passes 2^31 long before memory ends

Sums in token order are in kernels/combine. No autograd here.
"""

# T tokens   K top-k   S slots (= T * K)   R routed rows (= S)   E experts   D model width

import torch
from torch import Tensor

from moe_runtime.kernels.permute import _native, _reference
from moe_runtime.kernels.permute._reference import Route
from moe_runtime.kernels.select import Problem, Table, native, reference, triton, triton_missing

__all__ = ["GATHER_ROWS", "ROUTE", "Route", "element_offset", "gather_rows", "route"]

if triton_missing() is None:
    from moe_runtime.kernels.permute import _triton

    _ROUTE_ON_GPU = triton(_triton.route, *_native.ID_DTYPES)
    _GATHER_ON_GPU = triton(_triton.gather_rows, *_triton.DTYPES)
else:
    _ROUTE_ON_GPU = triton(None)
    _GATHER_ON_GPU = triton(None)

ROUTE = Table(
    "route",
    (native(_native.route, *_native.ID_DTYPES), _ROUTE_ON_GPU, reference(_reference.route)),
    probe_dtype=_native.ID_DTYPES[0],
)
GATHER_ROWS = Table(
    "gather_rows",
    (native(_native.gather_rows, *_native.DTYPES), _GATHER_ON_GPU, reference(_reference.gather_rows)),
)


def route(ids_TK: Tensor, num_experts: int, *, backend: str | None = None) -> Route:
    """Sort the slots of `ids_TK` [T, K] int64 or int32 by expert id, stably; see Route.

    A negative id drops its slot. An id >= num_experts is a ValueError on the CPU; on another device, where a check
    would wait for it, and in a compiled region, the reference drops the slot too.
    """
    if ids_TK.dim() != 2 or num_experts < 1:
        raise ValueError(f"expected ids (T, K) and num_experts >= 1, got {tuple(ids_TK.shape)} and {num_experts}")
    if ids_TK.dtype not in _native.ID_DTYPES:
        raise TypeError(f"ids must be int64 or int32, got {ids_TK.dtype}")
    if ids_TK.numel() >= 2**31:
        raise ValueError(f"slots are numbered in int32: expected fewer than 2^31 ids, got {ids_TK.numel()}")
    return ROUTE.choose(Problem((ids_TK,)), backend)(ids_TK, num_experts)


def element_offset(row: Tensor, column: Tensor | int, *, width: int) -> Tensor:
    """row * width + column in int64, whatever the integer dtypes: at width 7168 row 299,594 starts past 2^31."""
    return row.to(torch.int64) * width + column


def gather_rows(x_TD: Tensor, slot_R: Tensor, ends_E: Tensor, *, top_k: int, backend: str | None = None) -> Tensor:
    """y[r] = x[slot[r] // top_k] for r < ends[-1], exact zeros below; shape (R, D), x's dtype.

    slot_R [R] int32 and ends_E [E] int32 are a Route's. Also the gradient of combine.gather_sum.
    """
    if x_TD.dim() != 2 or slot_R.dim() != 1 or ends_E.dim() != 1 or not ends_E.shape[0] or top_k < 1:
        raise ValueError(
            "expected x (T, D), slot (R,), ends (E >= 1,) and top_k >= 1, "
            f"got {tuple(x_TD.shape)}, {tuple(slot_R.shape)}, {tuple(ends_E.shape)} and {top_k}"
        )
    return GATHER_ROWS.choose(Problem((x_TD,)), backend)(x_TD, slot_R, ends_E, top_k)
