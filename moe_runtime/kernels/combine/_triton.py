"""The sum over choices in Triton: each token's rows added in order, nothing shared between programs."""

# Triton compiles what is below, so its types are not Python's.
# pyright: reportArgumentType=false, reportIndexIssue=false

# T tokens   K top-k   R routed rows   D model width   C columns of a tile

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.tiles import num_blocks, row_tile

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_TILE_ELEMENTS = 1024  # the loads of all K rows are in flight at once


def gather_sum(y_RD: Tensor, row_TK: Tensor) -> Tensor:
    """One pass over the rows of each token. Rows are trusted: one past the last is read."""
    y_RD, row_TK = y_RD.contiguous(), row_TK.contiguous()
    (num_tokens, top_k), width = row_TK.shape, y_RD.shape[1]
    out_TD = y_RD.new_empty(num_tokens, width)
    if not out_TD.numel():
        return out_TD
    tokens, columns = row_tile(width, _TILE_ELEMENTS)
    _gather_sum_kernel[(num_blocks(num_tokens, tokens), num_blocks(width, columns))](
        out_TD, y_RD, row_TK, num_tokens, width, TOP_K=top_k, TOKENS=tokens, COLUMNS=columns
    )
    return out_TD


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_sum_kernel(
    out_ptr,
    y_ptr,
    row_ptr,
    num_tokens,
    width,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[t] = sum_k y[row[t, k]] over increasing k, from +0 in fp32, rounded once."""
    token_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside_T, inside_C = token_T < num_tokens, column_C < width
    sum_TC = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for k in tl.static_range(TOP_K):
        row_T = tl.load(row_ptr + token_T * TOP_K + k, mask=inside_T, other=-1).to(tl.int64)
        named_TC = (row_T >= 0)[:, None] & inside_C[None, :]
        y_TC = tl.load((y_ptr + row_T * width)[:, None] + column_C[None, :], mask=named_TC, other=0.0)
        sum_TC += y_TC.to(tl.float32)
    tl.store(
        (out_ptr + token_T * width)[:, None] + column_C[None, :],
        sum_TC.to(out_ptr.dtype.element_ty),
        mask=inside_T[:, None] & inside_C[None, :],
    )
