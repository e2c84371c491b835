"""The tile of rows and columns that one program of a row kernel works on."""

from typing import NamedTuple

_MAX_COLUMNS = 1024  # of bfloat16, one 16-byte access for each of the 128 threads of 4 warps


class Tile(NamedTuple):
    """Both are powers of two."""

    rows: int
    columns: int


def row_tile(width: int, num_elements: int) -> Tile:
    """About `num_elements` (a power of two) elements: whole rows of `width` columns or, past 1024, a piece of one."""
    columns = min(max(1 << (width - 1).bit_length(), 8), _MAX_COLUMNS)
    return Tile(max(num_elements // columns, 1), columns)


def num_blocks(count: int, block: int) -> int:
    """ceil(count / block)"""
    return -(-count // block)
