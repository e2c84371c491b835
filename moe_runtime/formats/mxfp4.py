"""MXFP4: four-bit elements with a power-of-two scale for each 32 of a row. Row-wise storage of frozen weights.

    byte i of a row:   7 6  5 4 3 2  1 0
                       [s|ee|m|s|ee|m]  E2M1      scale:  [eeeeeeee] E8M0 = 2^(b - 127)
                        element  element
                         2i + 1     2i             the low nibble comes first

    16 bytes share scale[r, j]:  value = element * 2^(b - 127)

The layout is that of gpt-oss checkpoints, whose (..., groups, 16) blocks are this payload under a view. b is the
exponent of amax / 6 rounded up, so no element saturates. b = 255 is NaN: E2M1 has none, so a block that holds inf or
NaN stores zeros under that scale; its neighbors do not change.
"""

from dataclasses import dataclass
from typing import ClassVar

from moe_runtime.formats.encodings import E2M1, E8M0, Encoding
from moe_runtime.formats.format import Block, Format

__all__ = ["MXFP4"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP4(Format):
    """1/2 + 1/32 = 0.53125 bytes a parameter."""

    name: ClassVar[str] = "mxfp4"
    columnwise_allowed: ClassVar[bool] = False

    @property
    def encoding(self) -> Encoding:
        return E2M1

    @property
    def block(self) -> Block:
        return Block(1, 32)

    @property
    def scale_encoding(self) -> Encoding:
        return E8M0
