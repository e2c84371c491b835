"""Rows moved to begin at multiples: by hand, against a loop, and what never comes along."""

# R routed rows   P rows with padding   D columns   E experts

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_runtime.functional.padding import padded_rows
from moe_runtime.testing import RAGGED, nan_filled_memory, with_nan_tail


def ends(splits: list[int]) -> Tensor:
    return torch.tensor(splits).cumsum(0).to(torch.int32)


def loop(x_RD: Tensor, splits: list[int], multiple: int) -> tuple[Tensor, list[int]]:
    parts, stops, stop = [], [], 0
    for part in x_RD[: sum(splits)].split(splits):
        size = -(-len(part) // multiple) * multiple
        parts.append(torch.cat([part, part.new_zeros(size - len(part), part.shape[1])]))
        stop += size
        stops.append(stop)
    return torch.cat(parts), stops


@pytest.mark.parametrize(
    ("splits", "multiple", "padded"),
    [
        ([44, 20], 32, [64, 32]),
        ([0, 1, 16, 17, 31, 32, 33], 32, [0, 32, 32, 32, 32, 32, 64]),
        ([0, 0], 32, [0, 0]),
        ([5, 3], 1, [5, 3]),
        ([128, 1], 128, [128, 128]),
    ],
    ids=str,
)
def test_padded_sizes(splits: list[int], multiple: int, padded: list[int]) -> None:
    """An expert without rows gets none."""
    layout = padded_rows(ends(splits), sum(splits), multiple)
    assert layout.ends_E.tolist() == torch.tensor(padded).cumsum(0).tolist() and layout.ends_E.dtype == torch.int32
    assert layout.row_P.shape[0] % multiple == 0 and layout.row_P.shape[0] >= sum(padded)


def test_offsets_by_hand() -> None:
    layout = padded_rows(ends([44, 20]), 64, 32)
    assert [0, *layout.ends_E.tolist()] == [0, 64, 96]
    assert layout.row_P[:44].tolist() == list(range(44)) and layout.row_P[64:84].tolist() == list(range(44, 64))
    assert set(layout.row_P[44:64].tolist()) == {64} == set(layout.row_P[84:].tolist())


@settings(max_examples=60, deadline=None)
@given(
    splits=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    multiple=st.sampled_from([1, 16, 32, 128]),
    tail=st.integers(0, 5),
)
def test_against_a_loop(splits: list[int], multiple: int, tail: int) -> None:
    num_rows = sum(splits) + tail
    x_RD = torch.arange(1, num_rows * 2 + 1, dtype=torch.float32).view(num_rows, 2)
    layout = padded_rows(ends(splits), num_rows, multiple)
    expected_PD, stops = loop(x_RD, splits, multiple)
    got_PD = layout.gather(x_RD)
    assert layout.ends_E.tolist() == stops
    assert torch.equal(got_PD[: stops[-1]], expected_PD) and not got_PD[stops[-1] :].any()
    assert len(got_PD) <= num_rows + len(splits) * (multiple - 1) + multiple - 1


@pytest.mark.parametrize("splits", RAGGED.values(), ids=RAGGED)
def test_poison_past_the_end_never_comes_along(splits: tuple[int, ...]) -> None:
    x_RD = with_nan_tail(torch.randn(sum(splits), 8), 3)
    with nan_filled_memory():
        got_PD = padded_rows(ends(list(splits)), len(x_RD), 32).gather(x_RD)
    assert got_PD.isfinite().all()
    assert got_PD.count_nonzero() == x_RD[: sum(splits)].count_nonzero()


def test_no_rows() -> None:
    layout = padded_rows(ends([0, 0, 0]), 0, 32)
    got_PD = layout.gather(torch.zeros(0, 8, dtype=torch.bfloat16))
    assert got_PD.shape[1] == 8 and got_PD.dtype == torch.bfloat16 and not got_PD.any()
    assert layout.ends_E.tolist() == [0, 0, 0]


def test_room_depends_on_sizes_alone() -> None:
    """So that nothing waits for a device to say how many rows each expert has."""
    rooms = {len(padded_rows(ends(splits), 20, 32).row_P) for splits in ([20, 0], [0, 20], [10, 10], [1, 1], [0, 0])}
    assert len(rooms) == 1


def test_dtypes_and_strides() -> None:
    x_RD = torch.randn(8, 20).bfloat16().T
    expected_PD, _ = loop(x_RD, [13, 7], 16)
    got_PD = padded_rows(ends([13, 7]), 20, 16).gather(x_RD)
    assert got_PD.dtype == torch.bfloat16 and torch.equal(got_PD[:32], expected_PD)
