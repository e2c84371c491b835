"""SwiGLU and its gradient against float64 and against autograd, over every exponent that g can have."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from moe_runtime.kernels.swiglu import swiglu, swiglu_backward

Layout = Literal["concatenated", "interleaved"]
LAYOUTS: tuple[Layout, Layout] = ("concatenated", "interleaved")
INF, NAN = float("inf"), float("nan")
# The largest error measured over 1.3 million elements, of either backend: 2.9e-7 and 0.003891 (half a bfloat16 step
# is 0.003906 of a value just over a power of two), and 8.1e-8 of the summed magnitudes for the gate's gradient.
TOLERANCE = {torch.float32: 4e-7, torch.bfloat16: 3.92e-3}
GATE_TOLERANCE = 2e-7
SIZES = [(0, 4), (3, 0), (1, 1), (5, 7), (3, 16), (2, 255), (4, 256), (3, 777)]


def joined(g_RF: Tensor, u_RF: Tensor, layout: Layout) -> Tensor:
    return torch.cat((g_RF, u_RF), 1) if layout == "concatenated" else torch.stack((g_RF, u_RF), 2).flatten(1)


def halves(h_RH: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    if layout == "interleaved":
        return h_RH[:, 0::2], h_RH[:, 1::2]
    return h_RH[:, : h_RH.shape[1] // 2], h_RH[:, h_RH.shape[1] // 2 :]


def exact(h_RH: Tensor, gate_R: Tensor | None, layout: Layout) -> Tensor:
    """float64, differentiable."""
    g_RF, u_RF = halves(h_RH.double(), layout)
    a_RF = torch.nn.functional.silu(g_RF) * u_RF
    return a_RF if gate_R is None else gate_R.double()[:, None] * a_RF


def assert_relative(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Each element within `tolerance` of its own size, or of 1e-30 where it is smaller than that."""
    error = (actual.double() - expected.double()).abs() / expected.double().abs().clamp(min=1e-30)
    assert actual.shape == expected.shape
    assert not error.numel() or float(error.max()) <= tolerance


def gradient_scale(da_RF: Tensor, h_RH: Tensor, gate_R: Tensor, layout: Layout) -> Tensor:
    """What an error in dh is relative to, (R, 2F): silu'(g) = s (1 + g (1 - s)) cancels, so its terms count."""
    g_RF, u_RF = halves(h_RH.double(), layout)
    dp_RF = da_RF.double() * gate_R.detach()[:, None]
    dg_RF = (dp_RF * u_RF).abs() * torch.sigmoid(g_RF) * (1 + g_RF.abs())
    return joined(dg_RF, (dp_RF * torch.nn.functional.silu(g_RF)).abs(), layout).clamp(min=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gated", ["no gate", "float32 gate", "own gate"])
@pytest.mark.parametrize(("num_rows", "width"), SIZES)
def test_values(backend: str, num_rows: int, width: int, gated: str, layout: Layout, dtype: torch.dtype) -> None:
    h_RH = (torch.randn(num_rows, 2 * width) * 4).to(dtype)
    gate_R = None if gated == "no gate" else torch.rand(num_rows).to(torch.float32 if "32" in gated else dtype)
    a_RF = swiglu(h_RH, gate_R, layout=layout, backend=backend)
    assert a_RF.dtype == dtype
    assert_relative(a_RF, exact(h_RH, gate_R, layout), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gated", ["no gate", "float32 gate", "own gate"])
@pytest.mark.parametrize(("num_rows", "width"), SIZES)
def test_gradients(backend: str, num_rows: int, width: int, gated: str, layout: Layout, dtype: torch.dtype) -> None:
    h_RH = (torch.randn(num_rows, 2 * width) * 4).to(dtype)
    gate_R = None if gated == "no gate" else torch.rand(num_rows).to(torch.float32 if "32" in gated else dtype)
    da_RF = torch.randn(num_rows, width).to(dtype)
    dh_RH, dgate_R = swiglu_backward(da_RF, h_RH, gate_R, layout=layout, backend=backend)

    h64_RH = h_RH.double().requires_grad_()
    gate64_R = torch.ones(num_rows).double() if gate_R is None else gate_R.double()
    gate64_R.requires_grad_()
    exact(h64_RH, gate64_R, layout).backward(da_RF.double())
    assert h64_RH.grad is not None and gate64_R.grad is not None
    error_RH = (dh_RH.double() - h64_RH.grad).abs() / gradient_scale(da_RF, h_RH, gate64_R, layout)
    assert not error_RH.numel() or float(error_RH.max()) <= TOLERANCE[dtype]
    assert dh_RH.dtype == dtype
    if gate_R is None:
        assert dgate_R is None
    else:
        assert dgate_R is not None and dgate_R.dtype == torch.float32
        magnitude_R = (da_RF.double() * exact(h_RH, None, layout)).abs().sum(1)
        assert ((dgate_R.double() - gate64_R.grad).abs() <= GATE_TOLERANCE * magnitude_R + 1e-30).all()


def test_every_exponent(backend: str) -> None:
    g = torch.cat((torch.logspace(-44, 38.5, 20_000), torch.linspace(0, 100, 20_001)))
    g = torch.cat((g, -g)).clamp(min=-87.0)  # below, see test_far_left
    h_RH = torch.stack((g, torch.ones_like(g)), dim=1)
    a_RF = swiglu(h_RH, backend=backend)
    assert_relative(a_RF, exact(h_RH, None, "interleaved"), TOLERANCE[torch.float32])
    da_RF = torch.ones_like(a_RF)
    dh_RH, _ = swiglu_backward(da_RF, h_RH, layout="interleaved", backend=backend)
    h64_RH = h_RH.double().requires_grad_()
    exact(h64_RH, None, "interleaved").sum().backward()
    assert h64_RH.grad is not None
    error_RH = (dh_RH.double() - h64_RH.grad).abs() / gradient_scale(da_RF, h_RH, torch.ones(len(g)), "interleaved")
    assert float(error_RH.max()) <= TOLERANCE[torch.float32]


def test_far_left(backend: str) -> None:
    """Below -87, silu is smaller than 1e-35: anything from its true value to -0, and never NaN."""
    g = torch.cat((-torch.linspace(87, 110, 10_001), -torch.logspace(2, 38, 100)))
    a_RF = swiglu(torch.stack((g, torch.ones_like(g)), dim=1), backend=backend)
    assert ((a_RF <= 0) & (a_RF > -2e-36)).all()
    assert (a_RF.signbit()).all()


def test_special_values_follow_float32_torch(backend: str) -> None:
    g = torch.tensor([INF, -INF, NAN, 0.0, -0.0, 3.38e38, -3.38e38, 1e-45])
    h_RH = torch.stack((g, torch.ones_like(g)), dim=1)
    for dtype in (torch.float32, torch.bfloat16):
        a_RF = swiglu(h_RH.to(dtype), backend=backend)
        g_R1 = h_RH.to(dtype).float()[:, :1]
        expected = (g_R1 * torch.sigmoid(g_R1)).to(dtype)
        torch.testing.assert_close(a_RF, expected, equal_nan=True, rtol=0, atol=0)
        assert torch.equal(a_RF.signbit()[3:], expected.signbit()[3:])
        assert a_RF[1].isnan()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_poison_stays_in_its_row(backend: str, layout: Layout, dtype: torch.dtype) -> None:
    h_RH, gate_R, da_RF = torch.randn(4, 34).to(dtype), torch.rand(4), torch.randn(4, 17).to(dtype)
    clean = swiglu(h_RH, gate_R, layout=layout, backend=backend)
    clean_dh, clean_dgate = swiglu_backward(da_RF, h_RH, gate_R, layout=layout, backend=backend)
    h_RH[2], gate_R[2], da_RF[2] = NAN, NAN, NAN
    keep = torch.tensor([0, 1, 3])
    dh_RH, dgate_R = swiglu_backward(da_RF, h_RH, gate_R, layout=layout, backend=backend)
    assert clean_dgate is not None and dgate_R is not None
    assert torch.equal(swiglu(h_RH, gate_R, layout=layout, backend=backend)[keep], clean[keep])
    assert torch.equal(dh_RH[keep], clean_dh[keep])
    assert torch.equal(dgate_R[keep], clean_dgate[keep])
    assert dh_RH[2].isnan().all() and dgate_R[2].isnan()


def test_zero_gate_gives_zero_rows(backend: str) -> None:
    h_RH, gate_R = torch.randn(3, 10), torch.tensor([1.0, 0.0, 2.0])
    assert torch.equal(swiglu(h_RH, gate_R, backend=backend)[1], torch.zeros(5))
    dh_RH, dgate_R = swiglu_backward(torch.ones(3, 5), h_RH, gate_R, backend=backend)
    assert torch.equal(dh_RH[1], torch.zeros(10))
    assert dgate_R is not None and dgate_R[1] != 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided(backend: str, layout: Layout) -> None:
    base, gates = torch.randn(24, 24), torch.rand(12)
    odd = torch.randn(6 * 6 + 1).to(torch.bfloat16)[1:].view(6, 6)
    for h_RH in (base[:6, ::4], base[:, :6].t()[:, :8], base[:1, :10].expand(6, 10), base[:6, :1].expand(6, 8), odd):
        width = h_RH.shape[1] // 2
        for gate_R in (None, gates[::2], gates[:1].expand(6)):
            dense = h_RH.contiguous(), None if gate_R is None else gate_R.contiguous()
            assert torch.equal(
                swiglu(h_RH, gate_R, layout=layout, backend=backend), swiglu(*dense, layout=layout, backend=backend)
            )
            for da_RF in (
                base.to(h_RH.dtype)[6:12, : 2 * width : 2],
                torch.ones((), dtype=h_RH.dtype).expand(6, width),
            ):
                actual = swiglu_backward(da_RF, h_RH, gate_R, layout=layout, backend=backend)
                expected = swiglu_backward(da_RF.contiguous(), *dense, layout=layout, backend=backend)
                torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_thread_counts(native_ops: Any, at_thread_counts: Any, layout: Layout, dtype: torch.dtype) -> None:
    h_RH, gate_R, da_RF = torch.randn(700, 402).to(dtype), torch.rand(700), torch.randn(700, 201).to(dtype)
    for run in (
        lambda: (swiglu(h_RH, gate_R, layout=layout, backend="native"),),
        lambda: swiglu_backward(da_RF, h_RH, gate_R, layout=layout, backend="native"),
    ):
        first, *rest = at_thread_counts(run)
        assert all(torch.equal(a, b) for other in rest for a, b in zip(first, other, strict=True))


def test_a_row_does_not_depend_on_its_neighbours(native_ops: Any) -> None:
    h_RH, gate_R, da_RF = torch.randn(9, 1030), torch.rand(9), torch.randn(9, 515)
    dh_RH, dgate_R = swiglu_backward(da_RF, h_RH, gate_R, backend="native")
    dh_1H, dgate_1 = swiglu_backward(da_RF[4:5], h_RH[4:5], gate_R[4:5], backend="native")
    assert dgate_R is not None and dgate_1 is not None
    assert torch.equal(dh_RH[4:5], dh_1H) and torch.equal(dgate_R[4:5], dgate_1)


def test_float64_reference_stays_in_float64() -> None:
    h_RH, gate_R = torch.randn(3, 8, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    assert_relative(swiglu(h_RH, gate_R, backend="reference"), exact(h_RH, gate_R, "concatenated"), 1e-14)


def test_refuses_wrong_arguments(backend: str) -> None:
    h_RH = torch.zeros(3, 8)
    with pytest.raises(ValueError, match="layout must be"):
        swiglu(h_RH, layout="packed", backend=backend)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"\(R, 2F\), got \(3, 7\)"):
        swiglu(h_RH[:, :7], backend=backend)
    with pytest.raises(ValueError, match=r"gate must have shape \(3,\), one per row; got \(2,\)"):
        swiglu(h_RH, torch.ones(2), backend=backend)
    with pytest.raises(TypeError, match=r"gate must be float32 or h's dtype torch\.float32, got torch\.float64"):
        swiglu(h_RH, torch.ones(3).double(), backend=backend)
    with pytest.raises(ValueError, match=r"da must have shape \(3, 4\)"):
        swiglu_backward(torch.zeros(3, 8), h_RH, backend=backend)
    with pytest.raises(TypeError, match=r"da must have h's dtype torch\.float32, got torch\.bfloat16"):
        swiglu_backward(torch.zeros(3, 4, dtype=torch.bfloat16), h_RH, backend=backend)


@pytest.mark.parametrize("gate_R", [None, torch.rand(3)], ids=["no gate", "gate"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_opcheck(native_ops: Any, gate_R: Tensor | None, interleaved: bool) -> None:
    h_RH, da_RF = torch.randn(3, 10), torch.randn(3, 5)
    torch.library.opcheck(native_ops.swiglu.default, (h_RH, gate_R, interleaved))
    torch.library.opcheck(native_ops.swiglu_backward.default, (da_RF, h_RH, gate_R, interleaved))
