"""Inputs that break grouped kernels: empty experts, one owner of all rows, poisoned tails and memory, odd strides."""

# R rows   D columns   E experts

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor
from torch.utils import deterministic

RAGGED: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "even": (4, 4, 4, 4),
        "uneven": (7, 1, 5, 3),
        "first_empty": (0, 6, 4, 5),
        "middle_empty": (6, 0, 0, 7),
        "last_empty": (5, 9, 3, 0),
        "first_owns_all": (17, 0, 0, 0),
        "middle_owns_all": (0, 17, 0, 0),
        "last_owns_all": (0, 0, 0, 17),
        "no_rows": (0, 0, 0, 0),
    }
)
"""Rows of each of 4 experts, by what is hostile about them."""


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Memory that torch hands out uninitialized holds NaN (the largest value for integers), whoever asks for it.

    Torch fills it in `use_deterministic_algorithms` mode, which is on inside and restored after.
    """
    mode = torch.get_deterministic_debug_mode()
    fill = deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    try:
        torch.use_deterministic_algorithms(True)
        deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = fill  # pyright: ignore[reportAttributeAccessIssue]


def with_nan_tail(rows: Tensor, num_rows: int) -> Tensor:
    """`rows` (R, ...) followed by `num_rows` rows of NaN: what stands past the last expert's rows is nobody's."""
    return torch.cat([rows, rows.new_full((num_rows, *rows.shape[1:]), float("nan"))])


def strided(values: Tensor) -> Tensor:
    """The same values, at least one-dimensional, in every other place of memory that holds NaN between them."""
    spaced = torch.full((*values.shape, 2), float("nan"), dtype=values.dtype, device=values.device)
    spaced[..., 0] = values
    return spaced[..., 0]
