"""Quantization in torch ops: the definition of every bit, and what runs where no kernel does. Never waits for a GPU.

A direction is quantized as the stored matrix, which for columnwise is the transposed one. float32 throughout.
"""

# E members   R rows   C columns   M, N rows and columns of the stored matrix   b a block

import numpy as np
import torch
from torch import Tensor

from moe_runtime.formats import (
    E2M1,
    E4M3,
    HADAMARD_SIGNS,
    MXFP4,
    MXFP8,
    NVFP4,
    Block,
    Direction,
    Encoding,
    Float8,
    Format,
    FP8Block,
)
from moe_runtime.formats.layouts import pack_nibbles

Stored = tuple[Tensor, Tensor, Tensor | None]  # payload, scale, tensor scale

_LARGEST = torch.finfo(torch.float32).max
_NAN_CODE = 0x7F  # NaN in E4M3 and in E5M2


def quantize_into(
    x_ERC: Tensor, fmt: Format, row: Stored | None, column: Stored | None, seed: int | None, amax_E: Tensor | None
) -> None:
    """Writes the directions that are given, one after the other."""
    x_ERC = x_ERC.float()
    if row is not None:
        _copy(row, _quantize_stored(x_ERC, fmt, "rowwise", seed, amax_E))
    if column is not None:
        _copy(column, _quantize_stored(x_ERC, fmt, "columnwise", seed, amax_E))


def _copy(to: Stored, values: Stored) -> None:
    for tensor, value in zip(to, values, strict=True):
        if tensor is not None and value is not None:
            tensor.copy_(value)


def _quantize_stored(
    x_ERC: Tensor, fmt: Format, direction: Direction, seed: int | None, amax_E: Tensor | None
) -> Stored:
    x_EMN = x_ERC if direction == "rowwise" else x_ERC.mT.contiguous()
    if isinstance(fmt, MXFP8 | MXFP4):
        return _quantize_mx(x_EMN, fmt)
    if isinstance(fmt, FP8Block):
        return _quantize_fp8_block(x_EMN, fmt)
    if isinstance(fmt, Float8):
        return _quantize_float8(x_EMN, fmt, amax_E)
    if isinstance(fmt, NVFP4):
        uniform_EMN = None
        if seed is not None:
            uniform_EMN = uniform(x_ERC.shape, seed, direction, x_ERC.device)
            uniform_EMN = uniform_EMN if direction == "rowwise" else uniform_EMN.mT
        if fmt.random_hadamard and direction == "columnwise":
            x_EMN = rotate(x_EMN)
        return _quantize_nvfp4(x_EMN, fmt, uniform_EMN, amax_E)
    raise TypeError(f"expected a quantized format, got {fmt!r}")


# ---- one format each, for the stored matrix ----


def _quantize_mx(x_EMN: Tensor, fmt: MXFP8 | MXFP4) -> Stored:
    amax_EMb = _blocks(x_EMN, fmt.block).abs().amax((-3, -1))
    scale_EMb = encode_e8m0(amax_EMb * _reciprocal(fmt.encoding.max))
    scale_EMb = torch.where(amax_EMb.isfinite(), scale_EMb, 255)
    # 2^(127 - b) by its bits; b = 254 is 2^-127, half the smallest normal
    bits_EMb = torch.where(scale_EMb < 254, (254 - scale_EMb.int()) << 23, 1 << 22)
    multiplier_EMb = torch.where(scale_EMb == 255, torch.nan, bits_EMb.view(torch.float32))
    return _encode(x_EMN * _per_element(multiplier_EMb, fmt.block), fmt.encoding), scale_EMb, None


def _quantize_fp8_block(x_EMN: Tensor, fmt: FP8Block) -> Stored:
    amax_Ebb = _blocks(x_EMN, fmt.block).abs().amax((-3, -1))
    multiplier_Ebb = torch.where(
        amax_Ebb.isfinite(), fp8_multiplier(amax_Ebb, fmt.encoding, fmt.power_of_two), torch.nan
    )
    payload_EMN = _encode(x_EMN * _per_element(multiplier_Ebb, fmt.block), fmt.encoding)
    return payload_EMN, _divide(1, multiplier_Ebb), None


def _quantize_float8(x_EMN: Tensor, fmt: Float8, amax_E: Tensor | None) -> Stored:
    amax_E = finite_amax(x_EMN) if amax_E is None else amax_E
    multiplier_E = fp8_multiplier(amax_E, fmt.encoding, fmt.power_of_two)
    payload_EMN = _encode(x_EMN * multiplier_E[:, None, None], fmt.encoding)
    return torch.where(x_EMN.isfinite(), payload_EMN, _NAN_CODE), _divide(1, multiplier_E), None


def _quantize_nvfp4(x_EMN: Tensor, fmt: NVFP4, uniform_EMN: Tensor | None, amax_E: Tensor | None) -> Stored:
    amax_E = finite_amax(x_EMN) if amax_E is None else amax_E
    quotient_E = _divide(E4M3.max * E2M1.max, amax_E).clamp(max=_LARGEST)
    multiplier_E = torch.where((amax_E == 0) | (quotient_E == 0), 1, quotient_E)
    tensor_scale_E = _divide(1, multiplier_E)
    amax_Ebb = _blocks(x_EMN, fmt.block).abs().amax((-3, -1))
    block_scale_Ebb = amax_Ebb * (multiplier_E * _reciprocal(E2M1.max))[:, None, None]
    scale_Ebb = torch.where(amax_Ebb.isfinite(), _encode(block_scale_Ebb, E4M3), _NAN_CODE)
    decoded_Ebb = scale_Ebb.view(torch.float8_e4m3fn).float()
    multiplier_Ebb = _divide(1, decoded_Ebb * tensor_scale_E[:, None, None]).clamp(max=_LARGEST)
    scaled_EMN = x_EMN * _per_element(multiplier_Ebb, fmt.block)
    codes_EMN = encode_e2m1(scaled_EMN) if uniform_EMN is None else encode_e2m1_at(scaled_EMN, uniform_EMN)
    return pack_nibbles(codes_EMN), scale_Ebb, tensor_scale_E


# ---- scales ----


def _blocks(x_EMN: Tensor, block: Block) -> Tensor:
    """(E, M / rows, rows, N / cols, cols)"""
    num_members, num_rows, num_columns = x_EMN.shape
    return x_EMN.reshape(num_members, num_rows // block.rows, block.rows, num_columns // block.cols, block.cols)


def _per_element(value_Ebb: Tensor, block: Block) -> Tensor:
    """The value of each element's block."""
    return value_Ebb.repeat_interleave(block.rows, dim=1).repeat_interleave(block.cols, dim=2)


def finite_amax(x_EMN: Tensor) -> Tensor:
    """(E,) the largest magnitude of each member's finite elements, 0 where there are none."""
    if not x_EMN.numel():
        return x_EMN.new_zeros(x_EMN.shape[0])
    return torch.where(x_EMN.isfinite(), x_EMN.abs(), 0).amax((1, 2))


def fp8_multiplier(amax: Tensor, encoding: Encoding, power_of_two: bool) -> Tensor:
    """max / amax, at most the largest float32; 1 where amax is 0. With power_of_two the mantissa is cleared."""
    multiplier = torch.where(amax == 0, 1, _divide(encoding.max, amax).clamp(max=_LARGEST))
    if not power_of_two:
        return multiplier
    exponent = (multiplier.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(multiplier.isnan(), torch.nan, exponent)


def _divide(number: float, by: Tensor) -> Tensor:
    """`number / by` rounded once; torch's own division of a number is a product with the reciprocal, rounded twice."""
    return torch.full_like(by, number) / by


def _reciprocal(number: float) -> float:
    """1 / number in float32."""
    return float(np.float32(1) / np.float32(number))


def encode_e8m0(value: Tensor) -> Tensor:
    """b with 2^(b - 127) the least power of two that is not below `value` >= 0; inf gives 254, NaN 255."""
    bits = value.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Subnormal: at most 2^-127 is code 0, above it 1. No code stands above 254 but NaN's.
    up = torch.where(exponent == 0, mantissa > 1 << 22, mantissa > 0) & (exponent < 254)
    code = (exponent + up.int()).clamp(max=254)
    return torch.where(value.isnan(), 255, code).to(torch.uint8)


# ---- elements ----


def _encode(value_EMN: Tensor, encoding: Encoding) -> Tensor:
    """The payload bytes of scaled values."""
    return pack_nibbles(encode_e2m1(value_EMN)) if encoding is E2M1 else encode_fp8(value_EMN, encoding)


def encode_fp8(value: Tensor, encoding: Encoding) -> Tensor:
    """Nearest, ties to even; saturates at the largest finite value; NaN is 0x7F."""
    code = value.clamp(-encoding.max, encoding.max).to(encoding.dtype).view(torch.uint8)
    return torch.where(value.isnan(), _NAN_CODE, code)


def encode_e2m1(value: Tensor) -> Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even code; saturates at 6; NaN is +0. One code a byte."""
    size = value.abs()
    code = (size > 0.25).to(torch.uint8)
    code += size >= 0.75
    code += size > 1.25
    code += size >= 1.75
    code += size > 2.5
    code += size >= 3.5
    code += size > 5
    return torch.where(value.isnan(), 0, code | (value.signbit() * 8).to(torch.uint8))


def encode_e2m1_at(value: Tensor, uniform: Tensor) -> Tensor:
    """Of the two neighbors of `value`, the farther from 0 where its distance from the nearer exceeds `uniform`."""
    size = value.abs().clamp(max=6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    low = (size / step).floor() * step
    code = torch.where(size < 2, low * 2, torch.where(size < 4, low + 2, low / 2 + 4))
    code = (code + ((size - low) / step > uniform)).nan_to_num(0).to(torch.uint8)
    return torch.where(value.isnan(), 0, code | (value.signbit() * 8).to(torch.uint8))


def rotate(x_EMN: Tensor) -> Tensor:
    """Each 16 adjacent values x of a row become H (d * x) / 4, by butterflies of distance 1, 2, 4, 8 in that order."""
    blocks = x_EMN.unflatten(-1, (-1, 16))
    x = torch.stack([sign * blocks[..., i] for i, sign in enumerate(HADAMARD_SIGNS)], dim=-1)
    return (_butterflies(x) * 0.25).flatten(-2)


def _butterflies(x: Tensor) -> Tensor:
    """(..., 16) -> H x for the 16 x 16 Hadamard matrix of +1 and -1."""
    for distance in (1, 2, 4, 8):
        low, high = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack((low + high, low - high), dim=-2).flatten(-3)
    return x


# ---- random bits ----


def uniform(shape: torch.Size, seed: int, direction: Direction, device: torch.device) -> Tensor:
    """(E, R, C) multiples of 2^-24 in [0, 1), of the seed and each element's place: the upper 24 bits of a word.

    Word c % 4 of Philox4x32-10 with the counter (c // 4, r, e, direction) and the key (seed's low half, high half).
    """
    index_E, index_R, index_C = (torch.arange(size, device=device) for size in shape)
    member_ERC = index_E[:, None, None].expand(shape)
    row_ERC = index_R[:, None].expand(shape)
    stream = torch.full_like(member_ERC, int(direction == "columnwise"))
    words = philox((index_C // 4).expand(shape), row_ERC, member_ERC, stream, seed)
    word_ERC = torch.stack(words).gather(0, (index_C % 4).expand(1, *shape))[0]
    return (word_ERC >> 8).float() * 2**-24


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four 32-bit words, in int64, of a 128-bit counter and the 64-bit key `seed`."""
    mask = 0xFFFFFFFF
    k0, k1 = seed & mask, seed >> 32 & mask
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps modulo 2^64; only bits are used
        c0, c1, c2, c3 = (p1 >> 32 & mask) ^ c1 ^ k0, p1 & mask, (p0 >> 32 & mask) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3
