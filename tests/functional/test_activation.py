"""Activations: known values, values and gradients in float64 arithmetic of our own, layouts, dead rows."""

import math

import pytest
import torch
from torch import Tensor

from moe_runtime.functional import Activation, Layout, activate, check_activation
from moe_runtime.testing import assert_close_per_expert, nan_filled_memory, strided, with_nan_tail

GATED: tuple[Activation, ...] = ("swiglu", "geglu", "geglu_tanh", "swiglu_clamped")
EVERY: tuple[Activation, ...] = (*GATED, "relu2")
LAYOUTS: tuple[Layout, ...] = ("concatenated", "interleaved")
NAN = float("nan")
ENDS = torch.tensor([4, 4, 13], dtype=torch.int32)
# The worst measured, of values and gradients: 2.1e-7 and 2.7e-3.
TOLERANCE = {torch.float32: 6e-7, torch.bfloat16: 8e-3}


def halves(h_RH: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    if layout == "interleaved":
        return h_RH[:, 0::2], h_RH[:, 1::2]
    return h_RH[:, : h_RH.shape[1] // 2], h_RH[:, h_RH.shape[1] // 2 :]


def joined(g_RF: Tensor, u_RF: Tensor, layout: Layout) -> Tensor:
    return torch.cat((g_RF, u_RF), 1) if layout == "concatenated" else torch.stack((g_RF, u_RF), 2).flatten(1)


def defined(h_RH: Tensor, gate_R: Tensor | None, activation: Activation, layout: Layout) -> Tensor:
    """The definitions, written out, differentiable, in the dtype of h."""
    if activation == "relu2":
        a_RF = torch.where(h_RH > 0, h_RH, 0.0) ** 2
    else:
        g_RF, u_RF = halves(h_RH, layout)
        if activation == "swiglu":
            a_RF = g_RF / (1 + torch.exp(-g_RF)) * u_RF
        elif activation == "geglu":
            a_RF = 0.5 * g_RF * (1 + torch.erf(g_RF / math.sqrt(2))) * u_RF
        elif activation == "geglu_tanh":
            inner_RF = math.sqrt(2 / math.pi) * (g_RF + 0.044715 * g_RF**3)
            a_RF = 0.5 * g_RF * (1 + torch.tanh(inner_RF)) * u_RF
        else:
            c_RF, u_RF = (
                torch.where(g_RF > 7, 7.0, g_RF),
                torch.where(u_RF > 7, 7.0, torch.where(u_RF < -7, -7.0, u_RF)),
            )
            a_RF = c_RF / (1 + torch.exp(-1.702 * c_RF)) * (u_RF + 1)
    return a_RF if gate_R is None else gate_R[:, None] * a_RF


@pytest.mark.parametrize("gate_dtype", [None, torch.float32, "own"], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", EVERY)
def test_values_and_gradients(activation: Activation, layout: Layout, dtype: torch.dtype, gate_dtype: object) -> None:
    generator = torch.Generator().manual_seed(1)
    h_RH = (torch.randn(13, 80, generator=generator) * 3).to(dtype)
    gate_R = None
    if gate_dtype is not None:
        gate_R = torch.rand(13, generator=generator).to(torch.float32 if gate_dtype == torch.float32 else dtype)
    da_RF = torch.randn(13, 80 if activation == "relu2" else 40, generator=generator).to(dtype)

    def run(h_RH: Tensor, gate_R: Tensor | None, exact: bool) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (h_RH, gate_R) if t is not None]
        gate = leaves[1] if gate_R is not None else None
        function = defined if exact else lambda h, g, a, la: activate(h, g, activation=a, layout=la)
        a_RF = function(leaves[0], gate, activation, layout)
        return [a_RF.detach(), *torch.autograd.grad(a_RF, leaves, da_RF.to(a_RF.dtype))]

    got = run(h_RH, gate_R, exact=False)
    expected = run(h_RH.double(), None if gate_R is None else gate_R.double(), exact=True)
    for name, value, exact in zip(("a", "dh", "dgate"), got, expected, strict=False):
        assert value.dtype == (dtype if name != "dgate" or gate_dtype == "own" else torch.float32)
        worst = assert_close_per_expert(value, exact, TOLERANCE[dtype], ends=ENDS, name=name)
        print(f"measured {dtype} {activation} {name} {worst:.2e}")


def test_gate_and_up_in_both_layouts() -> None:
    """gate [1, 3], up [2, 4]: silu(1) * 2 + silu(3) * 4 = 12.893007; read in the other layout it is 9.239552."""
    rows: dict[Layout, Tensor] = {
        "interleaved": torch.tensor([[1.0, 2.0, 3.0, 4.0]]),
        "concatenated": torch.tensor([[1.0, 3.0, 2.0, 4.0]]),
    }
    for layout, h_RH in rows.items():
        a_RF = activate(h_RH, None, activation="swiglu", layout=layout)
        assert a_RF.sum().item() == pytest.approx(12.893007, abs=1e-5)
        assert a_RF.flatten().tolist() == pytest.approx([1.4621172, 11.4308899], abs=1e-5)
    misread = activate(rows["interleaved"], None, activation="swiglu", layout="concatenated")
    assert misread.sum().item() == pytest.approx(9.239552, abs=1e-5)


@pytest.mark.parametrize(
    ("gate", "up", "expected"), [(10.0, -9.0, -41.999720), (-10.0, 9.0, -3.24637e-6), (-3.0, 0.5, -0.0271070)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_clamped_swiglu(gate: float, up: float, expected: float, layout: Layout) -> None:
    """The gate is clamped above only; a symmetric clamp gives -3.74974e-4 for (-10, 9)."""
    h_RH = joined(torch.tensor([[gate]]), torch.tensor([[up]]), layout)
    assert activate(h_RH, None, activation="swiglu_clamped", layout=layout).item() == pytest.approx(expected, rel=1e-5)


def test_clamped_swiglu_has_no_gradient_past_its_limits() -> None:
    h_RH = torch.tensor([[8.0, 2.0, -9.0, 1.0, 9.0, -8.0]], requires_grad=True)  # g = 8, 2, -9   u = 1, 9, -8
    activate(h_RH, None, activation="swiglu_clamped", layout="concatenated").sum().backward()
    assert h_RH.grad is not None
    assert h_RH.grad[0, 0] == 0 and h_RH.grad[0, 4] == 0 and h_RH.grad[0, 5] == 0
    assert (h_RH.grad[0, 1:4] != 0).all()


def test_relu2_of_both_signs() -> None:
    h_RF = torch.tensor([[-2.0, 0.0, 3.0]], requires_grad=True)
    a_RF = activate(h_RF, torch.tensor([0.5]), activation="relu2", layout="concatenated")
    a_RF.sum().backward()
    assert a_RF.tolist() == [[0.0, 0.0, 4.5]]
    assert h_RF.grad is not None and h_RF.grad.tolist() == [[0.0, 0.0, 3.0]]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", EVERY)
def test_layout_of_memory_does_not_matter(activation: Activation, layout: Layout, dtype: torch.dtype) -> None:
    h_RH, gate_R = torch.randn(5, 36).to(dtype), torch.rand(5)
    results = []
    for h, gate in ((h_RH, gate_R), (strided(h_RH), strided(gate_R))):
        h, gate = h.detach().requires_grad_(), gate.detach().requires_grad_()
        with nan_filled_memory():
            a_RF = activate(h, gate, activation=activation, layout=layout)
            results.append([a_RF, *torch.autograd.grad(a_RF.sum(), (h, gate))])  # a stride-0 gradient
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", EVERY)
def test_a_poisoned_row_stays_alone(activation: Activation, layout: Layout) -> None:
    h_RH, gate_R = torch.randn(3, 8), torch.rand(3)
    results = []
    for h, gate in ((h_RH, gate_R), (with_nan_tail(h_RH, 2), with_nan_tail(gate_R, 2))):
        h, gate = h.requires_grad_(), gate.requires_grad_()
        a_RF = activate(h, gate, activation=activation, layout=layout)
        results.append([t[:3] for t in (a_RF, *torch.autograd.grad(a_RF.sum(), (h, gate)))])
    assert all(torch.equal(clean, poisoned) for clean, poisoned in zip(*results, strict=True))


@pytest.mark.parametrize("activation", EVERY)
def test_no_rows(activation: Activation) -> None:
    h_RH, gate_R = torch.zeros(0, 8, requires_grad=True), torch.zeros(0, requires_grad=True)
    a_RF = activate(h_RH, gate_R, activation=activation, layout="concatenated")
    assert a_RF.shape == (0, 8 if activation == "relu2" else 4) and a_RF.requires_grad
    a_RF.sum().backward()
    assert h_RH.grad is not None and h_RH.grad.shape == (0, 8)
    assert gate_R.grad is not None and gate_R.grad.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("activation", EVERY)
def test_second_derivative_is_right_or_refused(activation: Activation, dtype: torch.dtype) -> None:
    h_RH = torch.randn(3, 8, dtype=dtype, generator=torch.Generator().manual_seed(3)).requires_grad_()
    try:
        a_RF = activate(h_RH, None, activation=activation, layout="concatenated")
        (dh_RH,) = torch.autograd.grad(a_RF.square().sum(), h_RH, create_graph=True)
        (got_RH,) = torch.autograd.grad(dh_RH.square().sum(), h_RH)
    except RuntimeError:
        return
    a_RF = defined(h_RH, None, activation, "concatenated")
    (dh_RH,) = torch.autograd.grad(a_RF.square().sum(), h_RH, create_graph=True)
    (expected_RH,) = torch.autograd.grad(dh_RH.square().sum(), h_RH)
    torch.testing.assert_close(got_RH, expected_RH, rtol=1e-4, atol=1e-5)


def test_unknown_names() -> None:
    known = "swiglu, geglu, geglu_tanh, swiglu_clamped, relu2"
    with pytest.raises(ValueError, match=f"activation must be one of {known}; got 'gelu'"):
        check_activation("gelu", "concatenated")
    with pytest.raises(ValueError, match="gate_up_layout must be one of concatenated, interleaved; got 'packed'"):
        check_activation("swiglu", "packed")
    for activation in EVERY:
        for layout in LAYOUTS:
            check_activation(activation, layout)
