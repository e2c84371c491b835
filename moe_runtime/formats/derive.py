"""The other direction of a quantized matrix, where its bytes determine it: blocks are square, or the whole member."""

from dataclasses import replace

from moe_runtime.formats.encodings import E2M1
from moe_runtime.formats.format import Format
from moe_runtime.formats.layouts import pack_nibbles, unpack_nibbles
from moe_runtime.formats.quantized import Quantized

__all__ = ["can_turn", "turned"]


def can_turn(fmt: Format) -> bool:
    """Whether one direction of `fmt` determines the other, bit for bit."""
    return fmt.columnwise_allowed and (fmt.block is None or fmt.block.rows == fmt.block.cols)


def turned(q: Quantized) -> Quantized:
    """The columnwise record of a rowwise one, or the reverse: what quantizing the original would have given.

    Raises ValueError for a format whose directions are quantized apart.
    """
    if not can_turn(q.format):
        block = q.format.block
        raise ValueError(
            f"{q.format.name} with blocks of {block and tuple(block)} cannot make its other direction from the "
            f"{q.direction} one: each is quantized from the original values (square blocks can, as NVFP4's 16 x 16)"
        )
    if q.format.encoding is E2M1:
        payload = pack_nibbles(unpack_nibbles(q.payload).mT.contiguous())
    else:
        payload = q.payload.mT.contiguous()
    return replace(
        q,
        payload=payload,
        scale=q.scale if q.format.block is None else q.scale.mT.contiguous(),
        direction="columnwise" if q.direction == "rowwise" else "rowwise",
    )
