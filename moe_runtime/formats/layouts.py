"""Orders of bytes, each beside its inverse: nibbles in a byte, and block scales as a block-scaled GEMM reads them.

Scales are stored compact: row-major, one per block. That is what is sent, sharded and saved. A GEMM on hardware with
block-scaled tensor cores reads one scale per row and block in tiles of 128 rows x 4 blocks, 512 bytes each, padded with
zeros to whole tiles:

    tile (I, J) holds rows 128 I .. and blocks 4 J ..; tiles are row-major; inside a tile
    byte 16 * (i % 32) + 4 * (i // 32) + j   is the scale of row i, block j      i < 128, j < 4

          byte  0 ..  3   row 0    4 ..  7  row 32     8 .. 11  row 64    12 .. 15  row 96
          byte 16 .. 19   row 1   20 .. 23  row 33    24 .. 27  row 65    28 .. 31  row 97    ...
"""

# E members   R rows   C columns   B blocks of a row   I, J tiles of rows and of blocks

import torch
from torch import Tensor

__all__ = ["expand_scale", "pack_nibbles", "shrink_scale", "swizzle_scale", "unpack_nibbles", "unswizzle_scale"]

_TILE_ROWS, _TILE_BLOCKS = 128, 4


def pack_nibbles(codes: Tensor) -> Tensor:
    """(..., 2n) uint8 codes below 16 -> (..., n) bytes: element 2i in the low nibble, 2i + 1 in the high one."""
    if codes.shape[-1] % 2:
        raise ValueError(f"two nibbles make a byte: expected an even last dimension, got {tuple(codes.shape)}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Exact inverse of `pack_nibbles`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def swizzle_scale(scale: Tensor) -> Tensor:
    """(..., R, B) scales, one per row and block -> (..., I, J, 512) bytes in the GEMM's order, padding 0."""
    *lead, num_rows, num_blocks = scale.shape
    padding = (0, -num_blocks % _TILE_BLOCKS, 0, -num_rows % _TILE_ROWS)
    padded = torch.nn.functional.pad(scale, padding)
    tiles = padded.unflatten(-2, (-1, 4, 32)).unflatten(-1, (-1, _TILE_BLOCKS))  # ..., I, i // 32, i % 32, J, j
    dims = range(len(lead))
    n = len(lead)
    return tiles.permute(*dims, n, n + 3, n + 2, n + 1, n + 4).flatten(-3).contiguous()


def unswizzle_scale(tiles: Tensor, num_rows: int, num_blocks: int) -> Tensor:
    """Exact inverse of `swizzle_scale` for (..., num_rows, num_blocks) scales; padding is dropped, whatever it is."""
    expected = (-(-num_rows // _TILE_ROWS), -(-num_blocks // _TILE_BLOCKS), _TILE_ROWS * _TILE_BLOCKS)
    if tuple(tiles.shape[-3:]) != expected:
        raise ValueError(f"{num_rows} x {num_blocks} scales are tiles (..., {expected}), got {tuple(tiles.shape)}")
    n = tiles.dim() - 3
    parts = tiles.unflatten(-1, (32, 4, _TILE_BLOCKS))  # ..., I, J, i % 32, i // 32, j
    rows = parts.permute(*range(n), n, n + 3, n + 2, n + 1, n + 4).flatten(n, n + 2).flatten(-2)
    return rows[..., :num_rows, :num_blocks].contiguous()


def expand_scale(scale: Tensor, block_rows: int) -> Tensor:
    """(..., R / block_rows, B) scales of two-dimensional blocks -> (..., R, B), one per row and block."""
    return scale.repeat_interleave(block_rows, dim=-2)


def shrink_scale(scale: Tensor, block_rows: int) -> Tensor:
    """Exact inverse of `expand_scale`."""
    return scale[..., ::block_rows, :].contiguous()
