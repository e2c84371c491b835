"""The two contexts: nesting, exceptions, threads, and recompute, which runs after they have closed."""

# R routed rows   D in features   F out features   E experts

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moe_runtime as mr
from moe_runtime.precision import Recipe, current_compute, current_init
from moe_runtime.tensor import QuantizedTensor

MXFP8 = mr.recipes.MXFP8BlockScaling()
NVFP4 = mr.recipes.NVFP4BlockScaling()
HIGH = mr.recipes.HighPrecision()
SPLITS = [5, 0, 7, 4]


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    yield
    assert current_compute().recipe == HIGH and current_init() is None
    assert type(current_compute()).__name__ == "Compute" and not current_compute().recomputing


def recipe_now() -> Recipe:
    return current_compute().recipe


# autocast -------------------------------------------------------------------------------------------------------------


def test_nested_use_restores_the_outer_state() -> None:
    assert recipe_now() == HIGH
    with mr.autocast(recipe=MXFP8):
        assert recipe_now() is MXFP8
        with mr.autocast(recipe=NVFP4):
            assert recipe_now() is NVFP4
            with mr.autocast(enabled=False, recipe=NVFP4):
                assert recipe_now() == HIGH
            with mr.autocast():
                assert recipe_now() == HIGH
            assert recipe_now() is NVFP4
        assert recipe_now() is MXFP8
    assert recipe_now() == HIGH


def test_exceptions_restore_it_too() -> None:
    with mr.autocast(recipe=MXFP8):
        for failure in (KeyError, KeyboardInterrupt, GeneratorExit):
            with pytest.raises(failure), mr.autocast(recipe=NVFP4):
                raise failure
            assert recipe_now() is MXFP8
    assert recipe_now() == HIGH


def test_one_context_object_is_used_once() -> None:
    context = mr.autocast(recipe=MXFP8)
    with context:
        pass
    with pytest.raises((AttributeError, RuntimeError)), context:
        pass
    assert recipe_now() == HIGH


def test_as_a_decorator() -> None:
    @mr.autocast(recipe=MXFP8)
    def inside() -> Recipe:
        return recipe_now()

    assert inside() is MXFP8 and inside() is MXFP8 and recipe_now() == HIGH


def test_threads_do_not_see_each_others() -> None:
    ready, done = threading.Barrier(3, timeout=20), threading.Barrier(3, timeout=20)
    seen: dict[str, Any] = {}

    def work(name: str, recipe: Recipe) -> None:
        seen[f"{name} before"] = recipe_now(), current_init()
        with mr.autocast(recipe=recipe), mr.quantized_model_init(recipe=recipe):
            ready.wait()
            policy = current_init()
            assert policy is not None
            seen[name] = recipe_now(), policy.recipe
            done.wait()
        seen[f"{name} after"] = recipe_now(), current_init()

    threads = [threading.Thread(target=work, args=(recipe.name, recipe)) for recipe in (MXFP8, NVFP4)]
    for thread in threads:
        thread.start()
    ready.wait()
    assert recipe_now() == HIGH and current_init() is None
    done.wait()
    for thread in threads:
        thread.join()
    for recipe in (MXFP8, NVFP4):
        assert seen[recipe.name] == (recipe, recipe)
        assert seen[f"{recipe.name} before"] == seen[f"{recipe.name} after"] == (HIGH, None)


def test_tasks_do_not_see_each_others() -> None:
    async def work(recipe: Recipe) -> bool:
        with mr.autocast(recipe=recipe):
            await asyncio.sleep(0)
            return recipe_now() is recipe

    async def both() -> list[bool]:
        return await asyncio.gather(work(MXFP8), work(NVFP4))

    assert asyncio.run(both()) == [True, True]


def test_what_is_open_in_other_threads_is_counted() -> None:
    """What compiled code guards on: true while a quantizing context is open anywhere, and not for ever."""

    def one_is_open() -> bool:
        return type(mr.recompute_context_fn()[0]).any_quantizes  # pyright: ignore[reportAttributeAccessIssue]

    assert not one_is_open()
    stop, threads = threading.Event(), []

    def spin() -> None:
        for _ in range(300):
            with mr.autocast(recipe=MXFP8), mr.autocast(recipe=HIGH):
                assert one_is_open()
        stop.wait(20)

    for _ in range(4):
        threads.append(threading.Thread(target=spin))
        threads[-1].start()
    stop.set()
    for thread in threads:
        thread.join()
    assert not one_is_open()


@pytest.mark.parametrize("context", [mr.autocast, mr.quantized_model_init])
@pytest.mark.parametrize("recipe", ["mxfp8", mr.recipes.MXFP8BlockScaling, 8])
def test_what_is_no_recipe(context: Callable[..., Any], recipe: Any) -> None:
    with pytest.raises(TypeError, match=r"recipe must be one of moe_runtime\.recipes.*got"), context(recipe=recipe):
        pass


# quantized_model_init -------------------------------------------------------------------------------------------------


def test_nested_construction() -> None:
    def built() -> nn.Parameter:
        return mr.GroupedLinear(2, 32, 32).get_parameter("weight")

    with mr.quantized_model_init(recipe=MXFP8):
        assert built().quantizer.format == MXFP8.weight  # pyright: ignore[reportAttributeAccessIssue]
        with mr.quantized_model_init(enabled=False):
            assert type(built()) is mr.GroupedTensor
        with pytest.raises(ZeroDivisionError), mr.quantized_model_init(recipe=NVFP4):
            assert built().quantizer.format == NVFP4.weight  # pyright: ignore[reportAttributeAccessIssue]
            _ = 1 / 0
        assert built().quantizer.format == MXFP8.weight  # pyright: ignore[reportAttributeAccessIssue]
    assert type(built()) is mr.GroupedTensor


@pytest.mark.parametrize("recipe", [None, HIGH])
def test_storing_quantized_needs_a_recipe_that_quantizes(recipe: Any) -> None:
    with (
        pytest.raises(ValueError, match="needs a recipe that quantizes, got"),
        mr.quantized_model_init(recipe=recipe),
    ):
        pass
    with mr.quantized_model_init(enabled=False, recipe=recipe):
        assert current_init() is None


@pytest.mark.parametrize("recipe", [MXFP8, NVFP4, mr.recipes.Float8CurrentScaling()])
def test_omission_needs_an_override(recipe: Recipe) -> None:
    with (
        pytest.raises(ValueError, match=r'expected backward_override="dequantized" or "high_precision", got None in'),
        mr.quantized_model_init(recipe=recipe, omit_columnwise_primary_weight_storage=True),
    ):
        raise AssertionError("it is refused before anything is built")
    for override in ("dequantized", "high_precision"):
        legal = replace(recipe, backward_override=override)
        with mr.quantized_model_init(recipe=legal, omit_columnwise_primary_weight_storage=True):
            weight = mr.GroupedLinear(2, 32, 32).weight
        assert isinstance(weight, QuantizedTensor) and weight.rowwise and not weight.columnwise
        with mr.quantized_model_init(recipe=legal):
            assert mr.GroupedLinear(2, 32, 32).weight.columnwise, "the default stores both"  # pyright: ignore


def test_built_without_gradients_is_rowwise_only() -> None:
    with torch.no_grad(), mr.quantized_model_init(recipe=MXFP8):
        module = mr.GroupedLinear(2, 32, 32)
    assert not module.weight.columnwise  # pyright: ignore[reportAttributeAccessIssue]
    x_RD = torch.randn(4, 32, requires_grad=True)
    with mr.autocast(recipe=MXFP8):
        with torch.no_grad():
            module(x_RD, [2, 2])
        with pytest.raises(ValueError, match=r"GroupedLinear\(num_gemms=2.*row-wise only.*outside torch\.no_grad"):
            module(x_RD, [2, 2])
    with mr.autocast(recipe=replace(MXFP8, backward_override="dequantized")):
        module(x_RD, [2, 2]).sum().backward()


def test_a_later_quantized_backward_raises_before_any_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row-wise MXFP8 with an override runs; then a default recipe is refused by name, and both recipes are in it."""
    recipe = replace(MXFP8, backward_override="high_precision")
    with mr.quantized_model_init(recipe=recipe, omit_columnwise_primary_weight_storage=True):
        module = mr.GroupedMLP(4, 32, 32)
    mr.WgradCoordinator().attach(module)
    held = sum(p.stored_bytes for p in module.parameters())  # pyright: ignore[reportAttributeAccessIssue]
    count = sum(p.numel() for p in module.parameters())
    assert held == count * 33 / 32
    x_RD = torch.randn(16, 32, requires_grad=True)
    with mr.autocast(recipe=recipe):
        module(x_RD, SPLITS).sum().backward()
    assert sum(p.stored_bytes for p in module.parameters()) == held  # pyright: ignore[reportAttributeAccessIssue]
    ran: list[str] = []
    for name in ("gemm_dequant_nt", "quantize", "dequantize"):
        monkeypatch.setattr(
            f"moe_runtime.functional.quantized_linear.{name}", lambda *a, name=name, **k: ran.append(name)
        )
    with mr.autocast(recipe=MXFP8), pytest.raises(ValueError, match="row-wise only") as refusal:
        module(x_RD, SPLITS)
    assert not ran
    for part in ("gate_up = GroupedLinear(num_gemms=4", f"built by {recipe}", f"quantized backward of {MXFP8}"):
        assert part in str(refusal.value)


def test_from_an_override_to_a_quantized_backward_and_back() -> None:
    override = replace(MXFP8, backward_override="dequantized")
    with mr.quantized_model_init(recipe=override):
        module = mr.GroupedLinear(4, 32, 32)
    gradients = []
    for recipe in (override, MXFP8, override, MXFP8):
        x_RD = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with mr.autocast(recipe=recipe):
            module(x_RD, SPLITS).square().sum().backward()
        gradients.append(x_RD.grad)
    assert torch.equal(gradients[0], gradients[2]) and torch.equal(gradients[1], gradients[3])
    assert not torch.equal(gradients[0], gradients[1])


# Recompute ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Experts between two dense layers, recomputed in backward."""

    def __init__(self, context_fn: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.experts = mr.GroupedMLP(4, 32, 32)
        self.options: dict[str, Any] = {"use_reentrant": False}
        if context_fn is not None:
            self.options["context_fn"] = context_fn
        self.recompute = True

    def inner(self, x_RD: Tensor) -> Tensor:
        return self.experts(self.first(x_RD), SPLITS)

    def forward(self, x_RD: Tensor) -> Tensor:
        return checkpoint(self.inner, x_RD, **self.options) if self.recompute else self.inner(x_RD)


RECIPES: dict[str, Recipe] = {
    "high": HIGH,
    "mxfp8": MXFP8,
    "mxfp8 dequantized": replace(MXFP8, backward_override="dequantized"),
    "nvfp4": NVFP4,
    "float8": mr.recipes.Float8CurrentScaling(),
}


def rows() -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()


def forward(block: nn.Module, recipe: Recipe) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)  # stochastic rounding
    x_RD = rows()
    with mr.autocast(recipe=recipe):
        return x_RD, block(x_RD).square().sum()


def gradients(block: nn.Module, x_RD: Tensor) -> list[Tensor]:
    found = [x_RD.grad, *(p.grad for p in block.parameters())]
    assert all(g is not None for g in found)
    return [g.clone() for g in found if g is not None]


def expected(recipe: Recipe) -> list[Tensor]:
    block = Block()
    block.recompute = False
    x_RD, loss = forward(block, recipe)
    loss.backward()
    return gradients(block, x_RD)


def in_thread(work: Callable[[], Any]) -> None:
    """As CUDA's backward runs: on a thread that has never seen the contexts."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("where", ["here", "thread"])
@pytest.mark.parametrize("around", ["closed", "another recipe"])
@pytest.mark.parametrize("name", RECIPES)
def test_recompute_sees_the_recipe_of_its_forward(name: str, around: str, where: str) -> None:
    block = Block(mr.recompute_context_fn)
    x_RD, loss = forward(block, RECIPES[name])

    def backward() -> None:
        with mr.autocast(recipe=None if around == "closed" else mr.recipes.Float8BlockScaling()):
            loss.backward()

    in_thread(backward) if where == "thread" else backward()
    assert all(map(torch.equal, gradients(block, x_RD), expected(RECIPES[name])))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_kept_graph_is_recomputed_twice(name: str) -> None:
    block = Block(mr.recompute_context_fn)
    x_RD, loss = forward(block, RECIPES[name])
    loss.backward(retain_graph=True)
    first = gradients(block, x_RD)
    block.zero_grad()
    x_RD.grad = None
    in_thread(lambda: loss.backward())
    assert all(map(torch.equal, gradients(block, x_RD), first))
    assert all(map(torch.equal, first, expected(RECIPES[name])))


def test_two_microbatches_of_different_recipes() -> None:
    block = Block(mr.recompute_context_fn)
    runs = [forward(block, RECIPES[name]) for name in ("mxfp8", "nvfp4")]
    for (x_RD, loss), name in zip(reversed(runs), ("nvfp4", "mxfp8"), strict=True):
        loss.backward()
        assert all(map(torch.equal, gradients(block, x_RD), expected(RECIPES[name])))
        block.zero_grad()


def test_nested_recompute() -> None:
    inner = Block(mr.recompute_context_fn)
    x_RD, loss = forward(lambda x: checkpoint(inner, x, **inner.options), MXFP8)  # pyright: ignore[reportArgumentType]
    loss.backward()
    assert all(map(torch.equal, gradients(inner, x_RD), expected(MXFP8)))


@pytest.mark.parametrize("where", ["here", "thread"])
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "high"])
def test_without_it_a_quantized_recompute_raises_by_name(name: str, where: str) -> None:
    """Inside the context, or after it: the recipe of the first run cannot be known, only guessed."""
    block = Block()
    _, loss = forward(block, RECIPES[name])

    def backward() -> None:
        with pytest.raises(RuntimeError, match=r"GroupedLinear\(.*inside a backward.*recompute_context_fn"):
            loss.backward()

    in_thread(backward) if where == "thread" else backward()
    _, loss = forward(block, RECIPES[name])
    with mr.autocast(recipe=RECIPES[name]), pytest.raises(RuntimeError, match="recompute_context_fn"):
        loss.backward()


@pytest.mark.parametrize("stored", [False, True], ids=["dense", "stored"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 high"])
def test_an_evaluation_before_backward_does_not_hide_the_recipe(name: str, stored: bool) -> None:
    """Recomputed in high precision, rows would differ from those that the loss has seen."""
    recipe = replace(MXFP8, backward_override=None if name == "mxfp8" else "high_precision")
    with mr.quantized_model_init(stored, recipe):
        block = Block()
    _, loss = forward(block, recipe)
    with torch.no_grad():
        block(rows())
    with pytest.raises(RuntimeError, match="recompute_context_fn"):
        loss.backward()


def test_a_high_precision_recompute_needs_nothing() -> None:
    block = Block()
    x_RD, loss = forward(block, HIGH)
    loss.backward()
    assert all(map(torch.equal, gradients(block, x_RD), expected(HIGH)))


def test_an_autocast_around_backward_does_not_reach_a_high_precision_forward() -> None:
    block = Block()
    _, loss = forward(block, HIGH)
    with mr.autocast(recipe=MXFP8), pytest.raises(RuntimeError, match="recompute_context_fn"):
        loss.backward()


# Compiled -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_follow_the_context() -> None:
    """Nothing of a recipe is compiled in: a layer compiled outside of a context is quantized inside, and back."""
    torch._dynamo.reset()
    module, graphs = mr.GroupedLinear(4, 32, 32), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def taken(x: Tensor) -> Tensor:
        recipe = module.take_weight().recipe
        return x + len(recipe.name)

    compiled, zero = torch.compile(taken, backend=backend), torch.zeros(())
    for recipe in (None, MXFP8, None, NVFP4, mr.recipes.Float8CurrentScaling(), MXFP8, None):
        with mr.autocast(recipe=recipe):
            assert int(compiled(zero)) == len((recipe or HIGH).name) == int(taken(zero))
    torch._dynamo.reset()
    assert int(torch.compile(taken, backend="eager", fullgraph=True)(zero)) == len(HIGH.name)
