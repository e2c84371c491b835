"""GroupedMLP against per-expert matrices in float64: activations, layouts, gates, biases; bytes kept for backward."""

# R routed rows   D model width   F expert width   E local experts   H columns between the products (2F, or F)

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import moe_runtime as mr
from moe_runtime.functional import Activation, Layout
from moe_runtime.testing import RAGGED, assert_close_per_expert, nan_filled_memory, strided, with_nan_tail

# Against float64 without rounding in between: the worst measured is 2.1e-6 and 1.3e-2, both of the gate's gradient.
TOLERANCE = {torch.float32: 6e-6, torch.bfloat16: 4e-2}
ACTIVATIONS: tuple[Activation, ...] = ("swiglu", "geglu", "geglu_tanh", "swiglu_clamped", "relu2")
LAYOUTS: tuple[Layout, ...] = ("concatenated", "interleaved")
WIDTH, INNER, TAIL = 24, 40, 3


def mlp(**options: Any) -> mr.GroupedMLP:
    torch.manual_seed(0)
    return mr.GroupedMLP(options.pop("num_experts", 4), options.pop("width", WIDTH), INNER, **options)


def act(h_RH: Tensor, activation: Activation, layout: Layout) -> Tensor:
    if activation == "relu2":
        return h_RH.relu() ** 2
    g_RF, u_RF = (h_RH[:, ::2], h_RH[:, 1::2]) if layout == "interleaved" else h_RH.chunk(2, dim=1)
    if activation == "swiglu_clamped":
        g_RF = torch.minimum(g_RF, torch.tensor(7.0, dtype=g_RF.dtype))
        return g_RF * (1.702 * g_RF).sigmoid() * (u_RF.clamp(-7, 7) + 1)
    gelu = "tanh" if activation == "geglu_tanh" else "none"
    return (F.silu(g_RF) if activation == "swiglu" else F.gelu(g_RF, approximate=gelu)) * u_RF


def loop(module: mr.GroupedMLP, values: dict[str, Tensor], splits: Sequence[int]) -> Tensor:
    """down(gate * act(up(x))), expert by expert."""
    outputs, start = [], 0
    for e, count in enumerate(splits):
        rows = slice(start, start + count)
        h_RH = values["x"][rows] @ values["gate_up.weight"][e].T
        if "gate_up.bias" in values:
            h_RH = h_RH + values["gate_up.bias"][e]
        y_RD = act(h_RH, module.activation, module.gate_up_layout) @ values["down.weight"][e].T
        if "down.bias" in values:
            y_RD = y_RD + values["down.bias"][e]
        outputs.append(y_RD if "gate" not in values else values["gate"][rows, None] * y_RD)
        start += count
    return torch.cat(outputs)


def check(module: mr.GroupedMLP, splits: Sequence[int], gate_dtype: torch.dtype | None) -> dict[str, float]:
    """Values and gradients of everything, with poisoned tails; the worst ratio by name."""
    dtype = module.down.weight.dtype
    num_rows, ends_E = sum(splits), torch.tensor(splits).cumsum(0)
    generator = torch.Generator().manual_seed(num_rows)
    inputs = {"x": torch.randn(num_rows, WIDTH, generator=generator).to(dtype) * 2}
    if gate_dtype is not None:
        inputs["gate"] = torch.rand(num_rows, generator=generator).to(gate_dtype)
    dy_RD = torch.randn(num_rows, WIDTH, generator=generator).to(dtype)

    exact = {name: value.double() for name, value in inputs.items()}
    exact |= {name: p.detach().as_subclass(Tensor).double() for name, p in module.named_parameters()}
    exact = {name: value.requires_grad_() for name, value in exact.items()}
    y64_RD = loop(module, exact, splits)
    y64_RD.backward(dy_RD.double())

    got = {name: with_nan_tail(value, TAIL).requires_grad_() for name, value in inputs.items()}
    with nan_filled_memory():
        y_RD = module(got["x"], splits, got.get("gate"))
        y_RD.backward(with_nan_tail(dy_RD, TAIL))
    assert y_RD.dtype == dtype
    assert torch.equal(y_RD[num_rows:], torch.zeros(TAIL, WIDTH, dtype=dtype))
    bound = TOLERANCE[dtype]
    measured = {"y": assert_close_per_expert(y_RD[:num_rows], y64_RD, bound, ends=ends_E, name="y")}
    for name, leaf in {**got, **dict(module.named_parameters())}.items():
        gradient, expected = leaf.grad, exact[name].grad
        assert gradient is not None and gradient.dtype == leaf.dtype and expected is not None
        rows = ends_E if name in inputs else None
        if rows is not None:
            assert torch.equal(gradient[num_rows:], torch.zeros_like(gradient[num_rows:])), name
            gradient = gradient[:num_rows]
        measured[name] = assert_close_per_expert(gradient, expected, bound, ends=rows, name=f"d{name}")
    return measured


@pytest.mark.parametrize("gate_dtype", [None, torch.float32], ids=["no gate", "gate"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("splits", RAGGED.values(), ids=RAGGED)
def test_ragged_splits(splits: tuple[int, ...], dtype: torch.dtype, bias: bool, gate_dtype: torch.dtype | None) -> None:
    for name, worst in check(mlp(dtype=dtype, bias=bias), splits, gate_dtype).items():
        print(f"measured {dtype} {name} {worst:.2e}")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_layouts(activation: Activation, layout: Layout, dtype: torch.dtype) -> None:
    module = mlp(dtype=dtype, activation=activation, gate_up_layout=layout)
    assert module.gate_up.out_features == (INNER if activation == "relu2" else 2 * INNER)
    assert (module.down.in_features, module.down.out_features) == (INNER, WIDTH)
    for name, worst in check(module, RAGGED["middle_empty"], dtype).items():
        print(f"measured {dtype} {name} {worst:.2e}")


def test_gate_scales_the_whole_output_bias_included() -> None:
    module = mlp(bias=True)
    x_RD, gate_R = torch.randn(9, WIDTH), torch.rand(9)
    torch.testing.assert_close(module(x_RD, [3, 0, 4, 2], gate_R), gate_R[:, None] * module(x_RD, [3, 0, 4, 2]))
    assert torch.equal(module(x_RD, [3, 0, 4, 2], torch.zeros(9)), torch.zeros(9, WIDTH))


def test_weights_read_in_the_layout_that_was_said() -> None:
    """gate [1, 3] and up [2, 4] on x = 1, down of ones: 12.893007. The weights' order shows in their gradients."""
    rows: dict[Layout, list[float]] = {"interleaved": [1.0, 2.0, 3.0, 4.0], "concatenated": [1.0, 3.0, 2.0, 4.0]}
    gradients = {}
    for layout, column in rows.items():
        module = mr.GroupedMLP(1, 1, 2, gate_up_layout=layout)
        with torch.no_grad():
            module.gate_up.weight.copy_(torch.tensor(column)[None, :, None])
            module.down.weight.fill_(1.0)
        y_RD = module(torch.ones(1, 1), [1])
        y_RD.sum().backward()
        assert y_RD.item() == pytest.approx(12.893007, abs=1e-5)
        assert module.gate_up.weight.grad is not None
        gradients[layout] = module.gate_up.weight.grad.flatten()
    silu = F.silu(torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(gradients["interleaved"][1::2], silu)
    torch.testing.assert_close(gradients["concatenated"][2:], silu)
    assert torch.equal(gradients["interleaved"][[0, 2, 1, 3]], gradients["concatenated"])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_strides_and_form_of_splits_do_not_matter(dtype: torch.dtype) -> None:
    module = mlp(dtype=dtype, bias=True)
    x_RD, gate_R, results = torch.randn(9, WIDTH).to(dtype), torch.rand(9), []
    for x, gate, splits in (
        (x_RD, gate_R, [3, 0, 4, 1]),
        (strided(x_RD), strided(gate_R), torch.tensor([3, 0, 4, 1])),
        (x_RD, gate_R, torch.tensor([3, 0, 4, 1], dtype=torch.int32)),
    ):
        module.zero_grad()
        x, gate = x.detach().requires_grad_(), gate.detach().requires_grad_()
        y_RD = module(x, splits, gate)
        y_RD.sum().backward()
        results.append([y_RD.detach(), x.grad, gate.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_no_rows(bias: bool) -> None:
    module = mlp(bias=bias)
    x_RD, gate_R = torch.zeros(0, WIDTH, requires_grad=True), torch.zeros(0, requires_grad=True)
    with nan_filled_memory():
        y_RD = module(x_RD, [0, 0, 0, 0], gate_R)
        assert y_RD.shape == (0, WIDTH) and y_RD.requires_grad
        y_RD.sum().backward()
    assert x_RD.grad is not None and x_RD.grad.shape == (0, WIDTH)
    assert gate_R.grad is not None and gate_R.grad.shape == (0,)
    assert all(p.grad is not None and torch.equal(p.grad, torch.zeros_like(p)) for p in module.parameters())


def test_separate_weights_give_the_same_bits() -> None:
    packed, separate = (mlp(bias=True, single_grouped_weight=flag) for flag in (True, False))
    separate.load_state_dict(packed.state_dict())
    x_RD = torch.randn(9, WIDTH)
    assert torch.equal(packed(x_RD, [2, 3, 0, 4]), separate(x_RD, [2, 3, 0, 4]))
    assert "down.weight3" in separate.state_dict() and "down.weight" in packed.state_dict()


def test_keep_experts_of_both_products() -> None:
    module = mlp(bias=True)
    x_RD, splits = torch.randn(7, WIDTH), [0, 3, 4, 0]
    expected = module(x_RD, splits)
    module.keep_experts(1, 3)
    assert torch.equal(module(x_RD, splits[1:3]), expected)


def saved_bytes(module: mr.GroupedMLP, x_RD: Tensor, splits: Sequence[int], gate_R: Tensor | None) -> dict[int, int]:
    """Storage address -> bytes of what autograd keeps between forward and backward."""
    held: dict[int, int] = {}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)  # alive, so that no address is used twice
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x_RD, splits, gate_R)
    return held


@pytest.mark.parametrize("gated", [False, True], ids=["no gate", "gate"])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_bytes_kept_for_backward(dtype: torch.dtype, activation: Activation, gated: bool) -> None:
    """Per row x (D) and h (H) in the weights' dtype and the gate (4 bytes); nothing else that grows with R.

    bytes = s * (R * (D + H) + weights) + 4 R [with a gate] + 4 E, s bytes an element: ends are int32, H = 2F.
    relu2 keeps a (F) too, and is made of torch operations, which keep fp32 values in place of h: see `relu2_bytes`.
    """
    module = mlp(dtype=dtype, activation=activation)
    num_rows, size = 32, torch.tensor([], dtype=dtype).element_size()
    x_RD = torch.randn(num_rows, WIDTH).to(dtype).requires_grad_()
    gate_R = torch.rand(num_rows, requires_grad=True) if gated else None
    inner = module.gate_up.out_features
    weights = sum(p.numel() for p in module.parameters())
    expected = size * (num_rows * (WIDTH + inner) + weights) + 4 * num_rows * gated + 4 * 4
    if activation == "relu2":
        expected += size * num_rows * INNER + relu2_bytes(num_rows, dtype, gated)
    assert sum(saved_bytes(module, x_RD, [20, 0, 10, 2], gate_R).values()) == expected


def relu2_bytes(num_rows: int, dtype: torch.dtype, gated: bool) -> int:
    """fp32 relu(h), which relu and square both read, instead of h; with a gate the square as well."""
    return 4 * num_rows * INNER * (1 + gated) - torch.tensor([], dtype=dtype).element_size() * num_rows * INNER


def test_one_product_keeps_its_input_weight_and_ends_only() -> None:
    module, kept = mr.GroupedLinear(4, 24, 40), []
    x_RD = torch.randn(16, 24, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        module(x_RD, [3, 0, 10, 1])
    assert [tuple(tensor.shape) for tensor in kept] == [(16, 24), (4, 40, 24), (4,)]
    assert sum(t.untyped_storage().nbytes() for t in kept) == 4 * (16 * 24 + 4 * 40 * 24) + 4 * 4


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"activation must be one of swiglu, .*; got 'silu'"):
        mlp(activation="silu")
    with pytest.raises(ValueError, match="gate_up_layout must be one of concatenated, interleaved; got 'rows'"):
        mlp(gate_up_layout="rows")
    x_RD = torch.zeros(4, WIDTH)
    for shape in ((3,), (4, 1), ()):
        with pytest.raises(ValueError, match=r"gate must have shape \(4,\), one weight a row; got \("):
            mlp()(x_RD, [1, 1, 1, 1], torch.ones(shape))
    with pytest.raises(ValueError, match=rf"rows must have shape \(R, {WIDTH}\), got \(4, 5\)"):
        mlp()(torch.zeros(4, 5), [1, 1, 1, 1])
    with pytest.raises(ValueError, match=r"sum to at most the 4 rows given, got \[1, 1, 1, 5\]"):
        mlp()(x_RD, [1, 1, 1, 5])
    with pytest.raises(ValueError, match="in_features must be at least 1, got 0"):
        mr.GroupedMLP(2, 0, 8)
    with pytest.raises(TypeError, match=r"gate must be float32 or h's dtype torch\.float32, got torch\.float64"):
        mlp()(x_RD, [1, 1, 1, 1], torch.ones(4, dtype=torch.float64))


def test_first_values_are_those_of_linear_layers() -> None:
    module = mlp()
    for linear, fan_in in ((module.gate_up, WIDTH), (module.down, INNER)):
        bound = 1 / math.sqrt(fan_in)
        assert 0.9 * bound < float(linear.weight.detach().abs().max()) <= bound
