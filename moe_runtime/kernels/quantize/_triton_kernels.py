"""Quantization in Triton, a kernel for each kind of scale: one read of a tile, both directions out.

`_triton` launches them; the numbers are those of `_triton_codes`. A direction whose payload pointer is None is left
out. Four-bit payloads are written as int32 words of eight elements.
"""

# Triton compiles what is below, so its types are not Python's.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

# G groups   H rows of a group   C columns of a tile   Y blocks down   X blocks across   S elements of a step

import triton
import triton.language as tl

from moe_runtime.kernels.quantize._triton_codes import (
    NAN_BITS,
    NAN_CODE,
    amax_across,
    amax_down,
    bits_of,
    columns_of,
    encode_e2m1,
    encode_e2m1_at,
    encode_fp8,
    fp8_multiplier,
    inverse,
    is_finite,
    load_tile,
    mx_scale,
    nvfp4_member,
    nvfp4_scale,
    place,
    rotate,
    rows_of,
    signed_magic,
    spread_across,
    spread_down,
    store_matrix,
    widen,
    without_magic,
    words_across,
    words_down,
)

# ---- amax of members ----


@triton.jit
def amax_kernel(amax_ptr, x_ptr, num_elements, num_steps, S: tl.constexpr, STEPS: tl.constexpr):
    """amax[e] = the largest magnitude of the member's finite elements, as bits, into zeros; STEPS steps a program."""
    member = (tl.program_id(0) // num_steps).to(tl.int64)
    first = (tl.program_id(0) % num_steps).to(tl.int64) * (S * STEPS)
    largest_S = tl.zeros((S,), tl.float32)
    for step in tl.static_range(STEPS):
        place_S = first + step * S + tl.arange(0, S)
        x_S = tl.load(x_ptr + member * num_elements + place_S, mask=place_S < num_elements, other=0.0)
        x_S = widen(x_S)
        largest_S = tl.maximum(largest_S, tl.where(is_finite(x_S), tl.abs(x_S), 0.0))
    tl.atomic_max(amax_ptr + member, bits_of(tl.max(largest_S, axis=0)), sem="relaxed")


@triton.jit
def rotated_amax_kernel(amax_ptr, x_ptr, num_rows, num_columns, SIGNS: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """As `amax_kernel`, of each 16 adjacent rows rotated."""
    member, row, column = place(tl.program_id(0), num_rows, num_columns, 16 * G, C)
    x_GHC = rotate(load_tile(x_ptr, member, row, column, num_rows, num_columns, 16, G, C), SIGNS, G, C)
    largest_GHC = tl.where(is_finite(x_GHC), tl.abs(x_GHC), 0.0)
    largest = tl.max(tl.max(tl.max(largest_GHC, axis=1), axis=0), axis=0)
    tl.atomic_max(amax_ptr + member, bits_of(largest), sem="relaxed")


# ---- one kernel for each kind of scale ----


@triton.jit
def mx_kernel(
    x_ptr,
    row_ptr,
    row_scale_ptr,
    column_ptr,
    column_scale_ptr,
    num_rows,
    num_columns,
    FOUR_BITS: tl.constexpr,
    E5M2: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
):
    """Blocks of 32 with a power of two; four-bit elements go row-wise only."""
    member, row, column = place(tl.program_id(0), num_rows, num_columns, H * G, C)
    x_GHC = load_tile(x_ptr, member, row, column, num_rows, num_columns, H, G, C)
    if row_ptr is not None:
        code_GHX, multiplier_GHX = mx_scale(amax_across(x_GHC, H, G, C, 32), RECIPROCAL)
        scaled_GHC = x_GHC * spread_across(multiplier_GHX, H, G, C, 32)
        scale_MX = rows_of(code_GHX, H, G, C // 32)
        store_matrix(row_scale_ptr, scale_MX, member, row, column // 32, num_rows, num_columns // 32, H * G, C // 32)
        if FOUR_BITS:
            word_GHW = without_magic(words_across(encode_e2m1(scaled_GHC, signed_magic(x_GHC)), H, G, C))
            word_GHW = tl.where(spread_across(code_GHX, H, G, C // 8, 4) == 255, 0, word_GHW)
            word_MW = rows_of(word_GHW, H, G, C // 8)
            store_matrix(row_ptr, word_MW, member, row, column // 8, num_rows, num_columns // 8, H * G, C // 8)
        else:
            byte_MC = rows_of(encode_fp8(scaled_GHC, E5M2), H, G, C)
            store_matrix(row_ptr, byte_MC, member, row, column, num_rows, num_columns, H * G, C)
    if column_ptr is not None:
        code_YC, multiplier_YC = mx_scale(amax_down(x_GHC, H, G, C, 32), RECIPROCAL)
        byte_CM = columns_of(encode_fp8(x_GHC * spread_down(multiplier_YC, H, G, C, 32), E5M2), H, G, C)
        store_matrix(column_ptr, byte_CM, member, column, row, num_columns, num_rows, C, H * G)
        scale_CY = tl.trans(code_YC)
        store_matrix(column_scale_ptr, scale_CY, member, column, row // 32, num_columns, num_rows // 32, C, H * G // 32)


@triton.jit
def _fp8_block_scale(amax, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """(scale, multiplier) of a block, both NaN unless amax is finite."""
    multiplier = fp8_multiplier(amax, MAX, POWER_OF_TWO)
    nan = (tl.zeros_like(bits_of(amax)) + NAN_BITS).to(tl.float32, bitcast=True)
    multiplier = tl.where(is_finite(amax), multiplier, nan)
    return inverse(multiplier), multiplier


@triton.jit
def fp8_block_kernel(
    x_ptr,
    row_ptr,
    row_scale_ptr,
    column_ptr,
    column_scale_ptr,
    num_rows,
    num_columns,
    E5M2: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
):
    """Blocks of 128 adjacent elements with a float32 scale; a tile is 128 columns of H * G rows, 128 for columnwise."""
    C: tl.constexpr = 128
    member, row, column = place(tl.program_id(0), num_rows, num_columns, H * G, C)
    x_GHC = load_tile(x_ptr, member, row, column, num_rows, num_columns, H, G, C)
    if row_ptr is not None:
        scale_GHX, multiplier_GHX = _fp8_block_scale(amax_across(x_GHC, H, G, C, C), MAX, POWER_OF_TWO)
        byte_MC = rows_of(encode_fp8(x_GHC * multiplier_GHX, E5M2), H, G, C)
        store_matrix(row_ptr, byte_MC, member, row, column, num_rows, num_columns, H * G, C)
        scale_MX = rows_of(scale_GHX, H, G, 1)
        store_matrix(row_scale_ptr, scale_MX, member, row, column // C, num_rows, num_columns // C, H * G, 1)
    if column_ptr is not None:
        scale_YC, multiplier_YC = _fp8_block_scale(amax_down(x_GHC, H, G, C, C), MAX, POWER_OF_TWO)
        byte_CM = columns_of(encode_fp8(x_GHC * multiplier_YC[:, None, :], E5M2), H, G, C)
        store_matrix(column_ptr, byte_CM, member, column, row, num_columns, num_rows, C, H * G)
        scale_CY = tl.trans(scale_YC)
        store_matrix(column_scale_ptr, scale_CY, member, column, row // C, num_columns, num_rows // C, C, 1)


@triton.jit
def fp8_tile_kernel(
    x_ptr,
    row_ptr,
    row_scale_ptr,
    column_ptr,
    column_scale_ptr,
    num_rows,
    num_columns,
    E5M2: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
):
    """Blocks of 128 x 128: a tile each, whose codes serve both directions."""
    C: tl.constexpr = 128
    member, row, column = place(tl.program_id(0), num_rows, num_columns, C, C)
    x_GHC = load_tile(x_ptr, member, row, column, num_rows, num_columns, H, G, C)
    amax_1C = amax_down(x_GHC, H, G, C, C)
    amax_111 = amax_across(amax_1C[None, :, :], 1, 1, C, C)
    scale_111, multiplier_111 = _fp8_block_scale(amax_111, MAX, POWER_OF_TWO)
    byte_GHC = encode_fp8(x_GHC * multiplier_111, E5M2)
    scale_11 = tl.reshape(scale_111, (1, 1))
    block_row, block_column = row // C, column // C
    if row_ptr is not None:
        store_matrix(row_ptr, rows_of(byte_GHC, H, G, C), member, row, column, num_rows, num_columns, C, C)
        store_matrix(row_scale_ptr, scale_11, member, block_row, block_column, num_rows // C, num_columns // C, 1, 1)
    if column_ptr is not None:
        store_matrix(column_ptr, columns_of(byte_GHC, H, G, C), member, column, row, num_columns, num_rows, C, C)
        store_matrix(column_scale_ptr, scale_11, member, block_column, block_row, num_columns // C, num_rows // C, 1, 1)


@triton.jit
def float8_kernel(
    x_ptr,
    row_ptr,
    column_ptr,
    scale_ptr,
    amax_ptr,
    num_rows,
    num_columns,
    E5M2: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
):
    """One scale a member, of amax[e]; the member's first program writes it."""
    member, row, column = place(tl.program_id(0), num_rows, num_columns, H * G, C)
    multiplier = fp8_multiplier(tl.load(amax_ptr + member), MAX, POWER_OF_TWO)
    if (row == 0) & (column == 0):
        tl.store(scale_ptr + member, inverse(multiplier))
    x_GHC = load_tile(x_ptr, member, row, column, num_rows, num_columns, H, G, C)
    byte_GHC = tl.where(is_finite(x_GHC), encode_fp8(x_GHC * multiplier, E5M2), NAN_CODE).to(tl.uint8)
    if row_ptr is not None:
        store_matrix(row_ptr, rows_of(byte_GHC, H, G, C), member, row, column, num_rows, num_columns, H * G, C)
    if column_ptr is not None:
        store_matrix(column_ptr, columns_of(byte_GHC, H, G, C), member, column, row, num_columns, num_rows, C, H * G)


@triton.jit
def _random_words(seed, member, row, column, STREAM: tl.constexpr, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """(G, H, C) uint32: word c % 4 of Philox with the counter (c // 4, r, e, STREAM)."""
    quad_C = column // 4 + tl.arange(0, C // 4)
    row_GH = row + tl.arange(0, G)[:, None] * H + tl.arange(0, H)[None, :]
    zero_GHC = tl.zeros((G, H, C // 4), tl.uint32)
    quad_GHC = zero_GHC + quad_C.to(tl.uint32)[None, None, :]
    row_GHC = zero_GHC + row_GH.to(tl.uint32)[:, :, None]
    w0, w1, w2, w3 = tl.philox(seed, quad_GHC, row_GHC, zero_GHC + member.to(tl.uint32), zero_GHC + STREAM)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (G, H, C))


@triton.jit
def _nvfp4_codes(scaled_GHC, x_GHC, word_GHC, STOCHASTIC: tl.constexpr):
    """Codes with the bits of MAGIC above them."""
    if STOCHASTIC:
        code_GHC = encode_e2m1_at(scaled_GHC, word_GHC) + 0x4B000000
    else:
        code_GHC = encode_e2m1(scaled_GHC, signed_magic(x_GHC))
    return code_GHC


@triton.jit(do_not_specialize=["seed", "num_programs"])
def nvfp4_kernel(
    x_ptr,
    row_ptr,
    row_scale_ptr,
    row_tensor_scale_ptr,
    row_amax_ptr,
    column_ptr,
    column_scale_ptr,
    column_tensor_scale_ptr,
    column_amax_ptr,
    num_rows,
    num_columns,
    seed,
    num_programs,
    STOCHASTIC: tl.constexpr,
    SIGNS: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
):
    """Blocks of 16 adjacent elements; SIGNS: the columns are rotated. Tiles go backward, from what a pass read last."""
    member, row, column = place(num_programs - 1 - tl.program_id(0), num_rows, num_columns, H * G, C)
    first = (row == 0) & (column == 0)
    x_GHC = load_tile(x_ptr, member, row, column, num_rows, num_columns, H, G, C)
    word_GHC = None
    if row_ptr is not None:
        multiplier, tensor_scale = nvfp4_member(tl.load(row_amax_ptr + member))
        if first:
            tl.store(row_tensor_scale_ptr + member, tensor_scale)
        code_GHX, multiplier_GHX = nvfp4_scale(amax_across(x_GHC, H, G, C, 16), multiplier, tensor_scale)
        scaled_GHC = x_GHC * spread_across(multiplier_GHX, H, G, C, 16)
        if STOCHASTIC:
            word_GHC = _random_words(seed, member, row, column, 0, H, G, C)
        word_GHW = without_magic(words_across(_nvfp4_codes(scaled_GHC, x_GHC, word_GHC, STOCHASTIC), H, G, C))
        word_GHW = tl.where(spread_across(code_GHX, H, G, C // 8, 2) == NAN_CODE, 0, word_GHW)
        word_MW = rows_of(word_GHW, H, G, C // 8)
        store_matrix(row_ptr, word_MW, member, row, column // 8, num_rows, num_columns // 8, H * G, C // 8)
        scale_MX = rows_of(code_GHX, H, G, C // 16)
        store_matrix(row_scale_ptr, scale_MX, member, row, column // 16, num_rows, num_columns // 16, H * G, C // 16)
    if column_ptr is not None:
        multiplier, tensor_scale = nvfp4_member(tl.load(column_amax_ptr + member))
        if first:
            tl.store(column_tensor_scale_ptr + member, tensor_scale)
        if SIGNS is not None:
            x_GHC = rotate(x_GHC, SIGNS, G, C)
        code_YC, multiplier_YC = nvfp4_scale(amax_down(x_GHC, H, G, C, 16), multiplier, tensor_scale)
        scaled_GHC = x_GHC * spread_down(multiplier_YC, H, G, C, 16)
        if STOCHASTIC:
            word_GHC = _random_words(seed, member, row, column, 1, H, G, C)
        word_GJC = without_magic(words_down(_nvfp4_codes(scaled_GHC, x_GHC, word_GHC, STOCHASTIC), H, G, C))
        code_GC = tl.reshape(spread_down(code_YC, H, G, C, 16), (G, C))
        word_GJC = tl.where(code_GC[:, None, :] == NAN_CODE, 0, word_GJC)
        word_CW = columns_of(word_GJC, H // 8, G, C)
        store_matrix(column_ptr, word_CW, member, column, row // 8, num_columns, num_rows // 8, C, H * G // 8)
        scale_CY = tl.trans(code_YC)
        store_matrix(column_scale_ptr, scale_CY, member, column, row // 16, num_columns, num_rows // 16, C, H * G // 16)


@triton.jit(do_not_specialize=["num_programs"])
def nvfp4_tile_kernel(
    x_ptr,
    row_ptr,
    row_scale_ptr,
    row_tensor_scale_ptr,
    column_ptr,
    column_scale_ptr,
    column_tensor_scale_ptr,
    amax_ptr,
    num_rows,
    num_columns,
    num_programs,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
):
    """Blocks of 16 x 16, whose codes serve both directions. Tiles go backward, from what a pass read last."""
    member, row, column = place(num_programs - 1 - tl.program_id(0), num_rows, num_columns, H * G, C)
    multiplier, tensor_scale = nvfp4_member(tl.load(amax_ptr + member))
    x_GHC = load_tile(x_ptr, member, row, column, num_rows, num_columns, H, G, C)
    Y: tl.constexpr = H * G // 16
    amax_YX = tl.reshape(amax_across(amax_down(x_GHC, H, G, C, 16)[:, None, :], 1, Y, C, 16), (Y, C // 16))
    code_YX, multiplier_YX = nvfp4_scale(amax_YX, multiplier, tensor_scale)
    multiplier_YC = tl.reshape(spread_across(multiplier_YX[:, None, :], 1, Y, C, 16), (Y, C))
    code_GHC = encode_e2m1(x_GHC * spread_down(multiplier_YC, H, G, C, 16), signed_magic(x_GHC))
    first = (row == 0) & (column == 0)
    if row_ptr is not None:
        if first:
            tl.store(row_tensor_scale_ptr + member, tensor_scale)
        code_YW = tl.reshape(spread_across(code_YX[:, None, :], 1, Y, C // 8, 2), (Y, C // 8))
        word_GHW = without_magic(words_across(code_GHC, H, G, C))
        word_GHW = tl.where(spread_down(code_YW, H, G, C // 8, 16) == NAN_CODE, 0, word_GHW)
        word_MW = rows_of(word_GHW, H, G, C // 8)
        store_matrix(row_ptr, word_MW, member, row, column // 8, num_rows, num_columns // 8, H * G, C // 8)
        block_column = column // 16
        store_matrix(
            row_scale_ptr, code_YX, member, row // 16, block_column, num_rows // 16, num_columns // 16, Y, C // 16
        )
    if column_ptr is not None:
        if first:
            tl.store(column_tensor_scale_ptr + member, tensor_scale)
        code_YC = tl.reshape(spread_across(code_YX[:, None, :], 1, Y, C, 16), (Y, C))
        word_GJC = without_magic(words_down(code_GHC, H, G, C))
        word_GJC = tl.where(spread_down(code_YC, H, G, C, 16) == NAN_CODE, 0, word_GJC)
        word_CW = columns_of(word_GJC, H // 8, G, C)
        store_matrix(column_ptr, word_CW, member, column, row // 8, num_columns, num_rows // 8, C, H * G // 8)
        block_row = row // 16
        store_matrix(
            column_scale_ptr,
            tl.trans(code_YX),
            member,
            column // 16,
            block_row,
            num_columns // 16,
            num_rows // 16,
            C // 16,
            Y,
        )
