"""Every layout against its drawing, and against its inverse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.formats.layouts import (
    expand_scale,
    pack_nibbles,
    shrink_scale,
    swizzle_scale,
    unpack_nibbles,
    unswizzle_scale,
)


def random_bytes(shape: tuple[int, ...], seed: int, high: int = 256) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_the_first_element_is_the_low_nibble() -> None:
    assert pack_nibbles(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]
    assert unpack_nibbles(torch.tensor([0x21, 0xF3], dtype=torch.uint8)).tolist() == [1, 2, 3, 15]
    with pytest.raises(ValueError, match=r"expected an even last dimension, got \(2, 3\)"):
        pack_nibbles(torch.zeros(2, 3, dtype=torch.uint8))


@given(st.integers(0, 3), st.integers(0, 5), st.integers(0, 9), st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_nibbles_round_trip(members: int, rows: int, pairs: int, seed: int) -> None:
    codes = random_bytes((members, rows, 2 * pairs), seed, 16)
    packed = pack_nibbles(codes)
    assert torch.equal(unpack_nibbles(packed), codes)
    assert torch.equal(pack_nibbles(unpack_nibbles(packed)), packed)


def test_swizzle_is_the_documented_index() -> None:
    num_rows, num_blocks = 300, 10
    scale = random_bytes((num_rows, num_blocks), 0)
    flat = swizzle_scale(scale).flatten()
    tiles_across = -(-num_blocks // 4)
    expected = torch.zeros(3 * tiles_across * 512, dtype=torch.uint8)
    for i in range(num_rows):
        for j in range(num_blocks):
            tile = (i // 128) * tiles_across + j // 4
            expected[tile * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4] = scale[i, j]
    assert torch.equal(flat, expected)  # the padding, too, is 0


@given(st.lists(st.integers(0, 3), max_size=2), st.integers(0, 290), st.integers(0, 9), st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_swizzle_round_trips(lead: list[int], rows: int, blocks: int, seed: int) -> None:
    scale = random_bytes((*lead, rows, blocks), seed)
    tiles = swizzle_scale(scale)
    assert tiles.shape == (*lead, -(-rows // 128), -(-blocks // 4), 512) and tiles.is_contiguous()
    assert torch.equal(unswizzle_scale(tiles, rows, blocks), scale)
    padding = swizzle_scale(torch.ones_like(scale)) == 0
    assert torch.equal(unswizzle_scale(tiles + 7 * padding, rows, blocks), scale)  # whatever the padding holds


def test_unswizzle_refuses_other_tiles() -> None:
    with pytest.raises(ValueError, match=r"129 x 4 scales are tiles \(\.\.\., \(2, 1, 512\)\), got \(1, 1, 512\)"):
        unswizzle_scale(torch.zeros(1, 1, 512, dtype=torch.uint8), 129, 4)


@given(st.integers(0, 3), st.integers(0, 5), st.integers(0, 5), st.sampled_from([16, 128]))
@settings(max_examples=20, deadline=None)
def test_expand_round_trips(members: int, rows: int, blocks: int, block_rows: int) -> None:
    scale = random_bytes((members, rows, blocks), 1)
    expanded = expand_scale(scale, block_rows)
    assert expanded.shape == (members, rows * block_rows, blocks)
    assert torch.equal(shrink_scale(expanded, block_rows), scale)
    for row in range(rows):
        assert torch.equal(expanded[:, row * block_rows + block_rows - 1], scale[:, row])
