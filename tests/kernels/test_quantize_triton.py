"""Quantize and dequantize in Triton, bit for bit against their references: interpreted on the CPU, compiled on a GPU.

A process interprets kernels or compiles them, so the CPU run is this same file in a child process.
"""

# E members   R rows   C columns

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_runtime.core import env
from moe_runtime.formats import MXFP4, MXFP8, NVFP4, Float8, Format, FP8Block
from moe_runtime.formats.format import Direction
from moe_runtime.kernels.dequantize import _reference as dequantize_reference
from moe_runtime.kernels.quantize import _reference as quantize_reference
from moe_runtime.kernels.quantize._reference import Stored

pytest.importorskip("triton", reason="triton is not installed")
from moe_runtime.kernels.dequantize import _triton as dequantize_triton
from moe_runtime.kernels.quantize import _triton as quantize_triton

INTERPRETED = env.get("TRITON_INTERPRET") == "1"
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a CUDA device")
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]
if INTERPRETED:  # numpy warns of what these numbers are here to do
    pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS: list[Format] = [
    MXFP8(),
    MXFP8(element="e5m2"),
    MXFP4(),
    FP8Block(),
    FP8Block(element="e5m2", power_of_two=False),
    FP8Block(two_dimensional=True),
    FP8Block(element="e5m2", two_dimensional=True, power_of_two=False),
    Float8(),
    Float8(element="e5m2", power_of_two=True),
    NVFP4(),
    NVFP4(two_dimensional=True),
    NVFP4(random_hadamard=True),
    NVFP4(stochastic_rounding=True),
    NVFP4(random_hadamard=True, stochastic_rounding=True),
]
SPECIAL = (float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-40, -1e-45, 3.4e38, -3e38, 6.0, 448.0, 2.0**-127)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def hostile_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Magnitudes of 2^-12 to 2^12 with special values among them; of three members one of zeros, one of tiny values."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-12, 12, shape, generator=generator)
    x = torch.randn(shape, generator=generator) * torch.exp2(exponent.float())
    for value in SPECIAL:
        places = torch.randint(0, max(x.numel(), 1), (max(x.numel() // 4000, 1),), generator=generator)
        x.view(-1)[places[: x.numel()]] = value
    if shape[0] > 2:
        x[1] = torch.where(x[1] > 0, 0.0, -0.0)
        x[2] *= 1e-38
    return x.to(dtype)


def shapes_of(fmt: Format) -> list[tuple[int, int, int]]:
    """Several blocks and no whole tile, one block, and nothing."""
    block = 1 if fmt.block is None else fmt.block.cols
    sizes = {1: (37, 53), 16: (48, 80), 32: (96, 160), 128: (128, 256)}[block]
    return [(3, *sizes), (1, block, block), (0, block, block), (2, 0, block), (2, block, 0)]


def directions_of(fmt: Format) -> list[tuple[bool, bool]]:
    return [(True, True), (True, False), (False, True)] if fmt.columnwise_allowed else [(True, False)]


def amaxes_of(fmt: Format, x_ERC: Tensor) -> list[Tensor | None]:
    if isinstance(fmt, Float8) or (isinstance(fmt, NVFP4) and not fmt.random_hadamard):
        return [None, torch.full((len(x_ERC),), 2.5)]
    return [None]


def storage(shape: torch.Size, fmt: Format, direction: Direction, device: str, row: Stored | None = None) -> Stored:
    """Tensors full of what is surely wrong."""
    shared = row[1] if row is not None and isinstance(fmt, Float8) else None
    return (
        torch.full(fmt.payload_shape(shape, direction), 0xA5, dtype=torch.uint8, device=device),
        torch.full(fmt.scale_shape(shape, direction), 0x77, dtype=fmt.scale_dtype, device=device)
        if shared is None
        else shared,
        torch.full(shape[:-2], -3.0, device=device) if fmt.has_tensor_scale else None,
    )


def quantized(
    module: object, x_ERC: Tensor, fmt: Format, wanted: tuple[bool, bool], amax_E: Tensor | None
) -> dict[Direction, Stored]:
    device = str(x_ERC.device)
    row = storage(x_ERC.shape, fmt, "rowwise", device) if wanted[0] else None
    column = storage(x_ERC.shape, fmt, "columnwise", device, row) if wanted[1] else None
    seed = (1 << 40) + 77 if isinstance(fmt, NVFP4) and fmt.stochastic_rounding else None
    module.quantize_into(x_ERC, fmt, row, column, seed, None if amax_E is None else amax_E.to(device))  # type: ignore[attr-defined]
    stored: dict[Direction, Stored | None] = {"rowwise": row, "columnwise": column}
    return {direction: tensors for direction, tensors in stored.items() if tensors is not None}


def assert_same_bits(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    if actual is None or expected is None:
        assert actual is expected, what
        return
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    differ = actual.cpu().flatten().view(torch.uint8) != expected.flatten().view(torch.uint8)
    assert not bool(differ.any()), f"{what}: {int(differ.sum())} of {differ.numel()} bytes differ"


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
def test_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", __file__]
    child = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=child, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_bits(device: str, fmt: Format, dtype: torch.dtype) -> None:
    for number, shape in enumerate(shapes_of(fmt)):
        x_ERC = hostile_values(shape, dtype, number)
        wanted = directions_of(fmt)[: 1 if INTERPRETED and dtype != torch.bfloat16 else None]
        for directions, amax_E in itertools.product(wanted, amaxes_of(fmt, x_ERC)):
            expected = quantized(quantize_reference, x_ERC, fmt, directions, amax_E)
            actual = quantized(quantize_triton, x_ERC.to(device), fmt, directions, amax_E)
            for direction, tensors in expected.items():
                for name, a, b in zip(("payload", "scale", "tensor scale"), actual[direction], tensors, strict=True):
                    assert_same_bits(a, b, f"{direction} {name} of {shape}, amax {amax_E}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", [f for f in FORMATS if f != NVFP4(stochastic_rounding=True)], ids=repr)
def test_values(device: str, fmt: Format, dtype: torch.dtype) -> None:
    """Of any bytes at all, also in records of which FSDP2 gathered one an expert: dense members, anywhere."""
    for shape in shapes_of(fmt):
        for direction in ("rowwise", "columnwise") if fmt.columnwise_allowed else ("rowwise",):
            stored = random_bytes(shape, fmt, direction)
            expected = dequantize_reference.dequantize(*stored, fmt, direction, dtype)
            for spread in (False, True):
                placed = tuple(t if t is None else (apart(t.to(device)) if spread else t.to(device)) for t in stored)
                actual = dequantize_triton.dequantize(*placed, fmt, direction, dtype)
                assert actual.is_contiguous()
                assert_same_bits(actual, expected, f"{direction} of {shape}, spread {spread}")


def random_bytes(shape: tuple[int, ...], fmt: Format, direction: Direction) -> Stored:
    generator = torch.Generator().manual_seed(sum(shape))

    def random(wanted: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype == torch.uint8:
            return torch.randint(0, 256, wanted, dtype=dtype, generator=generator)
        return torch.exp2(torch.randint(-30, 30, wanted, generator=generator).float())

    payload = random(fmt.payload_shape(shape, direction), torch.uint8)
    scale = random(fmt.scale_shape(shape, direction), fmt.scale_dtype)
    return payload, scale, random(shape[:1], torch.float32) if fmt.has_tensor_scale else None


def apart(stored: Tensor) -> Tensor:
    """The same values with 48 bytes of NaN between members, which then start at a multiple of 16 bytes or not."""
    num_members, size = stored.shape[0], stored[:1].numel()
    gap = 48 // stored.element_size()
    memory = stored.new_full((num_members, size + gap), 0x7F if stored.dtype == torch.uint8 else float("nan"))
    view = memory[:, gap // 2 : gap // 2 + size].view(stored.shape)
    return view.copy_(stored)


def test_unaligned_and_strided_inputs(device: str) -> None:
    """x at an odd address, x transposed, a payload that stands at an odd address."""
    x_ERC = hostile_values((2, 64, 96), torch.bfloat16)
    memory = torch.empty(x_ERC.numel() + 1, dtype=torch.bfloat16, device=device)
    odd_ERC = memory[1:].view(x_ERC.shape).copy_(x_ERC)
    turned_ERC = x_ERC.to(device).mT.contiguous().mT
    for fmt in (MXFP8(), NVFP4(), MXFP4()):
        expected = quantized(quantize_reference, x_ERC, fmt, (True, False), None)["rowwise"]
        for given_ERC in (odd_ERC, turned_ERC):
            actual = quantized(quantize_triton, given_ERC, fmt, (True, False), None)["rowwise"]
            assert_same_bits(actual[0], expected[0], f"payload of {fmt}")
        payload, scale, tensor_scale = storage(x_ERC.shape, fmt, "rowwise", device)
        odd = torch.empty(payload.numel() + 3, dtype=torch.uint8, device=device)[3:].view(payload.shape)
        quantize_triton.quantize_into(odd_ERC, fmt, (odd, scale, tensor_scale), None, None, None)
        assert_same_bits(odd, expected[0], f"payload of {fmt} at an odd address")
        read = dequantize_triton.dequantize(odd, scale, tensor_scale, fmt, "rowwise", torch.float32)
        wanted = dequantize_reference.dequantize(*expected, fmt, "rowwise", torch.float32)
        assert_same_bits(read, wanted, f"values of {fmt} at an odd address")
