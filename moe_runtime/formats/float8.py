"""FP8 with one scale a member, from the member's own largest magnitude (current scaling).

    7 6    3 2   0        7 6     2 1  0
    [s|eeee|mmm] E4M3     [s|eeeee|mm] E5M2        value = element * scale[e]        scale: float32, one a member

    S         max / amax; max: 448 (E4M3) or 57344 (E5M2), amax: of the member's finite values
              with power_of_two cut to its exponent, 2^floor(log2 S)
    payload   cast(x * S); scale = 1 / S

S = 1 for a member of zeros and the largest float32 where the quotient overflows. An element that is inf or NaN becomes
NaN; it does not enter amax, so nothing else changes. The columnwise payload is the rowwise one transposed, and both
directions share the scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

from moe_runtime.formats.encodings import E4M3_OR_E5M2, Encoding
from moe_runtime.formats.format import Block, Format

__all__ = ["Float8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8(Format):
    """1 byte a parameter and direction, plus 4 a member."""

    name: ClassVar[str] = "float8"
    element: Literal["e4m3", "e5m2"] = "e4m3"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if self.element not in E4M3_OR_E5M2:
            raise ValueError(f'element must be "e4m3" or "e5m2", got {self.element!r}')

    @property
    def encoding(self) -> Encoding:
        return E4M3_OR_E5M2[self.element]

    @property
    def block(self) -> Block | None:
        return None

    def stored_bytes(self, shape: Sequence[int], *, rowwise: bool = True, columnwise: bool = False) -> int:
        """The scales count once, as the directions share them."""
        directions = rowwise + columnwise
        return directions * prod(shape) + (4 * prod(shape[:-2]) if directions else 0)
