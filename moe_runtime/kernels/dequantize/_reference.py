"""Dequantization in torch ops: the definition, and what runs where no kernel does. Never waits for a GPU."""

# E members   R rows   C columns   M, N rows and columns of the stored matrix   b a block

import torch
from torch import Tensor

from moe_runtime.formats import E2M1, E8M0, HADAMARD_SIGNS, NVFP4, Encoding, Format
from moe_runtime.formats.format import Direction
from moe_runtime.formats.layouts import unpack_nibbles


def dequantize(
    payload_EMP: Tensor,
    scale: Tensor,
    tensor_scale_E: Tensor | None,
    fmt: Format,
    direction: Direction,
    dtype: torch.dtype,
) -> Tensor:
    """element * scale, or element * (scale * tensor_scale), in float32; then one rounding to `dtype`. (E, R, C)"""
    assert fmt.encoding is not None
    x_EMN = decode(payload_EMP, fmt.encoding)
    if fmt.block is None:
        x_EMN = x_EMN * scale[:, None, None]
    else:
        scale_Ebb = scale if fmt.scale_encoding is None else decode(scale, fmt.scale_encoding)
        if tensor_scale_E is not None:
            scale_Ebb = scale_Ebb * tensor_scale_E[:, None, None]
        x_EMN = x_EMN * scale_Ebb.repeat_interleave(fmt.block.rows, 1).repeat_interleave(fmt.block.cols, 2)
    if isinstance(fmt, NVFP4) and fmt.random_hadamard and direction == "columnwise":
        x_EMN = rotate_back(x_EMN)
    x_EMN = torch.where(x_EMN.isnan(), torch.nan, x_EMN.to(dtype))
    return x_EMN if direction == "rowwise" else x_EMN.mT.clone(memory_format=torch.contiguous_format)


def decode(codes: Tensor, encoding: Encoding) -> Tensor:
    """The float32 values of bytes; two to a byte for E2M1, which doubles the last dimension."""
    if encoding is E2M1:
        nibbles = unpack_nibbles(codes)
        code = (nibbles & 7).float()
        size = torch.where(code < 4, code * 0.5, torch.where(code < 6, code - 2.0, code * 2.0 - 8))
        return torch.where(nibbles < 8, size, -size)
    if encoding is E8M0:
        bits = torch.where(codes == 0, 1 << 22, codes.int() << 23)
        return torch.where(codes == 255, torch.nan, bits.view(torch.float32))
    return codes.view(encoding.dtype).float()


def rotate_back(y_EMN: Tensor) -> Tensor:
    """Inverse of the rotation of `quantize`: each 16 adjacent values y become d * (H y / 4), butterflies as there."""
    y = y_EMN.unflatten(-1, (-1, 16))
    for distance in (1, 2, 4, 8):
        low, high = y.unflatten(-1, (-1, 2, distance)).unbind(-2)
        y = torch.stack((low + high, low - high), dim=-2).flatten(-3)
    blocks = y * 0.25
    return torch.stack([sign * blocks[..., i] for i, sign in enumerate(HADAMARD_SIGNS)], dim=-1).flatten(-2)
