"""One gradient norm: torch's own on plain models, the same for both weight layouts, exact where numbers are known."""

# E experts   F out features   D in features

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_runtime as mr
from moe_runtime.optim import clip_grad_norm_

# Relative difference to torch's norm and to the gradients it clips, both fp32: the worst measured is 3.0e-7.
TOLERANCE = 9e-7
NAN, INF = float("nan"), float("inf")


class Holder(nn.Module):
    """Parameters with given gradients."""

    def __init__(self, gradients: Sequence[Tensor | None], like: Tensor | None = None) -> None:
        super().__init__()
        for index, gradient in enumerate(gradients):
            parameter = nn.Parameter(torch.zeros_like(like if gradient is None else gradient))
            parameter.grad = None if gradient is None else gradient.clone()
            self.register_parameter(f"p{index}", parameter)

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.parameters()]


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleList(
        [nn.Linear(7, 33), nn.LayerNorm(33), nn.Linear(33, 65, bias=False), nn.Embedding(5, 3), nn.Conv2d(3, 4, 3)]
    )
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def test_equals_torch_on_a_plain_model() -> None:
    for max_norm in (0.1, 3.0, 1e6):
        ours, theirs = plain_model(), plain_model()
        norm = clip_grad_norm_(ours, max_norm)
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        assert norm.dtype == torch.float64 and norm.shape == ()
        worst = [abs(float(norm) / float(expected) - 1)]
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            worst.append(float((a.grad - b.grad).norm() / b.grad.norm()))
        print(f"measured {worst[0]:.2e} {max(worst[1:]):.2e}")
        assert max(worst) <= TOLERANCE


def test_sum_of_squares_over_parameters() -> None:
    """Square sums 20 and 100: 10.954451, and a factor of .0912871 for a bound of 1."""
    holder = Holder([torch.full((1, 5), 2.0), torch.full((4,), 5.0)])
    assert clip_grad_norm_(holder, 1.0).item() == pytest.approx(10.954451, abs=1e-6)
    first, second = holder.gradients()
    assert first is not None and second is not None
    assert first[0].tolist() == pytest.approx([2 * 0.0912871] * 5, abs=1e-6)
    assert second.tolist() == pytest.approx([5 * 0.0912871] * 4, abs=1e-6)


def test_a_norm_below_the_bound_leaves_every_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        gradient = torch.randn(3, 17).to(dtype)
        holder = Holder([gradient])
        clip_grad_norm_(holder, 1e4)
        assert torch.equal(holder.gradients()[0], gradient)


def test_an_infinite_bound_measures_only() -> None:
    holder = Holder([torch.tensor([3.0, 4.0])])
    assert clip_grad_norm_(holder, INF).item() == 5.0
    assert holder.gradients()[0].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_norm_that_is_not_finite_is_returned_and_scales_nothing(bad: float) -> None:
    gradients = [torch.tensor([[1.0, bad, 3.0]]), torch.full((2, 2), 5.0)]
    for max_norm in (1.0, INF):
        holder = Holder(gradients)
        norm = clip_grad_norm_(holder, max_norm)
        assert (norm.isnan() if math.isnan(bad) else norm == INF).item()
        for got, expected in zip(holder.gradients(), gradients, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_parameters_without_gradient_count_as_zero() -> None:
    holder = Holder([torch.tensor([3.0, 4.0]), None, None], like=torch.zeros(3))
    assert clip_grad_norm_(holder, 1.0).item() == 5.0
    assert holder.gradients()[1] is None
    assert clip_grad_norm_(Holder([None], like=torch.zeros(3)), 1.0).item() == 0.0
    assert clip_grad_norm_(nn.Module(), 1.0).item() == 0.0


def test_zero_gradients_stay_zero() -> None:
    holder = Holder([torch.zeros(3)])
    assert clip_grad_norm_(holder, 1.0).item() == 0.0
    assert holder.gradients()[0].tolist() == [0.0, 0.0, 0.0]


def test_frozen_parameters_take_no_part() -> None:
    holder = Holder([torch.tensor([3.0, 4.0]), torch.tensor([100.0])])
    holder.p1.requires_grad_(False)
    assert clip_grad_norm_(holder, 2.5).item() == 5.0
    assert holder.gradients()[1].tolist() == [100.0]


SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "vector": (7,),
    "empty": (0, 3),
    "four dims": (2, 3, 4, 5),
    "one element": (1, 1, 1),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_parameter(shape: str) -> None:
    gradient = torch.full(SHAPES[shape], 2.0)
    holder = Holder([gradient, torch.tensor([1.0])])
    assert clip_grad_norm_(holder, 1e6).item() == pytest.approx(math.sqrt(4 * gradient.numel() + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_dtype_of_gradient(dtype: torch.dtype) -> None:
    gradient = torch.tensor([[3.0, 0.0], [0.0, 4.0]]).to(dtype)
    holder = Holder([gradient])
    assert clip_grad_norm_(holder, 2.5).item() == 5.0
    torch.testing.assert_close(
        holder.gradients()[0], gradient / 2, rtol=1e-6, atol=0
    )  # torch adds 1e-6 to the norm too


def test_dtypes_side_by_side() -> None:
    holder = Holder([torch.tensor([3.0]), torch.tensor([4.0]).bfloat16()])
    assert clip_grad_norm_(holder, 2.5).item() == 5.0
    assert [g.dtype for g in holder.gradients() if g is not None] == [torch.float32, torch.bfloat16]
    assert [float(g) for g in holder.gradients() if g is not None] == pytest.approx([1.5, 2.0], rel=1e-2)


def test_a_million_small_squares_are_not_lost() -> None:
    """A chain of fp32 additions would lose 2e-5 of them."""
    gradient = torch.full((1000, 1000), 1e-3)
    norm = clip_grad_norm_(Holder([gradient]), INF)
    assert norm.item() == pytest.approx(1000 * float(gradient[0, 0]), rel=1e-7)


def test_gradients_that_are_not_contiguous() -> None:
    gradient = torch.randn(6, 4, 5)
    holder = Holder([gradient])
    holder.p0.grad = gradient.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    norm = clip_grad_norm_(holder, 0.5)
    assert norm.item() == pytest.approx(float(gradient.double().norm()), rel=1e-6)
    assert holder.p0.grad is not None and holder.p0.grad.norm().item() == pytest.approx(0.5, rel=1e-5)


def test_a_shared_parameter_counts_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 1, bias=False)
            self.second = nn.Linear(2, 1, bias=False)
            self.second.weight = self.first.weight

    tied = Tied()
    tied.first.weight.grad = torch.tensor([[3.0, 4.0]])
    assert clip_grad_norm_(tied, INF).item() == 5.0


def experts(packed: bool, num_experts: int = 12, **options: Any) -> mr.GroupedMLP:
    torch.manual_seed(0)
    return mr.GroupedMLP(num_experts, 9, 7, single_grouped_weight=packed, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_norm", [1e-3, INF])
def test_both_layouts_give_the_same_bits(max_norm: float, dtype: torch.dtype) -> None:
    """Gradients of sizes far apart, so that another order of adding them would show."""
    packed, separate = experts(True, bias=True, dtype=dtype), experts(False, bias=True, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in packed.named_parameters():
        scale = 10.0 ** torch.linspace(-3, 3, 12).view(-1, *[1] * (parameter.dim() - 1))
        gradient = (torch.randn(parameter.shape, generator=generator) * scale).to(dtype)
        parameter.grad = gradient
        for e in range(12):
            separate.get_parameter(f"{name}{e}").grad = gradient[e].clone()
    norms = [clip_grad_norm_(model, max_norm) for model in (packed, separate)]
    assert torch.equal(*norms)
    exact = sum(float(p.grad.double().square().sum()) for p in packed.parameters() if p.grad is not None)
    if max_norm == INF:
        assert norms[0].item() == pytest.approx(math.sqrt(exact), rel=1e-6)
    for name, parameter in packed.named_parameters():
        assert parameter.grad is not None
        for e in range(12):
            assert torch.equal(parameter.grad[e], separate.get_parameter(f"{name}{e}").grad)


def test_experts_without_gradient_in_either_layout() -> None:
    packed, separate = experts(True, 3), experts(False, 3)
    packed.down.weight.grad = torch.ones(3, 9, 7)
    packed.down.weight.grad[1] = 0.0
    for e in (0, 2):
        separate.get_parameter(f"down.weight{e}").grad = torch.ones(9, 7)
    assert torch.equal(clip_grad_norm_(packed, 1.0), clip_grad_norm_(separate, 1.0))
    assert packed.gate_up.weight.grad is None and separate.get_parameter("down.weight1").grad is None


def test_the_same_norm_wherever_the_experts_stand_in_a_model() -> None:
    alone = experts(True)
    for parameter in alone.parameters():
        parameter.grad = torch.randn_like(parameter.detach().plain())
    inside = nn.ModuleDict({"layers": nn.ModuleList([copy.deepcopy(alone)])})
    assert torch.equal(clip_grad_norm_(alone, INF), clip_grad_norm_(inside, INF))


@pytest.mark.parametrize("max_norm", [0.0, -1.0, NAN])
def test_bounds_that_are_not_positive(max_norm: float) -> None:
    holder = Holder([torch.ones(2)])
    with pytest.raises(ValueError, match=f"max_norm must be positive, got {max_norm}"):
        clip_grad_norm_(holder, max_norm)
    assert holder.gradients()[0].tolist() == [1.0, 1.0]


def test_a_gradient_in_main_grad_is_refused_by_name() -> None:
    layer = mr.GroupedLinear(2, 4, 4, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(2, 4, 4)  # pyright: ignore[reportAttributeAccessIssue]
    layer(torch.ones(3, 4), [1, 2]).sum().backward()
    with pytest.raises(RuntimeError, match="the gradient of weight is in main_grad"):
        clip_grad_norm_(layer, 1.0)
