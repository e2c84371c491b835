"""The small floating-point encodings that payloads and scales are made of, as values.

    s e..e m..m    value = (-1)^s * 2^(e - bias) * (1 + m / 2^M)    e > 0
                   value = (-1)^s * 2^(1 - bias) * m / 2^M          e = 0, subnormal

What a value becomes when it is encoded (nearest, ties to even; what saturates) is in kernels/quantize. These are facts
of the encodings alone.
"""

from dataclasses import dataclass

import torch

__all__ = ["E2M1", "E4M3", "E4M3_OR_E5M2", "E5M2", "E8M0", "Encoding"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """One encoding. Bytes are stored as uint8; `dtype` is what torch calls them, for a `view`."""

    name: str
    bits: int
    mantissa_bits: int
    exponent_bias: int
    max: float  # the largest finite value
    dtype: torch.dtype


E4M3 = Encoding(name="e4m3", bits=8, mantissa_bits=3, exponent_bias=7, max=448.0, dtype=torch.float8_e4m3fn)
"""s eeee mmm: 0x7F and 0xFF are NaN, no infinity; 448 = 0x7E, smallest 2^-9 = 0x01."""

E5M2 = Encoding(name="e5m2", bits=8, mantissa_bits=2, exponent_bias=15, max=57344.0, dtype=torch.float8_e5m2)
"""s eeeee mm: 0x7C is infinity, above it NaN; 57344 = 0x7B, smallest 2^-16 = 0x01."""

E2M1 = Encoding(name="e2m1", bits=4, mantissa_bits=1, exponent_bias=1, max=6.0, dtype=torch.float4_e2m1fn_x2)
"""s ee m: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; neither infinity nor NaN. Two to a byte, the first low."""

E8M0 = Encoding(name="e8m0", bits=8, mantissa_bits=0, exponent_bias=127, max=2.0**127, dtype=torch.float8_e8m0fnu)
"""eeeeeeee: 2^(e - 127), no sign and no zero; 0 is 2^-127, 255 is NaN."""

E4M3_OR_E5M2 = {"e4m3": E4M3, "e5m2": E5M2}
