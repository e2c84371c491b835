"""The numbers of quantization in Triton: tiles of x, amax, scales, elements. What a format does with them is elsewhere.

A tile is (groups, rows of a group, columns): groups of 8 or 16 adjacent rows. Triton spreads a load over threads by
columns, then groups, so that a thread holds all rows of a group for a few columns, and both directions reduce and pack
mostly inside a thread. Nothing depends on it but speed.

Inline PTX is used where Triton has no words for an instruction. Triton's interpreter cannot run it; there (INTERPRETED)
the same numbers come from ordinary operations.
"""

# Triton compiles what is below, so its types are not Python's.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

# G groups   H rows of a group   C columns of a tile   N groups of a block   Y blocks down   X blocks across

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # read once: a process interprets or compiles
INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)  # the NaN that torch writes
NAN_CODE = tl.constexpr(0x7F)  # NaN in E4M3 and in E5M2
LARGEST = tl.constexpr(3.4028234663852886e38)
MAGIC = tl.constexpr(8388608.0)  # 2^23: a sum with it is rounded to an integer, which its low bits then hold

# ---- tiles ----


@triton.jit
def place(program, num_rows, num_columns, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """(member, first row, first column) of a program; tiles of a member run across first. At least one tile each."""
    across = tl.maximum(tl.cdiv(num_columns, TILE_COLUMNS), 1)
    down = tl.maximum(tl.cdiv(num_rows, TILE_ROWS), 1)
    member = program // (across * down)
    inside = program % (across * down)
    return member.to(tl.int64), (inside // across) * TILE_ROWS, (inside % across) * TILE_COLUMNS


@triton.jit
def widen(value):
    """In float32."""
    if INTERPRETED and value.dtype == tl.bfloat16:  # it gets subnormal numbers wrong
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def load_tile(x_ptr, member, row, column, num_rows, num_columns, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """x_GHC in float32, zeros outside the member."""
    row_GH = row + tl.arange(0, G)[:, None] * H + tl.arange(0, H)[None, :]
    # Fewer adjacent columns for a thread where it holds more rows of them.
    column_C = tl.max_contiguous(column + tl.arange(0, C), 64 // H)
    start_GH = (member * num_rows + row_GH) * num_columns
    inside_GHC = (row_GH < num_rows)[:, :, None] & (column_C < num_columns)[None, None, :]
    return widen(tl.load(x_ptr + start_GH[:, :, None] + column_C[None, None, :], mask=inside_GHC, other=0.0))


@triton.jit
def store_matrix(ptr, value_MN, member, row, column, num_rows, num_columns, M: tl.constexpr, N: tl.constexpr):
    """value to rows row .. and columns column .. of a member of the (E, num_rows, num_columns) tensor at `ptr`."""
    row_M = row + tl.arange(0, M)
    column_N = column + tl.arange(0, N)
    start_M = (member * num_rows + row_M) * num_columns
    inside_MN = (row_M < num_rows)[:, None] & (column_N < num_columns)[None, :]
    tl.store(ptr + start_M[:, None] + column_N[None, :], value_MN, mask=inside_MN)


@triton.jit
def rows_of(value_GHC, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """(H * G, C): the rows in the order of the matrix."""
    return tl.reshape(value_GHC, (G * H, C))


@triton.jit
def columns_of(value_GHC, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """(C, H * G): the transposed tile."""
    return tl.reshape(tl.permute(value_GHC, (2, 0, 1)), (C, G * H))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(value, AXIS: tl.constexpr):
    """The largest magnitude along an axis, NaN where one is."""
    if INTERPRETED:  # which runs a combining function element by element; bits are ordered as magnitudes are, NaN last
        return tl.max(bits_of(value) & 0x7FFFFFFF, axis=AXIS).to(tl.float32, bitcast=True)
    return tl.reduce(tl.abs(value), AXIS, _larger)


@triton.jit
def amax_across(x_GHC, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """(G, H, X) of each BLOCK adjacent columns; NaN where one is."""
    return _largest(tl.reshape(x_GHC, (G, H, C // BLOCK, BLOCK)), 3)


@triton.jit
def amax_down(x_GHC, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """(Y, C) of each BLOCK adjacent rows; NaN where one is."""
    amax_GC = _largest(x_GHC, 1)
    if BLOCK == H:
        return amax_GC
    return _largest(tl.reshape(amax_GC, (G * H // BLOCK, BLOCK // H, C)), 1)


@triton.jit
def spread_across(value_GHX, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """(G, H, C): the value of each element's block of columns."""
    return tl.reshape(tl.broadcast_to(value_GHX[:, :, :, None], (G, H, C // BLOCK, BLOCK)), (G, H, C))


@triton.jit
def spread_down(value_YC, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """(G, 1, C): the value of each element's block of rows."""
    if BLOCK == H:
        return value_YC[:, None, :]
    value_YNC = tl.broadcast_to(value_YC[:, None, :], (G * H // BLOCK, BLOCK // H, C))
    return tl.reshape(value_YNC, (G, C))[:, None, :]


# ---- scales ----


@triton.jit
def bits_of(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def is_finite(value):
    return (bits_of(value) & 0x7FFFFFFF) < INF_BITS


@triton.jit
def quotient(number, by):
    """number / by, rounded once, at most the largest float32; NaN stays."""
    value = tl.math.div_rn(tl.zeros_like(by) + number, by)
    return tl.where(value > LARGEST, LARGEST, value)


@triton.jit
def inverse(value):
    """1 / value, rounded once; the NaN of torch for NaN."""
    bits = bits_of(tl.math.div_rn(tl.zeros_like(value) + 1.0, value))
    return tl.where(value == value, bits, NAN_BITS).to(tl.float32, bitcast=True)


@triton.jit
def mx_scale(amax, RECIPROCAL: tl.constexpr):
    """(code, multiplier) of E8M0: the exponent of amax / max rounded up; 255 and NaN unless amax is finite."""
    bits = bits_of(amax * RECIPROCAL)
    # A normal number goes up for any bit below its exponent, a subnormal one above 2^-127, which is code 0.
    code = (bits + tl.where(bits < 0x00800000, 0x003FFFFF, 0x007FFFFF)) >> 23
    finite = is_finite(amax)
    multiplier = tl.where(finite, (254 - code) << 23, NAN_BITS).to(tl.float32, bitcast=True)
    return tl.where(finite, code, 255).to(tl.uint8), multiplier


@triton.jit
def fp8_multiplier(amax, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """max / amax, 1 where amax is 0; with POWER_OF_TWO the mantissa is cleared."""
    multiplier = tl.where(amax == 0, 1.0, quotient(MAX, amax))
    if POWER_OF_TWO:
        exponent = (bits_of(multiplier) & INF_BITS).to(tl.float32, bitcast=True)
        multiplier = tl.where(multiplier == multiplier, exponent, multiplier)
    return multiplier


@triton.jit
def nvfp4_member(amax):
    """(S, 1 / S) of a member's amax."""
    value = quotient(2688.0, amax)
    multiplier = tl.where((amax == 0) | (value == 0), 1.0, value)
    return multiplier, inverse(multiplier)


@triton.jit
def nvfp4_scale(amax, multiplier, tensor_scale):
    """(code, multiplier) of a block of a member with S = multiplier."""
    code = encode_fp8(amax * (multiplier * 0.16666667163372040), False)
    code = tl.where(is_finite(amax), code, NAN_CODE).to(tl.uint8)
    scale = decode_e4m3(code) * tensor_scale
    # Scales of a member away from the ends of float32 are normal numbers or 0, and so are their inverses.
    if (tl.abs(multiplier) > 1e-25) & (tl.abs(multiplier) < 1e25):
        inverted = _inverse_of_normal(scale)
    else:
        inverted = quotient(1.0, scale)
    return code, inverted


@triton.jit
def _inverse_of_normal(value):
    """1 / value, rounded once, of normal numbers that are not near the ends of float32; the largest float32 for 0."""
    if INTERPRETED:
        return quotient(1.0, value)
    near = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )
    inverted = tl.fma(near, tl.fma(-value, near, 1.0), near)
    return tl.where(value == 0, LARGEST, inverted)


# ---- elements ----


@triton.jit
def encode_fp8(value, E5M2: tl.constexpr):
    """Codes in uint8: nearest, ties to even; saturates at the largest finite value; NaN is 0x7F."""
    if INTERPRETED:
        return _encode_fp8_plainly(value, E5M2)
    if E5M2:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e5m2x2.f32 a, $2, $1; cvt.rn.satfinite.e5m2x2.f32 b, $4, $3;"
            " mov.b32 $0, {a, b}; }",
            "=r,f,f,f,f",
            [value],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;"
        " mov.b32 $0, {a, b}; }",
        "=r,f,f,f,f",
        [value],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _encode_fp8_plainly(value, E5M2: tl.constexpr):
    MANTISSA: tl.constexpr = 2 if E5M2 else 3
    BIAS: tl.constexpr = 15 if E5M2 else 7
    LIMIT: tl.constexpr = 57344.0 if E5M2 else 448.0
    nan = value != value
    size = tl.where(nan, 0.0, tl.minimum(tl.abs(value), LIMIT))
    # The exponent of the last place that is kept; 1.5 * 2^(23 + that) rounds there.
    exponent = tl.maximum(bits_of(size) >> 23, 128 - BIAS) - MANTISSA
    large = (((exponent + 23) << 23) | 0x400000).to(tl.float32, bitcast=True)
    kept = (size + large) - large
    bits = bits_of(kept)
    normal = (bits >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    SMALLEST: tl.constexpr = 2.0 ** (BIAS - 1 + MANTISSA)
    code = tl.where(normal < (1 << MANTISSA), (kept * SMALLEST).to(tl.int32), normal)
    code = code | ((bits_of(value) >> 24) & 0x80)
    return tl.where(nan, NAN_CODE, code).to(tl.uint8)


@triton.jit
def decode_e4m3(code):
    """float32 values of E4M3 bytes."""
    if not INTERPRETED:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = code.to(tl.int32)
    sign = (bits & 0x80) << 24
    size = bits & 0x7F
    # As a float32 with the exponent field of E4M3 it is 2^-120 of the value, subnormal values included.
    small = ((size << 20) | sign).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(size == 0x7F, NAN_BITS | sign, bits_of(small)).to(tl.float32, bitcast=True)


@triton.jit
def signed_magic(value):
    """2^23, and 8 more where the sign bit is set: what `encode_e2m1` adds to."""
    sign = ((bits_of(value) & -0x80000000) | 0x3F800000).to(tl.float32, bitcast=True)
    return tl.fma(sign, -4.0, MAGIC + 4.0)


@triton.jit
def encode_e2m1(value, magic):
    """Codes in the low four bits of an int32: nearest, ties to even, saturates at 6. NaN is 0.

    With pieces s1 = [v / 2], s2 = [v / 2 - 1], s3 = [v / 2 - 2], each clamped to [0, 1], a value v is number
    4 s1 + 2 s2 + s3 of the codes, which have the steps 1/2 below 2, 1 below 4 and 2 from there. The pieces are exact,
    and the ends of the pieces are even, so that the sum with 2^23 in that order rounds once.
    """
    if INTERPRETED:
        half = tl.where(value == value, tl.abs(value), 0.0) * 0.5
        s1, s2, s3 = tl.minimum(half, 1.0), half - 1.0, half - 2.0
        s2, s3 = tl.minimum(tl.maximum(s2, 0.0), 1.0), tl.minimum(tl.maximum(s3, 0.0), 1.0)
        return bits_of(((s1 * 4.0 + magic) + s2 * 2.0) + s3)
    return tl.inline_asm_elementwise(
        "{ .reg .f32 v, s, t; abs.f32 v, $1; mul.rn.sat.f32 s, v, 0f3F000000; fma.rn.f32 s, s, 0f40800000, $2;"
        " fma.rn.sat.f32 t, v, 0f3F000000, 0fBF800000; fma.rn.f32 s, t, 0f40000000, s;"
        " fma.rn.sat.f32 t, v, 0f3F000000, 0fC0000000; add.rn.f32 s, s, t; mov.b32 $0, s; }",
        "=r,f,f",
        [value, magic],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def encode_e2m1_at(value, word):
    """Codes in int32: the neighbor farther from 0 where the distance from the nearer exceeds the word's 24 bits."""
    uniform = (word >> 8).to(tl.float32) * 5.9604644775390625e-8
    size = tl.minimum(tl.abs(value), 6.0)
    place = size * tl.where(size < 2.0, 2.0, tl.where(size < 4.0, 1.0, 0.5))
    low = tl.floor(place)
    code = low + tl.where(size < 2.0, 0.0, tl.where(size < 4.0, 2.0, 4.0))
    code = (code + tl.where(place - low > uniform, 1.0, 0.0)).to(tl.int32)
    return code | ((bits_of(value) >> 28) & 8)


@triton.jit
def words_across(code_GHC, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """(G, H, C / 8) int32 of eight codes each, the first lowest; what stands above their four bits must be MAGIC's."""
    shift = tl.arange(0, 8)[None, None, None, :] * 4
    return tl.sum(tl.reshape(code_GHC, (G, H, C // 8, 8)) << shift, 3)


@triton.jit
def words_down(code_GHC, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """(G, H / 8, C) int32 of eight codes each, those of adjacent rows."""
    shift = tl.arange(0, 8)[None, None, :, None] * 4
    return tl.sum(tl.reshape(code_GHC, (G, H // 8, 8, C)) << shift, 2)


# What eight times MAGIC's own bits add up to in a word.
MAGIC_WORD = tl.constexpr(sum(0x4B000000 << (4 * i) for i in range(8)) & 0xFFFFFFFF)


@triton.jit
def without_magic(word):
    """Words of codes alone, from words of codes from `encode_e2m1`."""
    return (word.to(tl.uint32, bitcast=True) - MAGIC_WORD).to(tl.int32, bitcast=True)


# ---- rotation ----


@triton.jit
def _butterfly(x_GHC, D: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """(low + high, low - high) of rows D apart, in their places."""
    # Sums and selections, not splits and joins, which would move data between threads.
    pair = tl.reshape(x_GHC, (G, 8 // D, 2, D, C))
    high = (tl.arange(0, 2) == 1)[None, None, :, None, None]
    if INTERPRETED:  # which starts a sum from +0, and so loses the sign of -0 - 0
        low, other = tl.split(tl.permute(pair, (0, 1, 3, 4, 2)))
        low, other = low[:, :, None, :, :], other[:, :, None, :, :]
        return tl.reshape(tl.where(high, low - other, low + other), (G, 16, C))
    total = tl.sum(pair, 2)[:, :, None, :, :]
    difference = tl.sum(tl.where(high, -pair, pair), 2)[:, :, None, :, :]
    return tl.reshape(tl.where(high, difference, total), (G, 16, C))


@triton.jit
def rotate(x_GHC, SIGNS: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """H (d * x) / 4 of each 16 rows of a group; bit i of SIGNS set where d is -1."""
    flipped = ((SIGNS >> tl.arange(0, 16)) & 1) << 31
    y = (bits_of(x_GHC) ^ flipped[None, :, None]).to(tl.float32, bitcast=True)
    y = _butterfly(y, 1, G, C)
    y = _butterfly(y, 2, G, C)
    y = _butterfly(y, 4, G, C)
    y = _butterfly(y, 8, G, C)
    return y * 0.25
