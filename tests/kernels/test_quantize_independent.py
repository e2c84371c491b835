"""Quantization against independent implementations: every cast by ml_dtypes, whole blocks by torchao."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from moe_runtime.formats import MXFP4, MXFP8, NVFP4, Float8, Format, Quantized
from moe_runtime.formats.layouts import unpack_nibbles
from moe_runtime.kernels.quantize import _reference, quantize


def only(x: Tensor, fmt: Format, backend: str) -> Quantized:
    row, _ = quantize(x, fmt, backend=backend)
    assert row is not None
    return row


# ---- single elements, against ml_dtypes ----


def cast_inputs() -> dict[str, Tensor]:
    """Every bfloat16, every float16, and a million bit patterns of float32, those around every tie included."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    ties = torch.arange(0, 2**32, 2**18, dtype=torch.int64)
    around = torch.cat([ties + offset for offset in (-1, 0, 1)]) & 0xFFFFFFFF
    randoms = torch.randint(0, 2**32, (2**20,), generator=torch.Generator().manual_seed(0))
    bits = torch.cat([around, randoms])
    bits = torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32)
    return {
        "bfloat16": every.view(torch.bfloat16),
        "float16": every.view(torch.float16),
        "float32": bits.view(torch.float32),
    }


def theirs(x: np.ndarray, dtype: Any, largest: float) -> np.ndarray:
    """The codes of clamped values by ml_dtypes."""
    with np.errstate(all="ignore"):
        return np.clip(x, -largest, largest).astype(dtype).view(np.uint8)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("element", "dtype"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)], ids=["e4m3", "e5m2"]
)
def test_fp8_casts(backend: str, name: str, element: Any, dtype: Any) -> None:
    x = cast_inputs()[name].reshape(64, -1)
    fmt = Float8(element=element)
    amax = torch.tensor(fmt.encoding.max)  # then the multiplier is 1
    row, column = quantize(x, fmt, columnwise=True, amax=amax, backend=backend)
    assert row is not None and column is not None and float(row.scale) == 1.0
    x32 = x.float().numpy()
    expected = np.where(np.isfinite(x32), theirs(x32, dtype, fmt.encoding.max), 0x7F)
    np.testing.assert_array_equal(row.payload.numpy(), expected)
    np.testing.assert_array_equal(column.payload.numpy(), expected.T)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_e2m1_casts(backend: str, name: str) -> None:
    """A 6 in front of every 31 values keeps their scale at 1."""
    x = cast_inputs()[name]
    x = x[x.abs() <= 6].float()
    x = x[: len(x) // 31 * 31].reshape(-1, 31)
    x = torch.cat((torch.full((len(x), 1), 6.0), x), 1)
    q = only(x, MXFP4(), backend)
    assert bool((q.scale == 127).all())
    np.testing.assert_array_equal(unpack_nibbles(q.payload).numpy(), theirs(x.numpy(), ml_dtypes.float4_e2m1fn, 6))


def test_e8m0_rounds_up() -> None:
    value = cast_inputs()["float32"].abs()
    code = _reference.encode_e8m0(value).numpy()
    with np.errstate(invalid="ignore"):  # signaling NaN
        x = value.numpy().astype(np.float64)
    mantissa, exponent = np.frexp(np.where(np.isfinite(x), x, 0))  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    up = np.clip(np.where(mantissa == 0.5, exponent - 1, exponent) + 127, 0, 254)
    expected = np.where(np.isnan(x), 255, np.where(np.isinf(x), 254, np.where(x == 0, 0, up)))
    np.testing.assert_array_equal(code, expected.astype(np.uint8))
    powers = torch.exp2(torch.arange(-126, 128).float())
    np.testing.assert_array_equal(
        _reference.encode_e8m0(powers).numpy(), powers.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    )


# ---- whole blocks, against torchao ----


@pytest.fixture
def torchao_mx() -> Any:
    return pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")


@pytest.mark.filterwarnings("ignore")  # of importing torchao
@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        (MXFP8(), torch.float8_e4m3fn),
        (MXFP8(element="e5m2"), torch.float8_e5m2),
        (MXFP4(), torch.float4_e2m1fn_x2),
    ],
    ids=repr,
)
def test_mx_against_torchao(backend: str, torchao_mx: Any, fmt: Format, dtype: torch.dtype) -> None:
    """Bit-equal for finite values. Theirs keeps code 254 for a block with inf, where ours is NaN as for NaN."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    for seed, exponents in enumerate((0, 8, 40)):
        x = torch.randn(64, 512) * torch.exp2(torch.randint(-exponents, exponents + 1, (64, 512)).float())
        x[seed] = 0
        scale, payload = torchao_mx.to_mx(x.bfloat16(), dtype, 32, ScaleCalculationMode.RCEIL)
        q = only(x.bfloat16(), fmt, backend)
        assert torch.equal(q.scale, scale.view(torch.uint8))
        assert torch.equal(q.payload, payload.view(torch.uint8).view(q.payload.shape))


@pytest.mark.filterwarnings("ignore")  # of importing torchao
def test_nvfp4_against_torchao(backend: str) -> None:
    """Bit-equal where S is a power of two; elsewhere their quotients and our products differ in the last bit.

    Their block scales are never below 2^-9, so a block that ours flushes to scale 0 stays out.
    """
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = torch.randn(64, 512) * torch.exp2(torch.randint(0, 4, (64, 32)).float()).repeat_interleave(16, 1)
    for exponent in (-3, 0, 5):
        x[0, 0] = 2688 * 2.0**exponent
        scaled = torch.where(x == x[0, 0], x, x * 2.0**exponent * 20)
        scale, payload = nvfp4.nvfp4_quantize(scaled, 16, torch.tensor(2.0**exponent))
        q = only(scaled, NVFP4(), backend)
        assert q.tensor_scale is not None and float(q.tensor_scale) == 2.0**exponent
        assert torch.equal(q.scale, scale.view(torch.uint8).view(q.scale.shape))
        assert torch.equal(q.payload, payload.view(torch.uint8).view(q.payload.shape))
