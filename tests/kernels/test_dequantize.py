"""Dequantization: every code against ml_dtypes, orientation, rounding, native = reference."""

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from moe_runtime.formats import MXFP4, MXFP8, NVFP4, Float8, Format, FP8Block, HighPrecision, Quantized
from moe_runtime.formats.format import Direction
from moe_runtime.kernels.dequantize import dequantize
from moe_runtime.kernels.quantize import quantize

NAN = float("nan")
FORMATS: list[Format] = [
    MXFP8(),
    MXFP8(element="e5m2"),
    MXFP4(),
    FP8Block(),
    FP8Block(two_dimensional=True),
    Float8(element="e5m2"),
    NVFP4(),
    NVFP4(two_dimensional=True),
    NVFP4(random_hadamard=True),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_record(fmt: Format, shape: tuple[int, ...], direction: Direction, seed: int = 0) -> Quantized:
    """Any bytes at all, those that quantize never writes included."""
    generator = torch.Generator().manual_seed(seed)

    def random(wanted: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype == torch.uint8:
            return torch.randint(0, 256, wanted, dtype=dtype, generator=generator)
        return torch.exp2(torch.randint(-30, 30, wanted, generator=generator).float())

    return Quantized(
        payload=random(fmt.payload_shape(shape, direction), fmt.payload_dtype),
        scale=random(fmt.scale_shape(shape, direction), fmt.scale_dtype),
        tensor_scale=random(shape[:-2], torch.float32) if fmt.has_tensor_scale else None,
        format=fmt,
        direction=direction,
    )


def directions(fmt: Format) -> list[Direction]:
    return ["rowwise", "columnwise"] if fmt.columnwise_allowed else ["rowwise"]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(
    ("element", "dtype"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)], ids=["e4m3", "e5m2"]
)
def test_every_fp8_code(backend: str, element: Any, dtype: Any) -> None:
    """As its own element only: E5M2 bytes that are read as E4M3 are other numbers."""
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    q = Quantized(payload=codes, scale=torch.full((8, 1), 127, dtype=torch.uint8), format=MXFP8(element=element))
    expected = codes.numpy().view(dtype).astype(np.float32)
    np.testing.assert_array_equal(dequantize(q, torch.float32, backend=backend).numpy(), expected)


def test_e5m2_read_as_e4m3() -> None:
    payload = torch.tensor([[0x3C, 0x5C, 0x7B] + [0] * 29], dtype=torch.uint8)
    scale = torch.tensor([[127]], dtype=torch.uint8)
    read = {
        element: dequantize(Quantized(payload=payload, scale=scale, format=MXFP8(element=element)), torch.float32)
        for element in ("e5m2", "e4m3")
    }
    assert read["e5m2"][0, :3].tolist() == [1.0, 256.0, 57344.0]
    assert read["e4m3"][0, :3].tolist() == [1.5, 24.0, 352.0]


def test_every_e2m1_code_and_the_nibble_order(backend: str) -> None:
    payload = torch.tensor([[low + 0x10 * (low + 1) for low in range(0, 16, 2)] * 2])
    q = Quantized(payload=payload.to(torch.uint8), scale=torch.tensor([[128]], dtype=torch.uint8), format=MXFP4())
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    got = dequantize(q, torch.float32, backend=backend).numpy()
    np.testing.assert_array_equal(got[0, :16], codes * 2)
    np.testing.assert_array_equal(np.signbit(got[0, :16]), np.signbit(codes))


def test_every_e8m0_scale(backend: str) -> None:
    """1.0 under each code: 0 is 2^-127, not 0; 255 is NaN, not inf."""
    payload = torch.full((256, 32), 0x38, dtype=torch.uint8)
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    got = dequantize(Quantized(payload=payload, scale=scale, format=MXFP8()), torch.float32, backend=backend)
    np.testing.assert_array_equal(
        got[:, 0].numpy(), scale[:, 0].numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    )
    assert float(got[0, 0]) == 2.0**-127 and bool(got[255].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_native_bits(native_ops: Any, fmt: Format, dtype: torch.dtype) -> None:
    shapes = [(2, 128, 256), (1, 384, 128), (0, 128, 128), (2, 0, 128), (2, 128, 0), (256, 384)]
    for seed, (shape, direction) in enumerate(itertools.product(shapes, directions(fmt))):
        q = random_record(fmt, shape, direction, seed)
        got, expected = (dequantize(q, dtype, backend=b) for b in ("native", "reference"))
        assert got.shape == shape and got.is_contiguous() and same_bits(got, expected)


@pytest.mark.parametrize("fmt", [MXFP8(), MXFP4(), NVFP4(), NVFP4(random_hadamard=True), Float8()], ids=repr)
def test_native_bits_of_odd_sizes(native_ops: Any, fmt: Format) -> None:
    along = 48 if fmt.block is None else fmt.block.cols
    for across, blocks in itertools.product((1, 3, 65, 130), (1, 3, 9)):
        for direction in directions(fmt):
            size = (across, along * blocks) if direction == "rowwise" else (along * blocks, across)
            q = random_record(fmt, (2, *size), direction)
            assert same_bits(dequantize(q, backend="native"), dequantize(q, backend="reference"))


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.columnwise_allowed], ids=repr)
def test_both_directions_have_the_logical_orientation(backend: str, fmt: Format) -> None:
    x = torch.randn(2, 128, 256)
    for q in quantize(x, fmt, columnwise=True):
        assert q is not None
        y = dequantize(q, torch.float32, backend=backend)
        assert y.shape == x.shape
        assert float((y - x).norm() / x.norm()) < (0.13 if fmt.element_bits == 4 else 0.06)
        one = Quantized(
            payload=q.payload[1],
            scale=q.scale[1],
            tensor_scale=None if q.tensor_scale is None else q.tensor_scale[1],
            format=fmt,
            direction=q.direction,
        )
        assert torch.equal(dequantize(one, torch.float32, backend=backend), y[1])


def test_one_rounding_to_the_dtype(backend: str) -> None:
    q = random_record(FP8Block(), (64, 256), "rowwise")
    exact = dequantize(q, torch.float32, backend=backend)
    for dtype in DTYPES[1:]:
        torch.testing.assert_close(
            dequantize(q, dtype, backend=backend), exact.to(dtype), rtol=0, atol=0, equal_nan=True
        )


def test_gpt_oss_blocks_are_this_payload(backend: str) -> None:
    """Their (experts, rows, groups, 16) blocks, low nibble first, and biased exponents, read by the plain recipe."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 135, (2, 6, 3), dtype=torch.uint8, generator=generator)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    expected = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), -1).flatten(-2)
    expected = (expected * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)
    q = Quantized(payload=blocks.flatten(-2), scale=scales, format=MXFP4())
    assert torch.equal(dequantize(q, torch.float32, backend=backend), expected)


@pytest.mark.parametrize("fmt", [MXFP8(), NVFP4(random_hadamard=True), Float8()], ids=repr)
def test_thread_count_changes_nothing(
    native_ops: Any, at_thread_counts: Callable[[Callable[[], Any]], list[Any]], fmt: Format
) -> None:
    q = random_record(fmt, (3, 512, 640), "columnwise")
    first, *others = at_thread_counts(lambda: dequantize(q, backend="native"))
    assert all(same_bits(first, other) for other in others)


def test_refusals() -> None:
    q = random_record(MXFP8(), (64, 64), "rowwise")
    with pytest.raises(TypeError, match=r"dtype must be float32, bfloat16 or float16, got torch\.float64"):
        dequantize(q, torch.float64)
    with pytest.raises(
        ValueError, match=r"backend must be one of native, reference, triton for dequantize; got 'cuda'"
    ):
        dequantize(q, backend="cuda")
    plain = Quantized(payload=torch.zeros(4, 4, dtype=torch.bfloat16), scale=torch.zeros(0), format=HighPrecision())
    with pytest.raises(ValueError, match="expected a quantized format, got HighPrecision"):
        dequantize(plain)


@pytest.mark.parametrize("fmt", [MXFP8(), Float8(), NVFP4(random_hadamard=True)], ids=repr)
def test_opcheck(native_ops: Any, fmt: Format) -> None:
    _, q = quantize(torch.randn(2, 128, 256), fmt, columnwise=True)
    assert q is not None and fmt.encoding is not None
    element = ("e4m3", "e5m2", "e2m1").index(fmt.encoding.name)
    kind = 2 if fmt.scale_encoding is None else ("e8m0", "e4m3").index(fmt.scale_encoding.name)
    rotated = isinstance(fmt, NVFP4) and fmt.random_hadamard
    arguments = (q.payload, q.scale, q.tensor_scale, element, kind, *(fmt.block or (0, 0)), True, rotated)
    torch.library.opcheck(native_ops.dequantize.default, (*arguments, torch.bfloat16))


def test_the_op_checks_its_arguments(native_ops: Any) -> None:
    payload, scale = torch.zeros(2, 64, 64, dtype=torch.uint8), torch.zeros(2, 64, 2, dtype=torch.uint8)
    run = native_ops.dequantize.default
    with pytest.raises(ValueError, match="scale must have size 2 in dim 2, got 1"):
        run(payload, scale[..., :1], None, 0, 0, 1, 32, False, False, torch.float32)
    with pytest.raises(ValueError, match="cols must be a multiple of 48, got 64"):
        run(payload, scale, None, 0, 0, 1, 48, False, False, torch.float32)
    with pytest.raises(ValueError, match="scale must be Float, got Byte"):
        run(payload, scale, None, 0, 2, 1, 32, False, False, torch.float32)
    with pytest.raises(ValueError, match="a rotated matrix is transposed"):
        run(payload, scale, None, 0, 0, 1, 32, False, True, torch.float32)
    with pytest.raises(ValueError, match="dtype must be float32, bfloat16 or float16"):
        run(payload, scale, None, 0, 0, 1, 32, False, False, torch.float64)


def test_traces_in_one_graph(native_ops: Any) -> None:
    q = random_record(NVFP4(), (2, 64, 64), "columnwise")

    def run(payload: Tensor, scale: Tensor, tensor_scale: Tensor) -> Tensor:
        record = Quantized(
            payload=payload, scale=scale, tensor_scale=tensor_scale, format=NVFP4(), direction="columnwise"
        )
        return dequantize(record)

    assert q.tensor_scale is not None
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(q.payload, q.scale, q.tensor_scale), dequantize(q))
