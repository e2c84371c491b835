"""MXFP8: FP8 elements with a power-of-two scale for each 32 along the direction.

    7 6    3 2   0        7 6     2 1  0                 7      0
    [s|eeee|mmm] E4M3     [s|eeeee|mm] E5M2     scale:   [eeeeeeee] E8M0 = 2^(b - 127)

    row r of the stored matrix   |-- 32 elements, scale[r, 0] --|-- 32 elements, scale[r, 1] --| ...
    value = element * 2^(b - 127)

    b        the exponent of amax / max, rounded up (max: 448 for E4M3, 57344 for E5M2), so no element saturates
    payload  cast(x * 2^(127 - b))

b = 0 is 2^-127, which a block of zeros and amax below 2^-127 * max get; b = 255 is NaN. A block that holds inf or NaN
becomes NaN, scale and elements; its neighbors do not change.

The directions are quantized apart from the same values: neither can be made from the other.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from moe_runtime.formats.encodings import E4M3_OR_E5M2, E8M0, Encoding
from moe_runtime.formats.format import Block, Format

__all__ = ["MXFP8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP8(Format):
    """1 + 1/32 = 1.03125 bytes a parameter and direction."""

    name: ClassVar[str] = "mxfp8"
    element: Literal["e4m3", "e5m2"] = "e4m3"

    def __post_init__(self) -> None:
        if self.element not in E4M3_OR_E5M2:
            raise ValueError(f'element must be "e4m3" or "e5m2", got {self.element!r}')

    @property
    def encoding(self) -> Encoding:
        return E4M3_OR_E5M2[self.element]

    @property
    def block(self) -> Block:
        return Block(1, 32)

    @property
    def scale_encoding(self) -> Encoding:
        return E8M0
