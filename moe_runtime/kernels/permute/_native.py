"""Routing and gathering in moe_runtime._C (csrc/cpu/permute.cpp), and their shapes for tracing."""

# T tokens   K top-k   R routed rows (= T * K)   E experts   D model width

import torch
from torch import Tensor

from moe_runtime.kernels.permute._reference import Route
from moe_runtime.kernels.select import native_status

DTYPES = (torch.float32, torch.bfloat16)
ID_DTYPES = (torch.int64, torch.int32)


def route(ids_TK: Tensor, num_experts: int) -> Route:
    """A counting sort, O(T K + E); ValueError for an id >= num_experts."""
    return Route(*torch.ops.moe_runtime.route.default(ids_TK, num_experts))


def gather_rows(x_TD: Tensor, slot_R: Tensor, ends_E: Tensor, top_k: int) -> Tensor:
    """One copy per row; ValueError for a slot that names no token."""
    return torch.ops.moe_runtime.gather_rows.default(x_TD, slot_R, ends_E, top_k)


if native_status().available:

    @torch.library.register_fake("moe_runtime::route")
    def _(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        int32 = torch.int32
        return (
            ids_TK.new_empty(ids_TK.numel(), dtype=int32),
            ids_TK.new_empty(ids_TK.shape, dtype=int32),
            ids_TK.new_empty(num_experts, dtype=int32),
        )

    @torch.library.register_fake("moe_runtime::gather_rows")
    def _(x_TD: Tensor, slot_R: Tensor, ends_E: Tensor, top_k: int) -> Tensor:
        return x_TD.new_empty(slot_R.shape[0], x_TD.shape[1])
