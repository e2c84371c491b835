"""Which tile each shape class gets, as measured on an H200. Data, not search: nothing is tuned at run time."""

from moe_runtime.kernels.grouped_gemm._triton_tiles import Tile


def ragged_m(num_rows: int, num_experts: int, width: int, depth: int) -> Tile:
    """For `num_rows` rows over `num_experts` experts, each row a product of `depth` with `width` columns."""
    return Tile(rows=128, columns=256, stages=4)


def ragged_k(num_rows: int, num_experts: int, out: int, width: int) -> Tile:
    """For dw (E, out, width) contracted over `num_rows` rows."""
    return Tile(rows=128, columns=256, stages=4)


def gather_act(num_rows: int, num_experts: int, width: int, depth: int, *, gathered: bool) -> Tile:
    """For h (R, 2 width) and a (R, width), `columns` of h a tile; `gathered` rows come by index."""
    return Tile(rows=128, columns=256, stages=4)


def dact(num_rows: int, num_experts: int, width: int, depth: int, *, gathered: bool) -> Tile:
    """For da (R, width) of `depth` products each; `gathered` rows come by index."""
    return Tile(rows=128, columns=128, warps=4, stages=3)
