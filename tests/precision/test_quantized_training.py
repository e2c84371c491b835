"""Training with quantized products and weights: what must not change a single bit.

train, eval, train and train, train; grouped and separate; delayed and inline; row-wise only and both directions; a
checkpoint loaded between steps; recompute.
"""

# R routed rows   D in features   F out features   E experts

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moe_runtime as mr
from moe_runtime.precision import Recipe
from moe_runtime.tensor import QuantizedTensor

BASES: dict[str, Recipe] = {
    "mxfp8": mr.recipes.MXFP8BlockScaling(),
    "nvfp4": mr.recipes.NVFP4BlockScaling(),
    "nvfp4 1d": mr.recipes.NVFP4BlockScaling(disable_2d_quantization=True),
    "float8": mr.recipes.Float8CurrentScaling(),
    "fp8_block": mr.recipes.Float8BlockScaling(),
}
RECIPES: dict[str, Recipe] = {
    f"{name}{suffix}": replace(recipe, backward_override=override)
    for name, recipe in BASES.items()
    for suffix, override in (("", None), (" dequantized", "dequantized"), (" high", "high_precision"))
}
EMPTY_MIDDLE, ONE_OWNER, ODD = [5, 0, 7, 4], [0, 16, 0, 0], [1, 9, 3, 3]


class Model(nn.Module):
    """A dense layer, experts, a dense layer."""

    def __init__(self, recipe: Recipe | None, width: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        omit = options.pop("omit", False)
        self.first = nn.Linear(8, width)
        with mr.quantized_model_init(
            recipe is not None,
            recipe,
            preserve_high_precision_init_val=True,
            omit_columnwise_primary_weight_storage=omit,
        ):
            self.experts = mr.GroupedMLP(4, width, width, **options)
        self.last = nn.Linear(width, 8)

    def forward(self, x_RD: Tensor, splits: list[int]) -> Tensor:
        return self.last(self.experts(self.first(x_RD), splits))


class Run:
    """A model with its optimizer; `step(i)` trains on batch i."""

    def __init__(self, name: str, *, stored: bool = True, schedule: str = "inline", **options: Any) -> None:
        self.recipe = RECIPES[name]
        width = 128 if name.startswith("fp8_block") else 32
        delayed = schedule == "deferred"
        self.model = Model(self.recipe if stored else None, width, delay_wgrad_compute=delayed, **options)
        self.coordinator = mr.WgradCoordinator(schedule)  # pyright: ignore[reportArgumentType]
        self.coordinator.attach(self.model)
        self.optimizer = mr.optim.MasterWeights(torch.optim.AdamW, self.model.parameters(), lr=0.02, foreach=False)

    def backward(self, index: int, splits: list[int] = EMPTY_MIDDLE) -> None:
        generator = torch.Generator().manual_seed(index)
        torch.manual_seed(100 + index)  # stochastic rounding
        with mr.autocast(recipe=self.recipe):
            y = self.model(torch.randn(16, 8, generator=generator), splits)
        (y - 1).square().mean().backward()

    def step(self, index: int, splits: list[int] = EMPTY_MIDDLE, microbatches: int = 1) -> None:
        for microbatch in range(microbatches):
            self.backward(index + 1000 * microbatch, splits)
        self.coordinator.flush()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, *, grad: bool = False, recipe: Recipe | None = None) -> Tensor:
        self.model.eval()
        with torch.set_grad_enabled(grad), mr.autocast(recipe=recipe or self.recipe):
            result = self.model(torch.ones(16, 8), ODD)
        self.model.train()
        return result.detach()

    def state(self) -> dict[str, Tensor]:
        """Every bit: bytes and scales of each direction, masters, moments; separate experts stacked."""
        state: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            held = p.records.tensors() if isinstance(p, QuantizedTensor) else {"value": p.detach()}
            held = held | {k: v for k, v in self.optimizer.state[p].items() if isinstance(v, Tensor)}
            state |= {f"{name}.{part}": t.detach().clone().as_subclass(Tensor) for part, t in held.items()}
        first = [key for key in state if not any(f"weight{e}" in key for e in (1, 2, 3))]
        return {key.replace("weight0", "weight"): stacked(state, key) for key in first}


def stacked(state: dict[str, Tensor], key: str) -> Tensor:
    if "weight0" not in key:
        return state[key]
    return torch.stack([state[key.replace("weight0", f"weight{e}")] for e in range(4)])


def assert_same(ours: Run, theirs: Run, *, but: tuple[str, ...] = ()) -> None:
    a, b = ours.state(), theirs.state()
    a, b = ({k: v for k, v in state.items() if not any(part in k for part in but)} for state in (a, b))
    assert a.keys() == b.keys() and len(a) > 10
    differing = [name for name in a if not torch.equal(a[name], b[name])]
    assert not differing


def trained(name: str, **options: Any) -> Run:
    run = Run(name, **options)
    for index, splits in enumerate((EMPTY_MIDDLE, ONE_OWNER, ODD)):
        run.step(index, splits)
    return run


EVALUATIONS: dict[str, Callable[[Run], Any]] = {
    "eval": lambda run: run.evaluate(),
    "eval with gradients": lambda run: (torch.manual_seed(3), run.evaluate(grad=True)),
    "eval in high precision": lambda run: run.evaluate(recipe=mr.recipes.HighPrecision()),
    "eval in inference mode": lambda run: torch.inference_mode()(run.evaluate)(),
    "state dict": lambda run: copy.deepcopy(run.model.state_dict()),
    "deepcopy": lambda run: copy.deepcopy(run.model),
}


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "dense"])
@pytest.mark.parametrize("name", RECIPES)
def test_training_goes_on_after_evaluation_as_if_it_had_not_been(name: str, stored: bool) -> None:
    run = Run(name, stored=stored)
    for evaluate in EVALUATIONS.values():
        evaluate(run)  # first of all
    for index, splits in enumerate((EMPTY_MIDDLE, ONE_OWNER, ODD)):
        run.step(index, splits)
        for evaluate in EVALUATIONS.values():
            evaluate(run)
    assert_same(run, trained(name, stored=stored))
    for parameter in run.model.experts.parameters():
        assert isinstance(parameter, QuantizedTensor) == stored
        assert not stored or (parameter.rowwise and parameter.columnwise)  # pyright: ignore


@pytest.mark.parametrize("name", RECIPES)
def test_separate_experts_train_to_the_same_bits(name: str) -> None:
    """Bytes, masters, moments; AdamW counts steps for each expert."""
    assert_same(trained(name, single_grouped_weight=False), trained(name), but=(".step",))


@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name].backward_override is not None])
def test_rowwise_storage_trains_to_the_same_bits(name: str) -> None:
    rowwise = trained(name, omit=True)
    weights = list(rowwise.model.experts.parameters())
    assert all(isinstance(w, QuantizedTensor) and not w.columnwise for w in weights)
    full = trained(name)
    ours, theirs = rowwise.state(), full.state()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items()) and len(ours) < len(theirs)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("layout", ["packed", "separate"])
@pytest.mark.parametrize("schedule", ["late", "deferred"])
@pytest.mark.parametrize("name", RECIPES)
def test_delayed_gives_the_inline_bits(name: str, schedule: str, layout: str, microbatches: int) -> None:
    options = {"single_grouped_weight": layout == "packed"}
    runs = [Run(name, schedule=s, **options) for s in (schedule, "inline")]
    for run in runs:
        for index, splits in enumerate((EMPTY_MIDDLE, ONE_OWNER)):
            run.step(index, splits, microbatches)
    assert_same(*runs)


def test_deferred_quantized_gradients_hold_quantized_operands() -> None:
    """What waits is what the product reads: dy and x columnwise, a byte each and their scales."""
    run = Run("mxfp8", schedule="deferred")
    run.backward(0, [16, 0, 0, 0])
    padded = 160  # 16 rows, room for 4 * 31 more, whole blocks
    up, down = padded * (64 + 32) * 33 / 32, padded * (32 + 32) * 33 / 32
    assert run.coordinator.peak_held_bytes == up + down


def test_deferred_under_a_budget() -> None:
    run = Run("mxfp8", schedule="deferred")
    run.coordinator.budget_bytes = 1
    other = Run("mxfp8")
    for each in (run, other):
        each.step(0, EMPTY_MIDDLE, 2)
    assert_same(run, other)


@pytest.mark.parametrize("name", RECIPES)
def test_a_checkpoint_loaded_between_steps(name: str) -> None:
    """Saved after one step, loaded after three: goes on from there, every direction refreshed."""
    run = Run(name)
    run.step(0)
    buffer = io.BytesIO()
    torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, buffer)
    run.step(1)
    run.step(2)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    run.step(5)
    other = Run(name)
    other.step(0)
    other.step(5)
    assert_same(run, other)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "nvfp4 1d", "float8"])
def test_a_high_precision_checkpoint_refreshes_both_directions(name: str) -> None:
    """Masters too start there: weights that were loaded before the optimizer was made."""
    values = Model(None, 32).state_dict()
    values = {key: value * 2 for key, value in values.items()}
    model = Model(RECIPES[name], 32)
    model.load_state_dict(values)
    optimizer = mr.optim.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.0)
    for key, parameter in model.named_parameters():
        assert torch.equal(optimizer._master[parameter].detach(), values[key])
        if isinstance(parameter, QuantizedTensor):
            expected = mr.GroupedTensor.pack(values[key].as_subclass(Tensor), parameter.quantizer)
            ours, theirs = parameter.records.tensors(), expected.records.tensors()  # pyright: ignore
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("schedule", ["inline", "late", "deferred"])
@pytest.mark.parametrize("name", RECIPES)
def test_recompute_gives_the_same_bits(name: str, schedule: str) -> None:
    runs = [Run(name, schedule=schedule) for _ in range(2)]
    experts = runs[0].model.experts
    forward = experts.forward

    def recomputed(*args: Any) -> Tensor:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=mr.recompute_context_fn)

    experts.forward = recomputed
    for run in runs:
        run.step(0)
        run.step(1, ODD)
    assert_same(*runs)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_masters_start_at_the_values_before_quantization(name: str) -> None:
    run, plain = Run(name), Model(None, 32)
    for key, parameter in run.model.named_parameters():
        assert torch.equal(run.optimizer._master[parameter].detach(), plain.get_parameter(key).detach())
        if isinstance(parameter, QuantizedTensor):
            assert parameter.get_high_precision_init_val() is None


@pytest.mark.parametrize("name", RECIPES)
def test_it_learns(name: str) -> None:
    """The loss after 12 steps on one batch is well below the first."""
    run = Run(name)

    def loss() -> float:
        with torch.no_grad(), mr.autocast(recipe=run.recipe):
            x_RD = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
            return float((run.model(x_RD, EMPTY_MIDDLE) - 1).square().mean())

    before = loss()
    for _ in range(12):
        run.step(0)
    assert loss() < before / 2


def test_frozen_quantized_experts_pass_gradients_on() -> None:
    """LoRA's base: rows get their gradient, the weights none, and nothing columnwise is stored."""
    model = Model(RECIPES["mxfp8 dequantized"], 32, omit=True)
    model.experts.requires_grad_(False)
    with mr.autocast(recipe=RECIPES["mxfp8 dequantized"]):
        model(torch.randn(16, 8), EMPTY_MIDDLE).sum().backward()
    assert model.first.weight.grad is not None and model.first.weight.grad.abs().sum() > 0
    assert all(p.grad is None for p in model.experts.parameters())


def test_tokens_to_no_expert_here() -> None:
    """A rank without rows: zeros for every expert, so that all ranks reduce the same parameters."""
    with mr.quantized_model_init(recipe=BASES["mxfp8"]):
        model = mr.GroupedMLP(2, 32, 32)
    x_RD = torch.zeros(0, 32, requires_grad=True)
    with mr.autocast(recipe=BASES["mxfp8"]):
        model(x_RD, [0, 0]).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
