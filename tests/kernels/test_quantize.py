"""Quantization: cases with known numbers, properties, native = reference. Independent casts are another file."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_runtime.formats import MXFP4, MXFP8, NVFP4, Float8, Format, FP8Block, HighPrecision, Quantized
from moe_runtime.formats.layouts import pack_nibbles, unpack_nibbles
from moe_runtime.kernels.dequantize import dequantize
from moe_runtime.kernels.quantize import _reference, quantize, quantize_into
from moe_runtime.testing.hostile import nan_filled_memory, strided

INF, NAN = float("inf"), float("nan")
PLAIN: list[Format] = [
    MXFP8(),
    MXFP8(element="e5m2"),
    FP8Block(),
    FP8Block(element="e5m2", power_of_two=False),
    FP8Block(two_dimensional=True, power_of_two=False),
    Float8(),
    Float8(element="e5m2", power_of_two=True),
    NVFP4(),
    NVFP4(two_dimensional=True),
]
ROTATED, STOCHASTIC = NVFP4(random_hadamard=True), NVFP4(stochastic_rounding=True)
ALL = [*PLAIN, MXFP4(), ROTATED, STOCHASTIC, NVFP4(random_hadamard=True, stochastic_rounding=True)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def options(fmt: Format) -> dict[str, Any]:
    """What `quantize` needs for both directions, as far as the format has them."""
    seed = 2**40 + 7 if isinstance(fmt, NVFP4) and fmt.stochastic_rounding else None
    return {"columnwise": fmt.columnwise_allowed, "seed": seed}


def values(shape: tuple[int, ...], kind: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """ "normal"; "wide": every exponent; "special": zeros of both signs, infinities and NaN strewn in."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind != "normal":
        x *= torch.exp2(torch.randint(-149, 120, shape, generator=generator).float())
    if kind == "special":
        chance = torch.rand(shape, generator=generator)
        x[chance < 0.6] = -0.0
        x[chance < 0.5] = 0.0
        for limit, value in ((3e-3, NAN), (1e-3, -INF), (5e-4, INF)):
            x[chance < limit] = value
    return x.to(dtype)


def both(x: Tensor, fmt: Format, backend: str | None = None, **changes: Any) -> list[Quantized]:
    return [q for q in quantize(x, fmt, **{**options(fmt), **changes}, backend=backend) if q is not None]


def tensors(q: Quantized) -> list[Tensor]:
    return [q.payload, q.scale, *([] if q.tensor_scale is None else [q.tensor_scale])]


def assert_same_bits(got: list[Quantized], expected: list[Quantized]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a.format, a.direction, a.shape) == (b.format, b.direction, b.shape)
        for s, t in zip(tensors(a), tensors(b), strict=True):
            assert s.dtype == t.dtype and s.shape == t.shape
            same = s.reshape(-1).view(torch.uint8) == t.reshape(-1).view(torch.uint8)
            assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} bytes differ ({a.direction}, {s.dtype})"


def only(x: Tensor, fmt: Format, backend: str, **changes: Any) -> Quantized:
    row, _ = quantize(x, fmt, backend=backend, **changes)
    assert row is not None
    return row


def value_of(q: Quantized) -> Tensor:
    return dequantize(q, torch.float32, backend="reference")


# ---- cases with known numbers ----


def block(value: float, size: int = 32, rest: float = 0.0) -> Tensor:
    """(1, size) with `value` in front."""
    x = torch.full((1, size), rest)
    x[0, 0] = value
    return x


def test_a_value_that_rounds(backend: str) -> None:
    x = torch.full((1, 32), 0.3).bfloat16()  # 0.30078125, times 2^10 is 308
    q = only(x, MXFP8(), backend)
    assert q.scale.tolist() == [[117]] and bool((q.payload == 0x7A).all())
    assert bool((value_of(q) == 0.3125).all())


@pytest.mark.parametrize(
    ("amax", "code", "kept"),
    [
        (150.0, 126, 144.0),
        (448.0, 127, 448.0),
        (449.0, 128, 448.0),
        (480.0, 128, 480.0),
        (511.9, 128, 512.0),
        (2.0**-120, 0, 2.0**-120),
        (2.8094e-36, 1, None),
        (0.0, 0, 0.0),
        (2.0**-149, 0, 0.0),
        (3.4e38, 247, INF),  # the nearest is 2^128
    ],
)
def test_codes_of_amax(backend: str, amax: float, code: int, kept: float | None) -> None:
    q = only(block(amax), MXFP8(), backend)
    got = float(value_of(q)[0, 0])
    assert q.scale.tolist() == [[code]]
    assert got == kept if kept is not None else abs(got / amax - 1) <= 0.0625
    if amax == 2.0**-120:
        assert int(q.payload[0, 0]) == 0x70  # 128
    if 1 <= amax < 1e38:
        assert abs(got / amax - 1) <= 0.0625


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("fmt", [f for f in ALL if f.block is not None], ids=repr)
def test_only_its_block_becomes_nan(backend: str, fmt: Format, bad: float) -> None:
    clean = values((2, 256, 384), "normal", torch.float32)
    clean[1, 7, 9] = 0  # not the amax of anything
    dirty = clean.clone()
    dirty[1, 7, 9] = bad
    assert fmt.block is not None
    for before, after in zip(both(clean, fmt, backend), both(dirty, fmt, backend), strict=True):
        x, y = value_of(before), value_of(after)
        rows, cols = fmt.block if after.direction == "rowwise" else fmt.block[::-1]
        mine = torch.zeros(y.shape, dtype=torch.bool)
        mine[1, 7 // rows * rows : 7 // rows * rows + rows, 9 // cols * cols : 9 // cols * cols + cols] = True
        assert bool(y[mine].isnan().all())
        assert torch.equal(y[~mine], x[~mine])
        payload = unpack_nibbles(after.payload) if fmt.element_bits == 4 else after.payload
        payload = payload if after.direction == "rowwise" else payload.mT
        assert bool((payload[mine] == (0 if fmt.element_bits == 4 else 0x7F)).all())


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_only_the_element_becomes_nan_in_float8(backend: str, element: Any, bad: float) -> None:
    clean = values((2, 6, 10), "normal", torch.float32)
    clean[1, 2, 3] = 0
    dirty = clean.clone()
    dirty[1, 2, 3] = bad
    for before, after in zip(*(both(x, Float8(element=element), backend) for x in (clean, dirty)), strict=True):
        x, y = value_of(before), value_of(after)
        assert bool(y[1, 2, 3].isnan()) and int(y.isnan().sum()) == 1
        x[1, 2, 3] = y[1, 2, 3] = 0
        assert torch.equal(x, y)


@pytest.mark.parametrize("fmt", ALL, ids=repr)
def test_zeros(backend: str, fmt: Format) -> None:
    x = torch.zeros(2, 128, 128)
    x[1, :, ::2] = -0.0
    for q in both(x, fmt, backend):
        y = value_of(q)
        assert bool((y == 0).all()) and bool(q.scale.float().isfinite().all())
        if not (isinstance(fmt, NVFP4) and fmt.random_hadamard):
            assert torch.equal(y.signbit(), x.signbit())
        if fmt.has_tensor_scale:
            assert q.tensor_scale is not None and q.tensor_scale.tolist() == [1, 1] and not bool(q.scale.any())


def test_saturation(backend: str) -> None:
    amax = torch.tensor(448.0)
    x = torch.tensor([[464.0, 465.0, 480.0, 1e30, -465.0, 447.0]])
    assert only(x, Float8(), backend, amax=amax).payload.tolist() == [[0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E]]
    tiny = only(torch.tensor([[1e10, -1.0, 0.0]]), Float8(), backend, amax=torch.tensor(1e-30))
    assert tiny.payload.tolist() == [[0x7E, 0xFE, 0]]  # 1e10 * 448e30 overflows on the way


def test_nvfp4_block_scale_saturates(backend: str) -> None:
    x = torch.cat((torch.zeros(1, 16), block(1.0, 16)), 1)
    q = only(x, NVFP4(), backend, amax=torch.tensor(0.6))  # 1 * 448 / (.6 / 6) = 4480
    assert q.scale.tolist() == [[0, 0x7E]]
    y = value_of(q)
    assert not bool(y[0, :16].any()) and float(y[0, 16]) == pytest.approx(0.6)


def test_nvfp4_at_tensor_scale_one(backend: str) -> None:
    x = torch.cat((block(2688.0, 16), block(0.005859375, 16), block(0.006, 16)), 1)
    q = only(x, NVFP4(), backend)
    assert q.tensor_scale is not None and float(q.tensor_scale) == 1.0
    assert q.scale.tolist() == [[0x7E, 0, 1]]
    assert value_of(q)[0, [0, 16, 32]].tolist() == [2688.0, 0.0, 0.005859375]
    assert int(unpack_nibbles(q.payload)[0, 32]) == 5  # 3.07 -> 3


@pytest.mark.parametrize("amax", [1e-45, 1e-38, 3e38])
def test_nvfp4_at_the_ends_of_float32(backend: str, amax: float) -> None:
    x = torch.full((1, 16), amax)
    y = value_of(only(x, NVFP4(), backend))
    assert bool(y.isfinite().all()) and bool((y <= 1.2 * x).all())
    assert float(y[0, 0]) == pytest.approx(3e38) if amax > 1 else True  # the smallest flush, as S is limited


def test_nvfp4_reads_as_published() -> None:
    """q * s_block * amax / (6 * 448), up to the rounding of its factors."""
    x = values((2, 32, 64), "normal", torch.float32)
    q = only(x, NVFP4(), "reference")
    size = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
    codes = unpack_nibbles(q.payload).long()
    element = size[codes & 7] * (1 - 2 * (codes >> 3))
    scale = q.scale.view(torch.float8_e4m3fn).double().repeat_interleave(16, -1)
    expected = element * scale * x.abs().amax((1, 2)).double()[:, None, None] / 2688
    torch.testing.assert_close(value_of(q).double(), expected, rtol=3e-7, atol=0)


# ---- properties ----

FORMAT, SEED = st.sampled_from(PLAIN), st.integers(0, 2**31)
MX = st.sampled_from([MXFP8(), MXFP8(element="e5m2"), MXFP4()])


@given(MX, SEED, st.integers(-90, 90))
@settings(max_examples=40, deadline=None)
def test_mx_error_is_bounded(fmt: Format, seed: int, exponent: int) -> None:
    x = values((3, 64), "normal", torch.float32, seed) * 2.0**exponent
    q = only(x, fmt, "reference")
    assert fmt.encoding is not None
    scale = torch.exp2(q.scale.double() - 127).repeat_interleave(32, -1)
    half_step = 2.0 ** -(fmt.encoding.mantissa_bits + 1)
    subnormal = scale * 2.0 ** (1 - fmt.encoding.exponent_bias) * half_step
    assert bool(((value_of(q) - x).abs() <= torch.maximum(x.abs() * half_step, subnormal)).all())


@given(MX, SEED, st.sampled_from(["normal", "wide"]))
@settings(max_examples=40, deadline=None)
def test_mx_is_idempotent(fmt: Format, seed: int, kind: str) -> None:
    """Values come back as they are. Their bits do too, but for an amax of half the largest, which has two spellings."""
    x = values((4, 64), kind, torch.float32, seed).clamp(-(2.0**126), 2.0**126)
    q = only(x, fmt, "reference")
    y = value_of(q)
    again = only(y, fmt, "reference")
    assert torch.equal(value_of(again), y)
    twice = only(value_of(again), fmt, "reference")
    assert_same_bits([twice], [again])
    assert fmt.encoding is not None
    steady = y.unflatten(-1, (-1, 32)).abs().amax(-1) != torch.exp2(q.scale.float() - 127) * fmt.encoding.max / 2
    assert torch.equal(again.scale[steady], q.scale[steady])


@given(MX, SEED, st.floats(0, 2.0**100))
@settings(max_examples=40, deadline=None)
def test_mx_scale_is_monotonic(fmt: Format, seed: int, larger: float) -> None:
    x = values((1, 32), "normal", torch.float32, seed)
    grown = x.clone()
    grown[0, seed % 32] = max(larger, float(x.abs().max()))
    assert int(only(grown, fmt, "reference").scale) >= int(only(x, fmt, "reference").scale)
    doubled = only(2 * x, fmt, "reference")
    assert int(doubled.scale) == int(only(x, fmt, "reference").scale) + 1
    assert torch.equal(doubled.payload, only(x, fmt, "reference").payload)


@given(FORMAT, SEED, st.sampled_from(DTYPES))
@settings(max_examples=25, deadline=None)
def test_columnwise_is_rowwise_of_the_transposed(fmt: Format, seed: int, dtype: torch.dtype) -> None:
    x = values((2, 128, 256), "wide", dtype, seed)
    _, column = quantize(x, fmt, columnwise=True)
    row = only(x.mT, fmt, "reference")
    assert column is not None
    for a, b in zip(tensors(column), tensors(row), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("fmt", [FP8Block(two_dimensional=True), NVFP4(two_dimensional=True), Float8()], ids=repr)
def test_two_dimensional_directions_hold_the_same_codes(backend: str, fmt: Format) -> None:
    row, column = both(values((2, 256, 128), "normal", torch.bfloat16), fmt, backend)
    if fmt.element_bits == 4:
        assert torch.equal(column.payload, pack_nibbles(unpack_nibbles(row.payload).mT))
    else:
        assert torch.equal(column.payload, row.payload.mT)
    assert torch.equal(column.scale, row.scale if fmt.block is None else row.scale.mT)


# ---- rotation and stochastic rounding ----


def hadamard() -> Tensor:
    """(16, 16) by Sylvester's doubling, in float64."""
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def test_rotation_is_the_hadamard_matrix() -> None:
    x = torch.randn(3, 5, 32)
    signs = torch.tensor([1, 1, -1, 1, 1, -1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1]).double()
    expected = (x.double().unflatten(-1, (2, 16)) * signs) @ hadamard() / 4
    torch.testing.assert_close(_reference.rotate(x).double(), expected.flatten(-2), rtol=1e-6, atol=1e-6)


def test_rotated_operands_keep_their_product(backend: str) -> None:
    x, y = (values((256, 128), "normal", torch.float32, seed) for seed in (0, 1))
    plain = [both(t, NVFP4(), backend)[1] for t in (x, y)]
    turned = [both(t, ROTATED, backend)[1] for t in (x, y)]
    assert not torch.equal(plain[0].payload, turned[0].payload)
    exact = x.T @ y
    for pair in (plain, turned):
        a, b = (dequantize(q, torch.float32) for q in pair)
        assert float((a.T @ b - exact).norm() / exact.norm()) < 0.2


def test_rotation_leaves_the_rows_alone(backend: str) -> None:
    x = values((2, 64, 64), "normal", torch.bfloat16)
    plain, turned = both(x, NVFP4(), backend)[0], both(x, ROTATED, backend)[0]
    for a, b in zip(tensors(plain), tensors(turned), strict=True):
        assert torch.equal(a, b)


def test_rotation_spreads_an_outlier(backend: str) -> None:
    x = values((64, 64), "normal", torch.float32)
    x[5] *= 50
    errors = [float((value_of(both(x, fmt, backend)[1]) - x)[6].norm()) for fmt in (NVFP4(), ROTATED)]
    assert errors[1] != errors[0] and errors[1] < 16 * 50


def test_philox_known_answers() -> None:
    def run(*words: int) -> list[int]:
        counter = [torch.tensor(word) for word in words[:4]]
        return [int(w) for w in _reference.philox(*counter, words[4] | words[5] << 32)]

    assert run(0, 0, 0, 0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert run(*[0xFFFFFFFF] * 6) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    assert run(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_stochastic_rounding_is_unbiased(backend: str) -> None:
    x = values((64, 256), "normal", torch.float32)
    nearest = value_of(only(x, NVFP4(), backend))
    runs = torch.stack([value_of(only(x, STOCHASTIC, backend, seed=seed)) for seed in range(200)])
    blocks = x.abs().unflatten(-1, (-1, 16))
    free = (blocks < blocks.amax(-1, keepdim=True)).flatten(-2) & (runs.std(0) > 0)  # a block's largest may saturate
    error = (runs.mean(0) - x)[free]
    z = error / (runs.std(0)[free] / 200**0.5)
    assert float(free.float().mean()) > 0.85
    assert abs(float(z.mean())) < 0.05 and 0.9 < float(z.std()) < 1.15
    assert float((nearest - x)[free].abs().mean()) > 8 * float(error.abs().mean())


def test_stochastic_rounding_takes_neighbors_and_keeps_what_is_exact() -> None:
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = torch.linspace(-6, 6, 4801)
    for uniform, up in ((0.0, True), (1 - 2**-24, False)):
        code = _reference.encode_e2m1_at(x, torch.full_like(x, uniform)).long()
        size = grid[code & 7]
        below = grid[torch.bucketize(x.abs(), grid, right=True) - 1]
        exact = below == x.abs()
        assert torch.equal(size[exact], x.abs()[exact])
        assert bool((size[~exact] > below[~exact]).all() if up else (size == below).all())
        assert torch.equal((code >> 3).bool() | (x == 0), (x < 0) | (x == 0))


def test_stochastic_rounding_depends_on_seed_place_and_direction_only(backend: str) -> None:
    x = torch.full((2, 64, 128), 0.7)
    x[..., ::16] = 1.0
    x[:, ::16] = 1.0
    row, column = both(x, STOCHASTIC, backend, seed=3)
    assert_same_bits(both(x, STOCHASTIC, backend, seed=3), [row, column])
    other = both(x, STOCHASTIC, backend, seed=4)
    assert not torch.equal(other[0].payload, row.payload) and not torch.equal(other[1].payload, column.payload)
    assert not torch.equal(unpack_nibbles(row.payload), unpack_nibbles(column.payload).mT)
    assert not torch.equal(row.payload[0], row.payload[1])
    assert_same_bits([only(x, STOCHASTIC, backend, seed=3)], [row])


# ---- native is the reference, bit for bit ----

SHAPES = [(2, 128, 256), (1, 384, 128), (3, 256, 640), (0, 128, 128), (2, 0, 128), (2, 128, 0), (128, 128)]


@pytest.mark.parametrize("fmt", ALL, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_bits(native_ops: Any, fmt: Format, dtype: torch.dtype) -> None:
    for shape, kind in zip([*SHAPES, (2, 256, 384)], ["normal", "wide", "special"] * 3, strict=False):
        x = values(shape, kind, dtype)
        assert_same_bits(both(x, fmt, "native"), both(x, fmt, "reference"))


@pytest.mark.parametrize("fmt", [MXFP8(), MXFP4(), NVFP4(), STOCHASTIC, Float8(), FP8Block()], ids=repr)
def test_native_bits_of_odd_sizes(native_ops: Any, fmt: Format) -> None:
    """Sizes that the other direction need not divide: whole blocks along, anything across."""
    along = 32 if fmt.block is None else fmt.block.cols
    seed = options(fmt)["seed"]
    for across in (1, 3, 65, 130):
        for blocks in (1, 3, 5):
            x = values((2, across, along * blocks), "wide", torch.bfloat16)
            assert_same_bits(both(x, fmt, "native", columnwise=False), both(x, fmt, "reference", columnwise=False))
            if fmt.columnwise_allowed:
                only_columns = {"rowwise": False, "columnwise": True, "seed": seed}
                got, expected = (quantize(x.mT, fmt, **only_columns, backend=b)[1] for b in ("native", "reference"))
                assert got is not None and expected is not None
                assert_same_bits([got], [expected])
    if fmt.block is None:
        x = values((3, 37, 45), "special", torch.float32)
        assert_same_bits(both(x, fmt, "native"), both(x, fmt, "reference"))


@pytest.mark.parametrize("fmt", [*ALL], ids=repr)
def test_directions_do_not_depend_on_each_other(backend: str, fmt: Format) -> None:
    x = values((2, 128, 256), "special", torch.bfloat16)
    together = both(x, fmt, backend)
    apart = [only(x, fmt, backend, seed=options(fmt)["seed"])]
    if fmt.columnwise_allowed:
        row, column = quantize(x, fmt, rowwise=False, columnwise=True, seed=options(fmt)["seed"], backend=backend)
        assert row is None and column is not None
        apart.append(column)
    assert_same_bits(together, apart)


@pytest.mark.parametrize("fmt", [MXFP8(), FP8Block(two_dimensional=True), Float8(), ALL[-1]], ids=repr)
def test_thread_count_changes_nothing(
    native_ops: Any, at_thread_counts: Callable[[Callable[[], Any]], list[Any]], fmt: Format
) -> None:
    x = values((3, 512, 640), "special", torch.bfloat16)
    first, *others = at_thread_counts(lambda: both(x, fmt, "native"))
    for other in others:
        assert_same_bits(other, first)


@pytest.mark.parametrize("fmt", [MXFP8(), NVFP4(), Float8(), FP8Block()], ids=repr)
def test_memory_and_strides_change_nothing(backend: str, fmt: Format) -> None:
    x = values((2, 128, 128), "normal", torch.bfloat16)
    expected = both(x, fmt, "reference")
    with nan_filled_memory():
        assert_same_bits(both(x, fmt, backend), expected)
    assert_same_bits(both(strided(x), fmt, backend), expected)
    assert_same_bits(both(x.mT.contiguous().mT, fmt, backend), expected)


@pytest.mark.parametrize("fmt", [Float8(), NVFP4(), NVFP4(two_dimensional=True)], ids=repr)
def test_a_given_amax(backend: str, fmt: Format) -> None:
    x = values((3, 64, 64), "normal", torch.float32)
    own = x.abs().amax((1, 2))
    assert_same_bits(both(x, fmt, backend, amax=own), both(x, fmt, backend))
    shared = own.max().expand(3).contiguous()
    for q in both(x, fmt, backend, amax=shared):
        scale = q.tensor_scale if fmt.has_tensor_scale else q.scale
        assert scale is not None and len(set(scale.tolist())) == 1
    for odd in (0.0, 1e-30, INF, NAN):
        given_E = torch.tensor([odd, 1.0, 1.0])
        assert_same_bits(both(x, fmt, "native", amax=given_E), both(x, fmt, "reference", amax=given_E))


def test_quantize_into_keeps_storage(backend: str) -> None:
    for fmt in (MXFP8(), Float8(), NVFP4()):
        row, column = both(values((2, 64, 64), "normal", torch.bfloat16), fmt, backend)
        places = [t.data_ptr() for q in (row, column) for t in tensors(q)]
        x = values((2, 64, 64), "normal", torch.bfloat16, seed=1)
        quantize_into(x, row, column, backend=backend)
        assert [t.data_ptr() for q in (row, column) for t in tensors(q)] == places
        assert_same_bits([row, column], both(x, fmt, "reference"))
        apart = dataclasses.replace(column, scale=column.scale.clone())
        other = values((2, 64, 64), "normal", torch.bfloat16, seed=2)
        quantize_into(other, row, apart, backend=backend)
        assert_same_bits([row, apart], both(other, fmt, "reference"))


def test_requires_grad_is_ignored(backend: str) -> None:
    x = values((64, 64), "normal", torch.float32).requires_grad_()
    assert all(not t.requires_grad for q in both(x, MXFP8(), backend) for t in tensors(q))


# ---- bad input ----


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fmt": HighPrecision()}, ValueError, "expected a quantized format, got HighPrecision"),
        ({"x": torch.zeros(64, 64, dtype=torch.float64)}, TypeError, r"bfloat16 or float16, got torch\.float64"),
        ({"x": torch.zeros(64, 40)}, ValueError, "mxfp8 stored rowwise needs cols to be a multiple of 32, got cols=40"),
        ({"fmt": MXFP4(), "columnwise": True}, ValueError, "mxfp4 is stored row-wise only"),
        ({"rowwise": False}, ValueError, "needs rowwise or columnwise storage, got neither"),
        ({"seed": 1}, ValueError, "rounds to nearest: expected no seed, got 1"),
        ({"fmt": STOCHASTIC}, ValueError, "stochastic rounding needs a seed, got None"),
        ({"fmt": STOCHASTIC, "seed": -1}, ValueError, r"seed must lie in \[0, 2\^63\), got -1"),
        ({"amax": torch.ones(())}, ValueError, "mxfp8 takes the amax of each block: expected no amax"),
        (
            {"fmt": NVFP4(), "amax": torch.ones(2)},
            ValueError,
            r"float32 of shape \(\) on cpu.*got .* of shape \(2,\)",
        ),
        ({"fmt": Float8(), "amax": torch.ones((), dtype=torch.float64)}, ValueError, r"got torch\.float64"),
        ({"fmt": ROTATED, "columnwise": True, "amax": torch.ones(())}, ValueError, "not that of its rotated columns"),
        ({"backend": "cuda"}, ValueError, "backend must be one of native, reference, triton for quantize; got 'cuda'"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_refusals(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"x": torch.zeros(64, 64), "fmt": MXFP8(), **arguments}
    with pytest.raises(error, match=message):
        quantize(arguments.pop("x"), arguments.pop("fmt"), **arguments)


def test_quantize_into_refusals() -> None:
    x = torch.zeros(64, 64)
    row, column = both(x, MXFP8(), "reference")
    with pytest.raises(ValueError, match="needs a rowwise or a columnwise record, got neither"):
        quantize_into(x, None)
    with pytest.raises(ValueError, match=r"expected a rowwise record of MXFP8.*, got a columnwise one"):
        quantize_into(x, column)
    with pytest.raises(ValueError, match=r"expected a columnwise record of .*e4m3.*, got a columnwise one of .*e5m2"):
        quantize_into(x, row, both(x, MXFP8(element="e5m2"), "reference")[1])
    with pytest.raises(ValueError, match=r"expected a record of shape \(32, 64\) on cpu, got \(64, 64\) on cpu"):
        quantize_into(x[:32], row)


# ---- the native ops themselves ----


def byte_outputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape, dtype=torch.uint8) for shape in shapes]


def test_opcheck(native_ops: Any) -> None:
    x = torch.randn(2, 128, 256)
    mx = byte_outputs((2, 128, 256), (2, 128, 8), (2, 256, 128), (2, 256, 4))
    nv = byte_outputs((2, 128, 128), (2, 128, 16), (2, 256, 64), (2, 256, 8))
    members = torch.zeros(2), torch.zeros(2)
    torch.library.opcheck(native_ops.quantize_mx.default, (x, 0, *mx))
    torch.library.opcheck(native_ops.quantize_mx.default, (x, 2, nv[0], mx[1], None, None))
    block_scales = torch.zeros(2, 128, 2), torch.zeros(2, 256, 1)
    fp8 = (mx[0], block_scales[0], mx[2], block_scales[1])
    torch.library.opcheck(native_ops.quantize_fp8_block.default, (x, 1, False, True, *fp8))
    torch.library.opcheck(native_ops.quantize_float8.default, (x, 0, True, None, mx[0], mx[2], members[0]))
    both_nv = (*nv[:2], members[0], *nv[2:], members[1])
    torch.library.opcheck(native_ops.quantize_nvfp4.default, (x, False, True, 5, None, *both_nv))
    amax_E = torch.ones(2)
    one_nv = (None, None, None, *nv[2:], members[1])
    torch.library.opcheck(native_ops.quantize_nvfp4.default, (x, False, False, None, amax_E, *one_nv))


def test_the_ops_check_their_arguments(native_ops: Any) -> None:
    x = torch.zeros(2, 64, 64)
    payload, scale = byte_outputs((2, 64, 64), (2, 64, 2))
    run = native_ops.quantize_mx.default
    with pytest.raises(ValueError, match=r"element must be 0 .*, got 3"):
        run(x, 3, payload, scale, None, None)
    with pytest.raises(ValueError, match="payload and scale of a direction go together"):
        run(x, 0, payload, None, None, None)
    with pytest.raises(ValueError, match="scale must have size 2 in dim 2, got 1"):
        run(x, 0, payload, scale[..., :1].contiguous(), None, None)
    with pytest.raises(ValueError, match="payload must be contiguous"):
        run(x, 0, payload.mT, scale, None, None)
    with pytest.raises(ValueError, match="must be a multiple of 32, got 40"):
        run(x[..., :40], 0, payload, scale, None, None)
    with pytest.raises(ValueError, match="x must be float32, bfloat16 or float16"):
        run(x.double(), 0, payload, scale, None, None)


def test_traces_in_one_graph(native_ops: Any) -> None:
    x = values((2, 128, 128), "normal", torch.bfloat16)

    def run(x: Tensor) -> list[Tensor]:
        results = [*both(x, MXFP8()), *both(x, NVFP4()), *both(x, Float8())]
        return [t for q in results for t in tensors(q)]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for a, b in zip(compiled(x), run(x), strict=True):
        assert torch.equal(a, b)
