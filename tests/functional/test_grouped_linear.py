"""Three GEMMs against a loop over experts in float64: values and gradients, hostile splits, tails, strides."""

# R routed rows   D in features   F out features   E local experts

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moe_runtime.functional import add_expert_bias, grouped_linear
from moe_runtime.testing import RAGGED, assert_close_per_expert, nan_filled_memory, strided, with_nan_tail

# Against float64: the worst measured is 1.3e-6 (dx, in a block of one column) and 6.5e-3 (the gradient of the gate).
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2}
# K = 33 and F = 50 fill no whole 16 bytes, so that the loop over experts runs instead of torch's product.
SIZES = [(32, 48), (33, 50)]
TAIL = 3


def ends_of(splits: Sequence[int]) -> Tensor:
    return torch.tensor(splits).cumsum(0).to(torch.int32)


def loop(x_RD: Tensor, w_EFD: Tensor, splits: Sequence[int], bias_EF: Tensor | None, gate_R: Tensor | None) -> Tensor:
    """The layer as a plain autograd loop; rows that no expert owns are 0."""
    pieces, start = [], 0
    for e, count in enumerate(splits):
        rows = slice(start, start + count)
        y = x_RD[rows] @ w_EFD[e].T
        if bias_EF is not None:
            y = y + (bias_EF[e] if gate_R is None else gate_R[rows, None] * bias_EF[e])
        pieces.append(y)
        start += count
    return torch.cat([*pieces, x_RD.new_zeros(len(x_RD) - start, w_EFD.shape[1])])


def layer(x_RD: Tensor, w_EFD: Tensor, splits: Sequence[int], bias_EF: Tensor | None, gate_R: Tensor | None) -> Tensor:
    ends_E = ends_of(splits)
    y_RF = grouped_linear(x_RD, w_EFD, ends_E)
    return y_RF if bias_EF is None else add_expert_bias(y_RF, bias_EF, ends_E, gate_R)


@pytest.mark.parametrize("with_bias", ["plain", "bias", "gated bias"])
@pytest.mark.parametrize(("width", "out"), SIZES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("splits", RAGGED.values(), ids=RAGGED)
def test_values_and_gradients(
    splits: tuple[int, ...], dtype: torch.dtype, width: int, out: int, with_bias: str
) -> None:
    generator = torch.Generator().manual_seed(sum(splits) + width)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_rows = sum(splits)
    inputs = {"x": random(num_rows, width), "w": random(4, out, width)}
    if with_bias != "plain":
        inputs["bias"] = random(4, out)
    if with_bias == "gated bias":
        inputs["gate"] = random(num_rows)
    dy_RF = random(num_rows, out)

    exact = {name: value.double().requires_grad_() for name, value in inputs.items()}
    y64_RF = loop(exact["x"], exact["w"], splits, exact.get("bias"), exact.get("gate"))
    y64_RF.backward(dy_RF.double())

    got = {
        name: (with_nan_tail(value, TAIL) if name in ("x", "gate") else value.clone()).requires_grad_()
        for name, value in inputs.items()
    }
    with nan_filled_memory():
        y_RF = layer(got["x"], got["w"], splits, got.get("bias"), got.get("gate"))
        y_RF.backward(with_nan_tail(dy_RF, TAIL))

    assert y_RF.dtype == dtype
    assert torch.equal(y_RF[num_rows:], torch.zeros(TAIL, out, dtype=dtype))
    ends_E = ends_of(splits)
    worst = assert_close_per_expert(y_RF[:num_rows], y64_RF, TOLERANCE[dtype], ends=ends_E, name="y")
    print(f"measured {dtype} y {worst:.2e}")
    for name, leaf in got.items():
        gradient, expected = leaf.grad, exact[name].grad
        assert gradient is not None and gradient.dtype == dtype and expected is not None
        rows = ends_E if name in ("x", "gate") else None
        if rows is not None:
            assert torch.equal(gradient[num_rows:], torch.zeros_like(gradient[num_rows:])), name
            gradient = gradient[:num_rows]
        worst = assert_close_per_expert(gradient, expected, TOLERANCE[dtype], ends=rows, name=f"d{name}")
        print(f"measured {dtype} d{name} {worst:.2e}")


def test_empty_expert_gets_exact_zeros_and_the_others_their_sums() -> None:
    """splits [2, 0, 1], dy [1, 1, 2]: dw = [[4, 6], [0, 0], [10, 12]]."""
    x_RD = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    w_EFD = torch.ones(3, 1, 2, requires_grad=True)
    with nan_filled_memory():
        grouped_linear(x_RD, w_EFD, ends_of([2, 0, 1])).backward(torch.tensor([[1.0], [1.0], [2.0]]))
    assert w_EFD.grad is not None and w_EFD.grad[:, 0].tolist() == [[4.0, 6.0], [0.0, 0.0], [10.0, 12.0]]


def test_gradients_accumulate() -> None:
    x_RD = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    w_EFD = torch.ones(3, 1, 2, requires_grad=True)
    w_EFD.grad = torch.full((3, 1, 2), 7.0)
    grouped_linear(x_RD, w_EFD, ends_of([2, 0, 1])).backward(torch.tensor([[1.0], [1.0], [2.0]]))
    assert w_EFD.grad[:, 0].tolist() == [[11.0, 13.0], [7.0, 7.0], [17.0, 19.0]]


@pytest.mark.parametrize(("width", "out"), [(4, 3), (8, 8), (33, 16)])
@pytest.mark.parametrize("splits", [[0, 0], [0, 1]], ids=str)
def test_no_rows_keep_the_graph(splits: list[int], width: int, out: int) -> None:
    num_rows = sum(splits)
    x_RD, w_EFD = torch.ones(num_rows, width, requires_grad=True), torch.ones(2, out, width, requires_grad=True)
    bias_EF = torch.ones(2, out, requires_grad=True)
    y_RF = layer(x_RD, w_EFD, splits, bias_EF, None)
    assert y_RF.shape == (num_rows, out) and y_RF.requires_grad
    y_RF.sum().backward()
    assert x_RD.grad is not None and x_RD.grad.shape == (num_rows, width)
    assert w_EFD.grad is not None and w_EFD.grad.sum((1, 2)).tolist() == [0.0, float(width * out * num_rows)]
    assert bias_EF.grad is not None and bias_EF.grad.tolist() == [[0.0] * out, [float(num_rows)] * out]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [32, 33])
def test_strides_do_not_matter(width: int, dtype: torch.dtype) -> None:
    """Spaced columns, a transposed weight, an odd address, and the stride-0 gradient of a sum: the same bits."""
    x_RD, w_EFD = torch.randn(9, width).to(dtype), torch.randn(3, 16, width).to(dtype)
    odd_RD = torch.cat([x_RD.new_zeros(1), x_RD.flatten()])[1:].view(9, width)
    transposed_EFD = w_EFD.transpose(1, 2).contiguous().transpose(1, 2)
    assert odd_RD.data_ptr() % 16 and not transposed_EFD.is_contiguous()

    def gradients(x: Tensor, w: Tensor) -> list[Tensor]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = grouped_linear(x, w, ends_of([4, 0, 3]))
        return [y.detach(), *torch.autograd.grad(y.sum(), (x, w))]

    first = gradients(x_RD, w_EFD)
    for x, w in ((strided(x_RD), w_EFD), (odd_RD, w_EFD), (x_RD, transposed_EFD), (x_RD, strided(w_EFD))):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(x, w), strict=True))


@pytest.mark.parametrize("wanted", ["x", "w"])
def test_only_what_is_asked_for_is_computed(wanted: str) -> None:
    x_RD, w_EFD = torch.randn(3, 8), torch.randn(2, 4, 8)
    (x_RD if wanted == "x" else w_EFD).requires_grad_()
    grouped_linear(x_RD, w_EFD, ends_of([2, 1])).sum().backward()
    assert (x_RD.grad is None) == (wanted == "w") and (w_EFD.grad is None) == (wanted == "x")
    if wanted == "x":
        owner = [0, 0, 1]
        assert x_RD.grad is not None and torch.allclose(x_RD.grad, w_EFD.sum(1)[owner])


def test_second_derivative() -> None:
    generator = torch.Generator().manual_seed(0)
    x_RD, w_EFD = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((5, 3), (3, 2, 3)))

    def second(exact: bool) -> tuple[Tensor, ...]:
        x, w = x_RD.clone().requires_grad_(), w_EFD.clone().requires_grad_()
        y = loop(x, w, [2, 0, 2], None, None) if exact else grouped_linear(x, w, ends_of([2, 0, 2]))
        first = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
        return torch.autograd.grad(sum(d.square().sum() for d in first), (x, w))

    for got, expected in zip(second(False), second(True), strict=True):
        torch.testing.assert_close(got, expected)


def test_float64_matches_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((5, 3), (3, 2, 3), (3, 2), (5,))
    ]
    assert torch.autograd.gradcheck(lambda x, w, b, g: layer(x, w, [2, 0, 2], b, g), inputs)
