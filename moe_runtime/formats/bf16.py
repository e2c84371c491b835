"""High precision: the values themselves, in bfloat16 or another floating dtype of torch.

    15 14     7 6      0
    [s|eeeeeeee|mmmmmmm]     bfloat16: the upper half of a float32

No scale, and no columnwise copy: a transposed view costs nothing, so both directions store one payload.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from moe_runtime.formats.encodings import Encoding
from moe_runtime.formats.format import Block, Direction, Format

__all__ = ["HighPrecision"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HighPrecision(Format):
    """Values as torch has them: 2 bytes a parameter in bfloat16."""

    name: ClassVar[str] = "high_precision"
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"dtype must be torch.bfloat16, torch.float16 or torch.float32, got {self.dtype}")

    @property
    def encoding(self) -> Encoding | None:
        return None

    @property
    def block(self) -> Block | None:
        return None

    @property
    def payload_dtype(self) -> torch.dtype:
        return self.dtype

    def payload_shape(self, shape: Sequence[int], direction: Direction = "rowwise") -> tuple[int, ...]:
        """The logical shape in either direction."""
        return tuple(shape)

    def logical_shape(self, payload_shape: Sequence[int], direction: Direction = "rowwise") -> tuple[int, ...]:
        return tuple(payload_shape)

    def scale_shape(self, shape: Sequence[int], direction: Direction = "rowwise") -> tuple[int, ...]:
        """No scales."""
        return (0,)

    def stored_bytes(self, shape: Sequence[int], *, rowwise: bool = True, columnwise: bool = False) -> int:
        """One payload, whichever directions are asked for."""
        return prod(shape) * self.dtype.itemsize if rowwise or columnwise else 0
