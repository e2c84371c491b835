"""What the bytes of each number format mean: element and scale encodings, blocks, shapes, sizes and layouts.

One file a format, each with a drawing of its bits. Formats are frozen values; nothing here computes with numbers.
"""

from moe_runtime.formats.bf16 import HighPrecision
from moe_runtime.formats.encodings import E2M1, E4M3, E5M2, E8M0, Encoding
from moe_runtime.formats.float8 import Float8
from moe_runtime.formats.format import Block, Direction, Format
from moe_runtime.formats.fp8_block import FP8Block
from moe_runtime.formats.mxfp4 import MXFP4
from moe_runtime.formats.mxfp8 import MXFP8
from moe_runtime.formats.nvfp4 import HADAMARD_SIGNS, NVFP4
from moe_runtime.formats.quantized import Quantized

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "E8M0",
    "HADAMARD_SIGNS",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "Block",
    "Direction",
    "Encoding",
    "FP8Block",
    "Float8",
    "Format",
    "HighPrecision",
    "Quantized",
]
