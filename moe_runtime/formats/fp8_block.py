"""FP8 with a float32 scale for each 128 values of a row (activations, gradients) or each 128 x 128 tile (weights).

    7 6    3 2   0        7 6     2 1  0
    [s|eeee|mmm] E4M3     [s|eeeee|mm] E5M2        value = element * scale[block]        scale: float32

    1 x 128     row r  |---- 128 elements, scale[r, 0] ----|---- 128 elements, scale[r, 1] ----|
    128 x 128   rows 128i .. 128i+127 of columns 128j .. 128j+127 share scale[i, j]

The scale is chosen as in float8, with amax of the block; power_of_two is on unless asked otherwise. A block that holds
inf or NaN becomes NaN, scale and elements; its neighbors do not change.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from moe_runtime.formats.encodings import E4M3_OR_E5M2, Encoding
from moe_runtime.formats.format import Block, Format

__all__ = ["FP8Block"]

_SIZE = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class FP8Block(Format):
    """Bytes a parameter and direction: 1 + 4/128 = 1.03125, two-dimensional 1 + 4/16384."""

    name: ClassVar[str] = "fp8_block"
    element: Literal["e4m3", "e5m2"] = "e4m3"
    two_dimensional: bool = False
    power_of_two: bool = True

    def __post_init__(self) -> None:
        if self.element not in E4M3_OR_E5M2:
            raise ValueError(f'element must be "e4m3" or "e5m2", got {self.element!r}')

    @property
    def encoding(self) -> Encoding:
        return E4M3_OR_E5M2[self.element]

    @property
    def block(self) -> Block:
        return Block(_SIZE if self.two_dimensional else 1, _SIZE)
