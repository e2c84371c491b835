"""What stored bytes are worth, in Triton: elements, scales, and the rounding of their product.

Compiled, E4M3 and E5M2 are the device's own conversions. Triton's interpreter rounds to bfloat16 toward zero and gets
subnormal numbers wrong, so there (INTERPRETED) both come from the bits.
"""

# Triton compiles what is below, so its types are not Python's.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false, reportAssignmentType=false

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # read once: a process interprets or compiles
NAN_BITS = tl.constexpr(0x7FC00000)  # the NaN that torch writes


@triton.jit
def decode_fp8(code, E5M2: tl.constexpr):
    """float32 values of E4M3 or E5M2 bytes; NaN of any bits for NaN."""
    if INTERPRETED:
        bits = code.to(tl.int32)
        sign = (bits & 0x80) << 24
        size = bits & 0x7F
        # With the exponent field of the byte a float32 is a power of two of the value, subnormal values included.
        if E5M2:
            value = ((size << 21) | sign).to(tl.float32, bitcast=True) * 5.192296858534828e33
            special = tl.where(size == 0x7C, 0x7F800000, 0x7FC00000) | sign
            bits = tl.where(size >= 0x7C, special, value.to(tl.int32, bitcast=True))
        else:
            value = ((size << 20) | sign).to(tl.float32, bitcast=True) * 1.329227995784916e36
            bits = tl.where(size == 0x7F, 0x7FC00000 | sign, value.to(tl.int32, bitcast=True))
        result = bits.to(tl.float32, bitcast=True)
    else:
        result = code.to(tl.float8e5 if E5M2 else tl.float8e4nv, bitcast=True).to(tl.float32)
    return result


@triton.jit
def decode_e2m1(word, M: tl.constexpr, W: tl.constexpr):
    """(M, 8 W) float32 values of (M, W) int32 words of eight codes, the first lowest."""
    shift = 28 - 4 * tl.arange(0, 8)[None, None, :]
    top = word.to(tl.uint32, bitcast=True)[:, :, None] << shift.to(tl.uint32)
    # As above: the fields of E2M1 as those of a float32 are 2^-126 of the value.
    bits = ((top >> 6) & 0x01C00000) | (top & 0x80000000)
    return tl.reshape(bits.to(tl.float32, bitcast=True) * 8.507059173023462e37, (M, 8 * W))


@triton.jit
def decode_e8m0(code):
    """float32 values: 0 is 2^-127, 255 is NaN."""
    bits = code.to(tl.int32)
    size = tl.where(bits == 0, 1 << 22, bits << 23)
    return tl.where(bits == 255, NAN_BITS, size).to(tl.float32, bitcast=True)


@triton.jit
def decode_scale(scale, tensor_scale, KIND: tl.constexpr):
    """float32 values of scales of KIND "e8m0", "e4m3" (times tensor_scale) or "float32"."""
    if KIND == "e8m0":
        value = decode_e8m0(scale)
    elif KIND == "e4m3":
        value = decode_fp8(scale, False) * tensor_scale
    else:
        value = scale
    return value


@triton.jit
def narrow(value, like: tl.constexpr):
    """In the dtype `like`, rounded to nearest; no number for NaN."""
    if INTERPRETED and like == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = value.to(like)
    return result


@triton.jit
def torch_nan(value, number):
    """The values, with torch's NaN where `number` is False."""
    if value.dtype == tl.float32:
        bits = tl.where(number, value.to(tl.int32, bitcast=True), NAN_BITS)
    elif value.dtype == tl.bfloat16:
        bits = tl.where(number, value.to(tl.int16, bitcast=True), 0x7FC0).to(tl.int16)
    else:
        bits = tl.where(number, value.to(tl.int16, bitcast=True), 0x7E00).to(tl.int16)
    return bits.to(value.dtype, bitcast=True)
