"""Which tile of the Triton kernels each shape class gets, as measured on an H200. Data, not search.

The wide tile wins where the contraction is long enough to hide that it leaves one program on a multiprocessor.
"""

from moe_runtime.kernels.grouped_gemm._triton_tiles import Tile

_LONG = 4096  # depth of a contraction, or rows of an expert where rows are contracted

_WIDE = Tile(rows=128, columns=256, stages=4)
_NARROW = Tile(rows=128, columns=128, warps=4)
_NARROW_EPILOGUE = Tile(rows=128, columns=128)  # twice the threads: h and the results beside da in registers


def ragged_m(depth: int) -> Tile:
    """For rows that are products of `depth` each."""
    return _WIDE if depth >= _LONG else _NARROW


def ragged_k(num_rows: int, num_experts: int) -> Tile:
    """For weight gradients contracted over `num_rows` rows of `num_experts` experts together."""
    return _WIDE if num_rows >= _LONG * num_experts else _NARROW


def gather_act(depth: int, *, gathered: bool) -> Tile:
    """For h and a, `columns` of h a tile; `gathered` rows come by index."""
    return _WIDE if gathered or depth >= _LONG else _NARROW


def dequant() -> Tile:
    """For products with weights dequantized in registers: not yet measured, chosen to leave room for them."""
    return _NARROW


def dact() -> Tile:
    """For da and what is made of it."""
    return _NARROW_EPILOGUE
