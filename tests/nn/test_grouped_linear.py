"""GroupedLinear against a loop of matrices in float64, in both weight layouts, and what it refuses."""

# R routed rows   D in features   F out features   E local experts

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_runtime as mr
from moe_runtime.testing import RAGGED, assert_close_per_expert, nan_filled_memory, strided, with_nan_tail

# Against float64: the worst measured is 1.8e-7 and 3.5e-3.
TOLERANCE = {torch.float32: 6e-7, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)
LAYOUTS = {"packed": True, "separate": False}
TAIL = 3


def layer(num_experts: int = 4, width: int = 32, out: int = 48, **options: Any) -> mr.GroupedLinear:
    torch.manual_seed(0)
    return mr.GroupedLinear(num_experts, width, out, **options)


def stacked(module: mr.GroupedLinear, name: str, gradient: bool = False) -> Tensor:
    """(E, ...) values or gradients of "weight" or "bias", whichever way they are held."""
    held = dict(module.named_parameters())
    if name in held:
        value = held[name].grad if gradient else held[name]
        assert value is not None
        return value.detach().as_subclass(Tensor)
    members = [held[f"{name}{e}"].grad if gradient else held[f"{name}{e}"] for e in range(module.num_gemms)]
    return torch.stack([member.detach() for member in members if member is not None])


def loop(x_RD: Tensor, weight_EFD: Tensor, bias_EF: Tensor | None, splits: Sequence[int]) -> Tensor:
    pieces = [
        piece @ weight_EFD[e].T + (0 if bias_EF is None else bias_EF[e])
        for e, piece in enumerate(x_RD[: sum(splits)].split(list(splits)))
    ]
    return torch.cat(pieces)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("width", [32, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", RAGGED.values(), ids=RAGGED)
def test_values_and_gradients(splits: tuple[int, ...], dtype: torch.dtype, width: int, bias: bool, layout: str) -> None:
    module = layer(width=width, bias=bias, dtype=dtype, single_grouped_weight=LAYOUTS[layout])
    num_rows, ends_E = sum(splits), torch.tensor(splits).cumsum(0)
    generator = torch.Generator().manual_seed(num_rows)
    x_RD = torch.randn(num_rows, width, generator=generator).to(dtype)
    dy_RF = torch.randn(num_rows, 48, generator=generator).to(dtype)

    exact = {name: stacked(module, name).double().requires_grad_() for name in ("weight", "bias")[: 1 + bias]}
    x64_RD = x_RD.double().requires_grad_()
    y64_RF = loop(x64_RD, exact["weight"], exact.get("bias"), splits)
    y64_RF.backward(dy_RF.double())

    x_RD = with_nan_tail(x_RD, TAIL).requires_grad_()
    with nan_filled_memory():
        y_RF = module(x_RD, splits)
        y_RF.backward(with_nan_tail(dy_RF, TAIL))
    assert y_RF.dtype == dtype and y_RF.shape == (num_rows + TAIL, 48)
    assert x_RD.grad is not None and x64_RD.grad is not None
    for tail in (y_RF[num_rows:], x_RD.grad[num_rows:]):
        assert torch.equal(tail, torch.zeros_like(tail))
    measured = {
        "y": assert_close_per_expert(y_RF[:num_rows], y64_RF, TOLERANCE[dtype], ends=ends_E, name="y"),
        "dx": assert_close_per_expert(x_RD.grad[:num_rows], x64_RD.grad, TOLERANCE[dtype], ends=ends_E, name="dx"),
    }
    for name, value in exact.items():
        assert value.grad is not None
        gradient = stacked(module, name, gradient=True)
        measured[f"d{name}"] = assert_close_per_expert(gradient, value.grad, TOLERANCE[dtype], name=f"d{name}")
        for e in range(4):
            assert splits[e] or torch.equal(gradient[e], torch.zeros_like(gradient[e]))
    for name, worst in measured.items():
        print(f"measured {dtype} {name} {worst:.2e}")


SPLITS: dict[str, Callable[[list[int]], Any]] = {
    "list": lambda rows: rows,
    "tuple": tuple,
    "int64": torch.tensor,
    "int32": lambda rows: torch.tensor(rows, dtype=torch.int32),
}


@pytest.mark.parametrize("form", SPLITS)
def test_splits_in_every_form_give_the_same_bits(form: str) -> None:
    module, x_RD = layer(bias=True), torch.randn(9, 32)
    expected = module(x_RD, [3, 0, 4, 1])
    assert torch.equal(module(x_RD, SPLITS[form]([3, 0, 4, 1])), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("width", "out"), [(4, 3), (8, 16)])
def test_all_experts_empty(width: int, out: int, layout: str) -> None:
    """A rank that got no token: an output in the graph, and gradients of full shape, zero, never None."""
    module = layer(2, width, out, bias=True, single_grouped_weight=LAYOUTS[layout])
    x_RD = torch.zeros(0, width, requires_grad=True)
    with nan_filled_memory():
        y_RF = module(x_RD, [0, 0])
        assert y_RF.shape == (0, out) and y_RF.requires_grad
        y_RF.sum().backward()
    assert x_RD.grad is not None and x_RD.grad.shape == (0, width)
    assert all(p.grad is not None and torch.equal(p.grad, torch.zeros_like(p)) for p in module.parameters())
    assert stacked(module, "weight", gradient=True).shape == (2, out, width)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_partly_empty_overwrites_and_accumulates(layout: str) -> None:
    module = layer(3, 2, 1, single_grouped_weight=LAYOUTS[layout])
    x_RD = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    dy_RF = torch.tensor([[1.0], [1.0], [2.0]])
    with nan_filled_memory():
        module(x_RD, [2, 0, 1]).backward(dy_RF)
    assert stacked(module, "weight", gradient=True)[:, 0].tolist() == [[4.0, 6.0], [0.0, 0.0], [10.0, 12.0]]
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    with nan_filled_memory():
        module(x_RD, [2, 0, 1]).backward(dy_RF)
    assert stacked(module, "weight", gradient=True)[:, 0].tolist() == [[11.0, 13.0], [7.0, 7.0], [17.0, 19.0]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_experts_without_rows_are_stepped_like_the_others(kind: str, layout: str) -> None:
    """A zero gradient is not None: w = 1 decays to 0.95; with a momentum buffer of 2, buffer 1.8 and w 0.82."""
    module = layer(3, 8, 8, single_grouped_weight=LAYOUTS[layout])
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    if kind == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    else:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for parameter in module.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 2.0)
    module(torch.zeros(0, 8), [0, 0, 0]).sum().backward()
    optimizer.step()
    torch.testing.assert_close(stacked(module, "weight"), torch.full((3, 8, 8), 0.95 if kind == "adamw" else 0.82))
    if kind == "sgd":
        buffers = [optimizer.state[p]["momentum_buffer"] for p in module.parameters()]
        assert all(torch.allclose(buffer, torch.tensor(1.8)) for buffer in buffers)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_dead_rows_equal_a_run_without_them(bias: bool) -> None:
    module, x_RD = layer(2, 8, 8, bias=bias), torch.randn(2, 8)
    results = []
    for rows in (x_RD, with_nan_tail(x_RD, 2)):
        module.zero_grad()
        rows = rows.requires_grad_()
        y_RF = module(rows, [1, 1])
        y_RF.square().sum().backward()
        assert rows.grad is not None
        gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        results.append([y_RF[:2], rows.grad[:2], *gradients])
    assert len(results[0]) == 3 + bias
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows_and_the_gradient_of_a_sum(dtype: torch.dtype, layout: str) -> None:
    module, x_RD = layer(bias=True, dtype=dtype, single_grouped_weight=LAYOUTS[layout]), torch.randn(9, 32).to(dtype)
    results = []
    for rows in (x_RD, strided(x_RD), x_RD.t().contiguous().t()):
        module.zero_grad()
        rows = rows.detach().requires_grad_()
        y_RF = module(rows, [4, 0, 3, 1])
        y_RF.sum().backward()
        results.append([y_RF.detach(), rows.grad, *(stacked(module, n, gradient=True) for n in ("weight", "bias"))])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    assert stacked(module, "bias", gradient=True)[:, 0].tolist() == [4.0, 0.0, 3.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_gradient_is_that_of_separate_experts(dtype: torch.dtype) -> None:
    """2 experts, 16 -> 32, 8 rows: weight.grad is (2, 32, 16) and equals each expert's own."""
    packed = layer(2, 16, 32, dtype=dtype)
    experts = [nn.Linear(16, 32, bias=False, dtype=dtype) for _ in range(2)]
    packed.load_state_dict({f"weight{e}": expert.weight for e, expert in enumerate(experts)})
    x_RD = torch.randn(8, 16).to(dtype)
    packed(x_RD, [5, 3]).square().sum().backward()
    for expert, piece in zip(experts, x_RD.split([5, 3]), strict=True):
        expert(piece).square().sum().backward()
    assert packed.weight.grad is not None and packed.weight.grad.shape == (2, 32, 16)
    for gradient, expert in zip(packed.weight.grad, experts, strict=True):
        assert torch.equal(gradient, expert.weight.grad)


def test_a_frozen_weight_still_gives_the_input_gradient() -> None:
    module = layer(2, 4, 4)
    module.weight.requires_grad_(False)
    x_RD = torch.randn(3, 4, requires_grad=True)
    module(x_RD, [1, 2]).backward(torch.ones(3, 4))
    assert module.weight.grad is None and x_RD.grad is not None
    torch.testing.assert_close(x_RD.grad, stacked(module, "weight").sum(1)[[0, 1, 1]])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_frozen_bias(layout: str) -> None:
    module = layer(2, 4, 4, bias=True, single_grouped_weight=LAYOUTS[layout])
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("bias" not in name)
    module(torch.randn(3, 4), [1, 2]).sum().backward()
    assert all((p.grad is None) == ("bias" in name) for name, p in module.named_parameters())


def test_gradients_of_two_microbatches_add_up() -> None:
    """Microbatches [[1, 2], [3, 4]] with dy [1, 1] and [[5, 6]] with dy [2]: [14, 18], and a bias gradient of 4."""
    module = layer(1, 2, 1, bias=True)
    module(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [2]).backward(torch.ones(2, 1))
    module(torch.tensor([[5.0, 6.0]]), [1]).backward(torch.full((1, 1), 2.0))
    assert stacked(module, "weight", gradient=True).tolist() == [[[14.0, 18.0]]]
    assert stacked(module, "bias", gradient=True).tolist() == [[4.0]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_and_their_first_values(layout: str) -> None:
    module = layer(3, 16, 8, bias=True, single_grouped_weight=LAYOUTS[layout])
    if layout == "packed":
        expected = {"weight": (3, 8, 16), "bias": (3, 8)}
        assert type(module.weight) is mr.GroupedTensor
    else:
        expected = {f"weight{e}": (8, 16) for e in range(3)} | {f"bias{e}": (8,) for e in range(3)}
        storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
        assert len(storages) == 6, "separate parameters have storages of their own"
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == expected
    bound = 1 / math.sqrt(16)
    for name in ("weight", "bias"):
        values = stacked(module, name)
        assert values.abs().max() <= bound and values.abs().max() > 0.8 * bound
        assert not torch.equal(values[0], values[1])


def test_both_layouts_start_from_the_same_values() -> None:
    packed, separate = (layer(3, 16, 8, single_grouped_weight=flag) for flag in (True, False))
    assert torch.equal(stacked(packed, "weight"), stacked(separate, "weight"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_values_on_meta_then_real(layout: str) -> None:
    module = layer(3, 16, 8, bias=True, device="meta", single_grouped_weight=LAYOUTS[layout])
    assert all(p.is_meta for p in module.parameters())
    with nan_filled_memory():
        module.to_empty(device="cpu")
        module.reset_parameters()
    assert all(p.isfinite().all() and p.count_nonzero() for p in module.parameters())
    assert module(torch.ones(3, 16), [1, 1, 1]).isfinite().all()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("num_experts", [3, 12])
def test_layouts_load_each_other(num_experts: int, to: str, assign: bool) -> None:
    """With 12 experts, an order of names as text would put expert 10 second."""
    source = layer(num_experts, 8, 8, bias=True, single_grouped_weight=not LAYOUTS[to])
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            ids = torch.arange(num_experts).view(-1, *[1] * (parameter.dim() - 1))
            e = name.removeprefix("weight").removeprefix("bias")
            parameter.copy_(torch.full_like(parameter, float(e)) if e else ids.expand_as(parameter))
    target = layer(num_experts, 8, 8, bias=True, single_grouped_weight=LAYOUTS[to])
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.fill_(float("nan"))
    held = source.state_dict()
    names = list(held)
    assert str(target.load_state_dict(held, assign=assign)) == "<All keys matched successfully>"
    assert list(held) == names, "the caller's state dict is left alone"
    for name in ("weight", "bias"):
        assert stacked(target, name).flatten(1).mean(1).tolist() == list(range(num_experts))
    assert all(p.requires_grad and p.is_leaf for p in target.parameters())
    if LAYOUTS[to]:
        assert type(target.weight) is mr.GroupedTensor


def test_layouts_load_each_other_inside_a_model() -> None:
    source = nn.ModuleDict({"a": layer(3, 8, 8), "b": layer(3, 8, 8, bias=True)})
    target = nn.ModuleDict(
        {"a": layer(3, 8, 8, single_grouped_weight=False), "b": layer(3, 8, 8, bias=True, single_grouped_weight=False)}
    )
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.fill_(float("nan"))
    target.load_state_dict(source.state_dict())
    x_RD = torch.randn(5, 8)
    for name in "ab":
        assert torch.equal(target[name](x_RD, [2, 0, 3]), source[name](x_RD, [2, 0, 3]))
    source.load_state_dict(target.state_dict())


def test_assigned_members_keep_storages_of_their_own() -> None:
    """Parameters in one storage cannot be resized or saved apart."""
    target = layer(3, 8, 8, single_grouped_weight=False)
    target.load_state_dict(layer(3, 8, 8).state_dict(), assign=True)
    assert len({p.untyped_storage().data_ptr() for p in target.parameters()}) == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_dicts_that_do_not_fit(layout: str) -> None:
    target = layer(3, 8, 8, single_grouped_weight=LAYOUTS[layout])
    value = torch.zeros(8, 8)
    with pytest.raises(RuntimeError, match="weight"):
        target.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"weight"):
        target.load_state_dict({"weight0": value, "weight2": value})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "weight3"'):
        target.load_state_dict({f"weight{e}": value for e in range(4)})
    with pytest.raises((RuntimeError, ValueError), match=r"size mismatch for weight|weight must hold 3 experts, got 2"):
        target.load_state_dict({"weight": torch.zeros(2, 8, 8)})
    with pytest.raises((RuntimeError, ValueError), match=r"weight"):
        target.load_state_dict({**target.state_dict(), "other": value, "weight7": value})


def test_attached_weights_become_packed() -> None:
    module = layer(3, 8, 8)
    for attach in (
        lambda p: setattr(module, "weight", p),
        lambda p: module.register_parameter("weight", p),
    ):
        attach(nn.Parameter(torch.full((3, 8, 8), 2.0)))
        assert type(module.weight) is mr.GroupedTensor and isinstance(module.weight, nn.Parameter)
        assert module(torch.ones(1, 8), [0, 1, 0]).unique().tolist() == [16.0]
    attach(nn.Parameter(torch.zeros(3, 8, 8), requires_grad=False))
    assert not module.weight.requires_grad


@pytest.mark.parametrize(
    "make", [nn.Parameter, lambda t: nn.Parameter(mr.GroupedTensor.pack(t))], ids=["plain", "packed"]
)
def test_attached_weights_of_a_wrong_shape(make: Callable[[Tensor], nn.Parameter]) -> None:
    with pytest.raises(ValueError, match=r"weight must have shape \(3, 8, 4\), \(experts, out, in\); got \(3, 4, 8\)"):
        layer(3, 4, 8).weight = make(torch.zeros(3, 4, 8))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_keep_experts(device: str, layout: str) -> None:
    module = layer(4, 8, 6, bias=True, device=device, single_grouped_weight=LAYOUTS[layout])
    kept = None if device == "meta" else {name: stacked(module, name)[1:3].clone() for name in ("weight", "bias")}
    module.keep_experts(1, 3)
    assert module.num_gemms == 2 and stacked(module, "weight").shape == (2, 6, 8)
    assert stacked(module, "bias").shape == (2, 6) and len(list(module.parameters())) == (
        2 if layout == "packed" else 4
    )
    if kept is not None:
        assert all(torch.equal(stacked(module, name), value) for name, value in kept.items())
        assert all(p.untyped_storage().nbytes() == p.numel() * 4 for p in module.parameters()), "the rest is freed"
        assert module(torch.ones(2, 8), [1, 1]).requires_grad


def test_keep_experts_out_of_range() -> None:
    for start, stop in ((0, 5), (2, 2), (-1, 2)):
        with pytest.raises(ValueError, match=rf"expected 0 <= start < stop <= 4 experts, got {start} and {stop}"):
            layer(4).keep_experts(start, stop)


@pytest.mark.parametrize("name", ["num_gemms", "in_features", "out_features"])
def test_sizes_below_one(name: str) -> None:
    sizes = {"num_gemms": 2, "in_features": 4, "out_features": 4} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        mr.GroupedLinear(**sizes)


@pytest.mark.parametrize("shape", [(3, 31), (32,), (1, 3, 32)], ids=str)
def test_rows_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"rows must have shape \(R, 32\), got \("):
        layer()(torch.zeros(shape), [0, 0, 0, 0])


def test_wrong_splits_and_dtypes() -> None:
    module, x_RD = layer(), torch.zeros(4, 32)
    with pytest.raises(ValueError, match=r"splits must have shape \(4,\), rows per expert; got \(3,\)"):
        module(x_RD, [1, 1, 1])
    with pytest.raises(ValueError, match=r"sum to at most the 4 rows given, got \[1, 1, 1, 2\]"):
        module(x_RD, [1, 1, 1, 2])
    with pytest.raises(TypeError, match=r"splits must hold integers, got torch\.float32"):
        module(x_RD, torch.ones(4))
    with pytest.raises(ValueError, match=r"one dtype, got torch\.bfloat16 and torch\.float32"):
        module(x_RD.bfloat16(), [1, 1, 1, 1])


def test_representation_names_the_sizes() -> None:
    assert repr(layer(bias=True)) == (
        "GroupedLinear(num_gemms=4, in_features=32, out_features=48, bias=True, single_grouped_weight=True)"
    )
