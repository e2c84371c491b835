"""Routing and gathering in Triton: a counting sort without atomics, and a copy of rows. Never waits for the GPU.

The sort works on tiles of slots: rank each slot among the equal ids of its tile, sum the tiles' counts expert by
expert, then place each slot. An id past the experts drops its slot. Slots are trusted.
"""

# Triton compiles what is below, so its types are not Python's.
# pyright: reportArgumentType=false, reportIndexIssue=false

# T tokens   K top-k   S slots (= T * K) of a tile   C slots of a chunk   R routed rows   E experts   D model width

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.permute._reference import Route
from moe_runtime.kernels.tiles import num_blocks, row_tile

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_SORT_TILE, _SORT_CHUNK = 256, 32
_GATHER_BYTES = 8192  # of a tile: four 16-byte accesses in flight per thread


def route(ids_TK: Tensor, num_experts: int) -> Route:
    """A counting sort, O(T K + E tiles) after O(tile) comparisons per slot."""
    ids_TK = ids_TK.contiguous()
    num_slots, num_tiles = ids_TK.numel(), num_blocks(ids_TK.numel(), _SORT_TILE)
    slot_R, row_TK, rank_S = (
        ids_TK.new_empty(shape, dtype=torch.int32) for shape in (num_slots, ids_TK.shape, num_slots)
    )
    if not num_slots:
        return Route(slot_R, row_TK, ids_TK.new_zeros(num_experts, dtype=torch.int32))
    # One more expert, after the others, owns the dropped slots. Expert-major: a running sum is the order of the rows.
    count_EN = ids_TK.new_zeros(num_experts + 1, num_tiles, dtype=torch.int32)
    _rank_kernel[(num_tiles,)](
        ids_TK, rank_S, count_EN, num_slots, num_tiles, num_experts, TILE=_SORT_TILE, CHUNK=_SORT_CHUNK
    )
    end_EN = torch.cumsum(count_EN.view(-1), 0, dtype=torch.int32).view(count_EN.shape)
    _place_kernel[(num_tiles,)](
        ids_TK, rank_S, count_EN, end_EN, slot_R, row_TK, num_slots, num_tiles, num_experts, TILE=_SORT_TILE
    )
    return Route(slot_R, row_TK, end_EN[:num_experts, -1].contiguous())


def gather_rows(x_TD: Tensor, slot_R: Tensor, ends_E: Tensor, top_k: int) -> Tensor:
    """One copy per row, exact zeros from ends[-1] on."""
    x_TD, slot_R = x_TD.contiguous(), slot_R.contiguous()
    num_rows, width = slot_R.shape[0], x_TD.shape[1]
    y_RD = x_TD.new_empty(num_rows, width)
    if not y_RD.numel():
        return y_RD
    # Rows vary fastest over the grid: a piece of every token's columns stays in L2 until each of its K rows is written.
    rows, columns = row_tile(width, _GATHER_BYTES // x_TD.element_size())
    _gather_rows_kernel[(num_blocks(num_rows, rows), num_blocks(width, columns))](
        y_RD,
        x_TD,
        slot_R,
        ends_E,
        num_rows,
        width,
        (ends_E.shape[0] - 1) * ends_E.stride(0),
        TOP_K=top_k,
        ROWS=rows,
        COLUMNS=columns,
    )
    return y_RD


@triton.jit
def _keys(ids_ptr, slot_S, num_slots, num_experts):
    """The id of each slot; num_experts for a dropped one, one more past the last slot."""
    inside_S = slot_S < num_slots
    id_S = tl.load(ids_ptr + slot_S, mask=inside_S, other=0)
    key_S = tl.where((id_S < 0) | (id_S >= num_experts), num_experts, id_S).to(tl.int32)
    return tl.where(inside_S, key_S, num_experts + 1)


@triton.jit(do_not_specialize=["num_slots", "num_tiles"])
def _rank_kernel(
    ids_ptr, rank_ptr, count_ptr, num_slots, num_tiles, num_experts, TILE: tl.constexpr, CHUNK: tl.constexpr
):
    """rank[s] = how many earlier slots of the tile have its key; count[key, tile] = how many have the key at all."""
    tile = tl.program_id(0).to(tl.int64)
    lane_S = tl.arange(0, TILE)
    slot_S = tile * TILE + lane_S
    key_S = _keys(ids_ptr, slot_S, num_slots, num_experts)
    rank_S = tl.zeros((TILE,), tl.int32)
    count_S = tl.zeros((TILE,), tl.int32)
    for start in range(0, TILE, CHUNK):
        lane_C = start + tl.arange(0, CHUNK)
        key_C = _keys(ids_ptr, tile * TILE + lane_C, num_slots, num_experts)
        same_SC = key_S[:, None] == key_C[None, :]
        earlier_SC = lane_C[None, :] < lane_S[:, None]
        rank_S += tl.sum((same_SC & earlier_SC).to(tl.int32), axis=1)
        count_S += tl.sum(same_SC.to(tl.int32), axis=1)
    inside_S = slot_S < num_slots
    tl.store(rank_ptr + slot_S, rank_S, mask=inside_S)
    tl.store(count_ptr + key_S.to(tl.int64) * num_tiles + tile, count_S, mask=inside_S & (rank_S == 0))


@triton.jit(do_not_specialize=["num_slots", "num_tiles"])
def _place_kernel(
    ids_ptr,
    rank_ptr,
    count_ptr,
    end_ptr,
    slot_ptr,
    row_ptr,
    num_slots,
    num_tiles,
    num_experts,
    TILE: tl.constexpr,
):
    """row = end[key, tile] - count[key, tile] + rank; slot[row] = s, and row[s] = row unless dropped."""
    tile = tl.program_id(0).to(tl.int64)
    slot_S = tile * TILE + tl.arange(0, TILE)
    inside_S = slot_S < num_slots
    key_S = _keys(ids_ptr, slot_S, num_slots, num_experts)
    cell_S = key_S.to(tl.int64) * num_tiles + tile
    end_S = tl.load(end_ptr + cell_S, mask=inside_S, other=0)
    count_S = tl.load(count_ptr + cell_S, mask=inside_S, other=0)
    row_S = end_S - count_S + tl.load(rank_ptr + slot_S, mask=inside_S, other=0)
    tl.store(slot_ptr + row_S, slot_S.to(tl.int32), mask=inside_S)
    tl.store(row_ptr + slot_S, tl.where(key_S < num_experts, row_S, -1), mask=inside_S)


@triton.jit(do_not_specialize=["num_rows", "last_end"])
def _gather_rows_kernel(
    y_ptr,
    x_ptr,
    slot_ptr,
    ends_ptr,
    num_rows,
    width,
    last_end,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y[r] = x[slot[r] // TOP_K] for r < ends[-1], else 0; what is not copied is not read."""
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside_R, inside_C = row_R < num_rows, column_C < width
    routed_R = inside_R & (row_R < tl.load(ends_ptr + last_end))
    token_R = (tl.load(slot_ptr + row_R, mask=routed_R, other=0) // TOP_K).to(tl.int64)
    x_RC = tl.load(
        (x_ptr + token_R * width)[:, None] + column_C[None, :], mask=routed_R[:, None] & inside_C[None, :], other=0.0
    )
    tl.store((y_ptr + row_R * width)[:, None] + column_C[None, :], x_RC, mask=inside_R[:, None] & inside_C[None, :])
