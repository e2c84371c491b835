"""Adapters of grouped layers against plain autograd over the dequantized weights, expert by expert."""

# R rows   D in features   F out features   r rank   E experts   T tokens   K top-k

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_runtime as mr
from moe_runtime.nn.adapters import adapted_linears, grouped_linears
from moe_runtime.tensor import QuantizedTensor
from moe_runtime.testing import RAGGED, assert_close_per_expert, nan_filled_memory, with_nan_tail

EXPERTS, D, F, TOKENS = 4, 32, 64, 21
TAIL = 3
BASES: dict[str, Any] = {
    "float32": None,
    "mxfp8": mr.recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "nvfp4": mr.recipes.NVFP4BlockScaling(backward_override="dequantized"),
    "fp8_block": mr.recipes.Float8BlockScaling(backward_override="dequantized"),
}


def layer(base: str = "float32", *, omit: bool = True, **options: Any) -> mr.GroupedLinear:
    torch.manual_seed(1)
    sizes = (256, 128) if base == "fp8_block" else (D, F)
    if BASES[base] is None:
        return mr.GroupedLinear(EXPERTS, *sizes, **options)
    with mr.quantized_model_init(recipe=BASES[base], omit_columnwise_primary_weight_storage=omit):
        return mr.GroupedLinear(EXPERTS, *sizes, **options)


def adapt(linear: mr.GroupedLinear, rank: int = 3, shared: Any = None, **options: Any) -> mr.GroupedLoRA:
    """An adapter whose B is not 0, so that A learns too."""
    lora = mr.GroupedLoRA(linear, mr.LoRAConfig(rank, 5.0, **options), shared=shared)
    lora.initialize("layer.lora")
    torch.manual_seed(2)
    with torch.no_grad():
        lora.b.weight.uniform_(-0.3, 0.3)
    return lora


def plain(linear: mr.GroupedLinear, x_RD: Tensor, counts: tuple[int, ...], dy_RF: Tensor) -> tuple[Tensor, ...]:
    """y, dx, dA and dB of one matrix after the other, in float64, with the update made as a matrix."""
    lora = linear.lora
    assert isinstance(lora, mr.GroupedLoRA)
    w_EFD = torch.stack([_values(w) for w in linear.wgrad_parameters("weight")]).reshape(EXPERTS, -1, x_RD.shape[1])
    x, a, b = (value.detach().double().requires_grad_() for value in (x_RD, lora.a.weight, lora.b.weight))
    parts, start = [], 0
    for e, count in enumerate(counts):
        a_rD, b_Fr = a[min(e, len(a) - 1)], b[min(e, len(b) - 1)]
        w_FD = w_EFD[e] + lora.config.scale * (b_Fr @ a_rD)
        y_RF = x[start : start + count] @ w_FD.T
        parts.append(y_RF + linear.bias[e].double() if linear.use_bias else y_RF)
        start += count
    y_RF = torch.cat(parts)
    return y_RF, *torch.autograd.grad(y_RF, (x, a, b), dy_RF.double())


def _values(w: Tensor) -> Tensor:
    return (w.dequantize() if isinstance(w, QuantizedTensor) else w).detach().double()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("counts", RAGGED.values(), ids=RAGGED)
def test_gradients_are_those_of_plain_autograd(base: str, counts: tuple[int, ...]) -> None:
    linear = layer(base, bias=True)
    lora = adapt(linear)
    width = linear.in_features
    x_RD = with_nan_tail(torch.randn(sum(counts), width), TAIL).requires_grad_()
    dy_RF = torch.randn(sum(counts), linear.out_features)
    with nan_filled_memory():
        y_RF = linear(x_RD, list(counts))
        y_RF.backward(torch.cat([dy_RF, torch.zeros(TAIL, dy_RF.shape[1])]))
    expected = plain(linear, x_RD.detach()[: sum(counts)], counts, dy_RF)
    assert x_RD.grad is not None and linear.bias.grad is None
    got = (y_RF[: sum(counts)], x_RD.grad[: sum(counts)], lora.a.weight.grad, lora.b.weight.grad)
    for name, value, true in zip(("y", "dx", "dA", "dB"), got, expected, strict=True):
        assert value is not None
        assert_close_per_expert(value, true, 1e-5, name=name)
    assert not y_RF[sum(counts) :].any() and not x_RD.grad[sum(counts) :].any()
    for e, count in enumerate(counts):
        if not count:
            assert not lora.a.weight.grad[e].any() and not lora.b.weight.grad[e].any()
    assert all(w.grad is None for w in linear.wgrad_parameters("weight"))


@pytest.mark.parametrize("shared", ["a", "b"])
@pytest.mark.parametrize("counts", RAGGED.values(), ids=RAGGED)
def test_a_shared_factor_learns_from_all_experts(shared: str, counts: tuple[int, ...]) -> None:
    linear = layer()
    lora = adapt(linear, shared=shared)
    assert len(lora.get_submodule(shared).weight) == 1
    x_RD = with_nan_tail(torch.randn(sum(counts), D), TAIL).requires_grad_()
    dy_RF = torch.randn(sum(counts), F)
    linear(x_RD, list(counts)).backward(torch.cat([dy_RF, torch.zeros(TAIL, F)]))
    _, dx, da, db = plain(linear, x_RD.detach()[: sum(counts)], counts, dy_RF)
    for name, value, true in (
        ("dx", x_RD.grad[: sum(counts)], dx),
        ("dA", lora.a.weight.grad, da),
        ("dB", lora.b.weight.grad, db),
    ):
        assert_close_per_expert(value, true, 1e-5, name=name)


@pytest.mark.parametrize("rank", [1, 2, 5, 16, 32])
def test_any_rank_up_to_the_smaller_side(rank: int) -> None:
    linear = layer()
    lora = adapt(linear, rank)
    x_RD, dy_RF = torch.randn(16, D), torch.randn(16, F)
    y_RF = linear(x_RD, [4, 4, 4, 4])
    y_RF.backward(dy_RF)
    y, _, da, db = plain(linear, x_RD, (4, 4, 4, 4), dy_RF)
    for name, value, true in (("y", y_RF, y), ("dA", lora.a.weight.grad, da), ("dB", lora.b.weight.grad, db)):
        assert value is not None
        assert_close_per_expert(value, true, 1e-5, name=name)
    for bad, message in ((0, "rank must be at least 1, got 0"), (33, r"at most min\(in, out\) = 32")):
        with pytest.raises(ValueError, match=message):
            mr.GroupedLoRA(layer(), mr.LoRAConfig(bad, 1.0))


def test_scales() -> None:
    assert mr.LoRAConfig(8, 16).scale == 2
    assert mr.LoRAConfig(16, 8, use_rslora=True).scale == 8 / math.sqrt(16)
    for options, message in (
        ({"alpha": 0}, "alpha must be positive, got 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"target_modules": "down"}, "in a tuple; got 'down'"),
    ):
        with pytest.raises(ValueError, match=message):
            mr.LoRAConfig(**{"rank": 2, "alpha": 1.0, **options})


def test_dropout_is_of_the_updates_inputs_and_of_training_alone() -> None:
    linear = layer()
    adapt(linear, dropout=0.5)
    x_RD = torch.ones(16, D)
    still = copy.deepcopy(linear).eval()
    assert torch.equal(still(x_RD, [4] * 4), still(x_RD, [4] * 4))
    lora = linear.lora
    assert isinstance(lora, mr.GroupedLoRA)
    with torch.no_grad():
        linear.weight.zero_()
        # Each output counts what dropout left of the first input: 0, or 1 / (1 - p).
        lora.a.weight.zero_()[:, 0, 0] = 1
        lora.b.weight.zero_()[:, :, 0] = 1 / lora.config.scale
    torch.manual_seed(0)
    values = linear(x_RD, [4] * 4)[:, 0]
    assert set(values.round(decimals=4).tolist()) == {0.0, 2.0}


class Block(nn.Module):
    """A router and experts, as a model holds them."""

    def __init__(self, delayed: bool, omit: bool = True, recipe: Any = BASES["mxfp8"]) -> None:
        super().__init__()
        torch.manual_seed(4)
        router = mr.RouterConfig(num_experts=EXPERTS, hidden_size=D, top_k=2, norm_topk_prob=True)
        config = mr.RoutedExpertsConfig(
            num_experts=EXPERTS, hidden_size=D, intermediate_size=F, delay_wgrad_compute=delayed
        )
        self.router = mr.Router(router)
        with mr.quantized_model_init(recipe=recipe, omit_columnwise_primary_weight_storage=omit):
            self.experts = mr.RoutedExperts(config)

    def forward(self, x_TD: Tensor) -> Tensor:
        _, gates_TK, ids_TK = self.router(x_TD)
        return x_TD + self.experts(x_TD, ids_TK, gates_TK)


def gradients(block: Block, coordinator: mr.WgradCoordinator | None = None, recipe: Any = None) -> dict[str, Tensor]:
    """Of two microbatches."""
    torch.manual_seed(5)
    for _ in range(2):
        with mr.autocast(enabled=recipe is not None, recipe=recipe):
            loss = block(torch.randn(TOKENS, D)).square().mean()
        loss.backward()
    if coordinator is not None:
        coordinator.flush()
    return {name: p.grad for name, p in block.named_parameters() if p.grad is not None}


def adapted(delayed: bool = False, **options: Any) -> Block:
    block = Block(delayed, **options)
    mr.add_lora(block, mr.LoRAConfig(4, 8.0))
    torch.manual_seed(6)
    with torch.no_grad():
        for found in adapted_linears(block).values():
            found.lora.b.weight.uniform_(-0.2, 0.2)
    return block


@pytest.mark.parametrize("schedule", ["late", "deferred"])
def test_delayed_gradients_are_those_computed_in_their_place(schedule: Any) -> None:
    expected = gradients(adapted())
    block = adapted(delayed=schedule == "deferred")
    coordinator = mr.WgradCoordinator(schedule).attach(block)
    got = gradients(block, coordinator)
    assert expected.keys() == got.keys() and len(got) == 4
    for name in expected:
        assert torch.equal(expected[name], got[name]), name
        assert expected[name].any()


@pytest.mark.parametrize("recipe", [None, BASES["mxfp8"]], ids=["as stored", "autocast"])
def test_a_missing_direction_changes_no_bit(recipe: Any) -> None:
    without, with_both = adapted(omit=True), adapted(omit=False)
    few, many = mr.storage_report(without), mr.storage_report(with_both)
    half = EXPERTS * 3 * F * D * 33 // 32
    assert sum(p.num_bytes for p in few.quantized) == half
    assert sum(p.num_bytes for p in many.quantized) == 2 * half
    expected, got = gradients(with_both, recipe=recipe), gradients(without, recipe=recipe)
    assert expected.keys() == got.keys()
    for name in expected:
        assert torch.equal(expected[name], got[name]), name


def test_the_router_learns_of_nothing_and_the_base_neither() -> None:
    block = adapted()
    grads = gradients(block)
    assert {name.rpartition(".lora.")[2] for name in grads} == {"a.weight", "b.weight"}
    trained = {name for name, p in block.named_parameters() if p.requires_grad}
    assert trained == grads.keys()


def test_a_frozen_weight_needs_no_main_grad() -> None:
    linear = layer(fuse_wgrad_accumulation=True)
    lora = adapt(linear)
    x_RD = torch.randn(16, D, requires_grad=True)
    dy_RF = torch.randn(16, F)
    linear(x_RD, [16, 0, 0, 0]).backward(dy_RF)
    _, dx, da, _ = plain(linear, x_RD.detach(), (16, 0, 0, 0), dy_RF)
    assert x_RD.grad is not None and lora.a.weight.grad is not None
    assert_close_per_expert(x_RD.grad, dx, 1e-5)
    assert_close_per_expert(lora.a.weight.grad, da, 1e-5)
    assert linear.weight.grad is None and not hasattr(linear.weight, "main_grad")


def test_keeping_experts_keeps_theirs_and_stays_frozen() -> None:
    linear = layer("mxfp8")
    lora = adapt(linear)
    a_ErD, w_EFD = lora.a.weight.detach().clone(), linear.weight.dequantize()
    linear.keep_experts(1, 3)
    assert torch.equal(lora.a.weight, a_ErD[1:3]) and not linear.weight.requires_grad
    assert torch.equal(linear.weight.dequantize(), w_EFD[1:3])
    shared = layer()
    adapt(shared, shared="a")
    with pytest.raises(ValueError, match="share factor a of their adapter cannot be split over ranks"):
        shared.keep_experts(0, 2)


def test_an_experts_values_do_not_depend_on_what_else_is_there() -> None:
    whole, part = layer(), layer()
    part.keep_experts(2, 4)
    mr.GroupedLoRA(whole, mr.LoRAConfig(3, 1.0)).initialize("x.lora")
    mr.GroupedLoRA(part, mr.LoRAConfig(3, 1.0)).initialize("x.lora", first_expert=2)
    assert isinstance(whole.lora, mr.GroupedLoRA) and isinstance(part.lora, mr.GroupedLoRA)
    assert torch.equal(whole.lora.a.weight[2:], part.lora.a.weight)
    assert not whole.lora.b.weight.any()
    assert not torch.equal(whole.lora.a.weight[0], whole.lora.a.weight[1])
    assert list(grouped_linears(nn.Sequential(whole))) == ["0"]
