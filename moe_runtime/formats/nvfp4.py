"""NVFP4: four-bit elements, an FP8 scale for each 16 along the direction, and a float32 scale for the member.

    byte i of a row:   7 6  5 4 3 2  1 0                7 6    3 2   0
                       [s|ee|m|s|ee|m]  E2M1    scale:  [0|eeee|mmm] E4M3      tensor_scale: float32, one a member
                        2i + 1     2i

    1D   row r of the stored matrix   |-- 16 elements, scale[r, 0] --|-- 16 elements, scale[r, 1] --| ...
    2D   rows 16i .. 16i+15 of columns 16j .. 16j+15 share scale[i, j]
    value = element * (scale * tensor_scale)

    S        448 * 6 / amax of the member's finite values: 1 for a member of zeros, at most the largest float32
    scale    cast(block_amax * (S / 6)) to E4M3, saturating at 448
    payload  cast(x * 1 / (scale / S)) to E2M1, saturating at 6; tensor_scale = 1 / S

A block under 2^-10 * 6 / S gets scale 0 and reads as zeros. A block that holds inf or NaN gets the scale NaN (0x7F) and
stores zeros; its neighbors do not change, as the member's amax skips what is not finite.

Options, all off by default:
two_dimensional       tiles of 16 x 16, for weights: the columnwise copy is the rowwise one transposed, bit for bit. In
                      1D neither direction can be made from the other.
random_hadamard       columnwise only (the operand of wgrad): each 16 values of a block are rotated before they are
                      quantized, y = H (d * x) / 4 with H the Hadamard matrix and d fixed signs (HADAMARD_SIGNS), in
                      float32. Two operands rotated alike keep their product; `dequantize` turns back.
stochastic_rounding   for gradients: an element between neighbors a < b becomes b with probability (x - a) / (b - a).
                      Its random bits are Philox4x32-10 of the seed and the element's place, so they are the same at
                      any thread count and on every backend.
"""

from dataclasses import dataclass
from typing import ClassVar

from moe_runtime.formats.encodings import E2M1, E4M3, Encoding
from moe_runtime.formats.format import Block, Format

__all__ = ["HADAMARD_SIGNS", "NVFP4"]

_SIZE = 16

# Set bits of the first 16 of pi's fraction, 0x243F, are -1.
HADAMARD_SIGNS = tuple(-1 if 0x243F >> (15 - i) & 1 else 1 for i in range(_SIZE))


@dataclass(frozen=True, kw_only=True, slots=True)
class NVFP4(Format):
    """Bytes a parameter and direction: 1/2 + 1/16 = 0.5625, two-dimensional 1/2 + 1/256; plus 4 a member."""

    name: ClassVar[str] = "nvfp4"
    has_tensor_scale: ClassVar[bool] = True
    two_dimensional: bool = False
    random_hadamard: bool = False
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        if self.two_dimensional and (self.random_hadamard or self.stochastic_rounding):
            raise ValueError(
                "two_dimensional is for weights, random_hadamard and stochastic_rounding are not: expected one or the "
                f"other, got random_hadamard={self.random_hadamard}, stochastic_rounding={self.stochastic_rounding}"
            )

    @property
    def encoding(self) -> Encoding:
        return E2M1

    @property
    def block(self) -> Block:
        return Block(_SIZE if self.two_dimensional else 1, _SIZE)

    @property
    def scale_encoding(self) -> Encoding:
        return E4M3
