"""What the grouped Triton GEMMs share: which tile a program works on, in what order, and the inner product.

Work is cut on the device, from `ends`; the host knows only how many tiles there can be. Each program finds its tile in
a table that a small kernel writes first, so nothing waits for the GPU and a captured graph follows new counts.
"""

# Triton compiles what is below, so its types are not Python's.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false

# R routed rows   E experts   N row tiles   M, C, K rows, columns and depth of a tile   L lanes

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_runtime.kernels.tiles import num_blocks

INTERPRETED = bool(triton.knobs.runtime.interpret)  # pyright: ignore[reportAttributeAccessIssue] # read once: a process interprets kernels or compiles them

_LANES = 128
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """The tile of a program: `rows` x `columns` of the result, `depth` of the contraction at a time.

    group   row tiles that run side by side before the next column tile, so that both operands stay in L2
    warps, stages  of the program and of its software pipeline
    """

    rows: int
    columns: int
    depth: int = 64
    group: int = 8
    warps: int = 8
    stages: int = 3

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "depth", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} of a tile must be a power of two, got {value}")

    def meta(self) -> dict[str, Any]:
        """As arguments of a kernel launch."""
        return {
            "BLOCK_M": self.rows,
            "BLOCK_C": self.columns,
            "BLOCK_K": self.depth,
            "GROUP": self.group,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def dense(operand: Tensor) -> Tensor:
    """The operand with whole rows in memory at a 16-byte address: what a descriptor reads."""
    operand = operand.detach().as_subclass(Tensor)
    if operand.is_contiguous() and operand.data_ptr() % ALIGNMENT_BYTES == 0:
        return operand
    return torch.empty(operand.shape, dtype=operand.dtype, device=operand.device).copy_(operand)


def descriptor(values: Tensor, shape: list[int], block: list[int]) -> TensorDescriptor:
    """How the copy engine reads blocks of `values`, contiguous and seen in `shape`; zeros outside."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return TensorDescriptor(values, shape, strides, block)


def row_tiles(ends_E: Tensor, num_rows: int, rows: int) -> Tensor:
    """(3, N) int32: expert, first row and past-the-last row of each tile of `rows` rows; no tile holds two experts.

    Rows from ends[-1] on form the tiles of expert E; what is left of the N = ceil(R / rows) + E + 1 places is empty.
    """
    num_experts = ends_E.shape[0]
    table_3N = ends_E.new_empty(3, num_blocks(num_rows, rows) + num_experts + 1)
    _row_tiles_kernel[(num_experts + 1,)](
        table_3N,
        ends_E,
        num_rows,
        table_3N.shape[1],
        num_experts,
        EXPERTS=triton.next_power_of_2(num_experts + 1),
        ROWS=rows,
        LANES=_LANES,
        num_warps=4,  # pyright: ignore[reportCallIssue]
    )
    return table_3N


def largest_first(ends_E: Tensor) -> Tensor:
    """(E,) int32: experts by falling number of rows, the lower id first of equals; what takes long starts early."""
    order_E = torch.empty_like(ends_E)
    _largest_first_kernel[(ends_E.shape[0],)](
        order_E,
        ends_E,
        ends_E.shape[0],
        EXPERTS=triton.next_power_of_2(ends_E.shape[0]),
        num_warps=4,  # pyright: ignore[reportCallIssue]
    )
    return order_E


@triton.jit
def _counts(ends_ptr, num_experts, EXPERTS: tl.constexpr):
    """Rows of each expert, 0 past the last."""
    expert_E = tl.arange(0, EXPERTS)
    end_E = tl.load(ends_ptr + expert_E, mask=expert_E < num_experts, other=0)
    start_E = tl.load(ends_ptr + expert_E - 1, mask=(expert_E > 0) & (expert_E < num_experts), other=0)
    return end_E - start_E


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "num_experts"])
def _row_tiles_kernel(
    table_ptr,
    ends_ptr,
    num_rows,
    num_tiles,
    num_experts,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Program e writes the tiles of expert e; the last one those of the tail, and the empty places."""
    e = tl.program_id(0)
    expert_E = tl.arange(0, EXPERTS)
    tiles_E = tl.cdiv(_counts(ends_ptr, num_experts, EXPERTS), ROWS)
    place = tl.sum(tl.where(expert_E < e, tiles_E, 0))
    start = tl.load(ends_ptr + e - 1, mask=e > 0, other=0)
    stop = tl.load(ends_ptr + e, mask=e < num_experts, other=num_rows)
    past = tl.where(e < num_experts, place + tl.cdiv(stop - start, ROWS), num_tiles)
    lane_L = tl.arange(0, LANES)
    first = place
    while first < past:
        place_L = first + lane_L
        inside_L = place_L < past
        tl.store(table_ptr + place_L, e, mask=inside_L)
        tl.store(table_ptr + num_tiles + place_L, tl.minimum(start + (place_L - place) * ROWS, stop), mask=inside_L)
        tl.store(table_ptr + 2 * num_tiles + place_L, stop, mask=inside_L)
        first += LANES


@triton.jit(do_not_specialize=["num_experts"])
def _largest_first_kernel(order_ptr, ends_ptr, num_experts, EXPERTS: tl.constexpr):
    """Program e places e behind every expert that goes before it."""
    e = tl.program_id(0)
    expert_E = tl.arange(0, EXPERTS)
    count_E = _counts(ends_ptr, num_experts, EXPERTS)
    count = tl.sum(tl.where(expert_E == e, count_E, 0))
    before_E = (count_E > count) | ((count_E == count) & (expert_E < e))
    place = tl.sum((before_E & (expert_E < num_experts)).to(tl.int32))
    tl.store(order_ptr + place, e)


@triton.jit
def grouped_order(program, num_m, num_c, GROUP: tl.constexpr):
    """(row tile, column tile) of a program: GROUP row tiles side by side, then their next column tile."""
    width = GROUP * num_c
    first_m = (program // width) * GROUP
    height = tl.minimum(num_m - first_m, GROUP)
    inside = program % width
    return first_m + inside % height, inside // height


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b in fp32; UPCAST where bfloat16 products would be wrong (the interpreter)."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def halves(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(gate, up) of a tile with COLUMNS columns: its even and odd ones, or its first and second half."""
    if INTERLEAVED:
        pairs = tl.reshape(values, (ROWS, COLUMNS // 2, 2))
    else:
        pairs = tl.permute(tl.reshape(values, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
    return tl.split(pairs)
