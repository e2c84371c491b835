"""Gradients that go into `main_grad`: values by hand, every attribute of the protocol, every schedule and layout."""

# R routed rows   D in features   F out features   E experts

import copy
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moe_runtime as mr
from moe_runtime.runtime import GradientBuckets
from moe_runtime.testing import nan_filled_memory, with_nan_tail

LAYOUTS = {"packed": True, "separate": False}
SCHEDULES = ["inline", "late", "deferred"]
RECIPES: dict[str, Any] = {
    "high": None,
    "mxfp8": mr.recipes.MXFP8BlockScaling(),
    "mxfp8 dequantized": mr.recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "nvfp4": mr.recipes.NVFP4BlockScaling(),
}


def layer(
    num_experts: int, width: int, out: int, *, schedule: str = "inline", fused: bool = True, **options: Any
) -> mr.GroupedLinear:
    torch.manual_seed(0)
    module = mr.GroupedLinear(
        num_experts,
        width,
        out,
        delay_wgrad_compute=schedule == "deferred",
        fuse_wgrad_accumulation=fused,
        **options,
    )
    mr.WgradCoordinator(schedule).attach(module)  # pyright: ignore[reportArgumentType]
    return module


def flush(module: nn.Module) -> None:
    module.wgrad_coordinator.flush()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]


def weights(module: mr.GroupedLinear) -> list[Any]:
    return module.wgrad_parameters("weight")


def give(module: mr.GroupedLinear, value: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Views of one flat buffer become the parameters' main_grad, as Megatron's DDP has it."""
    count = sum(p.numel() for p in weights(module))
    flat = torch.full((count,), value, dtype=dtype)
    start = 0
    for p in weights(module):
        p.main_grad = flat[start : start + p.numel()].view(p.shape)
        start += p.numel()
    return flat


def stacked(module: mr.GroupedLinear) -> Tensor:
    grads = [p.main_grad for p in weights(module)]
    return grads[0] if grads[0].dim() == 3 else torch.stack(grads)


def loop(x_RD: Tensor, dy_RF: Tensor, splits: Sequence[int]) -> Tensor:
    parts = zip(x_RD.split(list(splits)), dy_RF.split(list(splits)), strict=True)
    return torch.stack([dy.double().T @ x.double() for x, dy in parts])


X, DY, ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [[1.0], [1.0], [2.0]], [2, 0, 1]


# By hand --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_experts(dtype: torch.dtype, layout: str, schedule: str) -> None:
    """16 -> 32, 8 rows: fused and not, against a loop; fused leaves `.grad` None and sets the flag."""
    x_RD, dy_RF = torch.randn(8, 16).to(dtype), torch.randn(8, 32).to(dtype)
    expected = loop(x_RD, dy_RF, [5, 3])
    options = {"schedule": schedule, "single_grouped_weight": LAYOUTS[layout], "dtype": dtype}
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for fused in (True, False):
        module = layer(2, 16, 32, fused=fused, **options)
        flat = give(module)
        module(x_RD, [5, 3]).backward(dy_RF)
        flush(module)
        got = stacked(module) if fused else torch.stack([g for p in weights(module) for g in p.grad.view(-1, 32, 16)])
        assert got.shape == (2, 32, 16) and (got.double() - expected).norm() <= tolerance * expected.norm()
        for p in weights(module):
            assert (p.grad is None) == fused and getattr(p, "grad_added_to_main_grad", False) == fused
        assert flat.any() == fused and not flat.requires_grad
        assert p.main_grad.dtype == torch.float32 and p.main_grad.data_ptr() >= flat.data_ptr()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_partly_empty(layout: str, schedule: str) -> None:
    """Accumulate onto 7s; overwrite NaN: an expert without rows keeps its 7s, and gets zeros."""
    for before, overwrite, expected in (
        (7.0, False, [[11, 13], [7, 7], [17, 19]]),
        (float("nan"), True, [[4, 6], [0, 0], [10, 12]]),
    ):
        module = layer(3, 2, 1, schedule=schedule, single_grouped_weight=LAYOUTS[layout])
        give(module, before)
        for p in weights(module):
            p.overwrite_main_grad = overwrite
        with nan_filled_memory():
            module(torch.tensor(X), ROWS).backward(torch.tensor(DY))
            flush(module)
        assert stacked(module)[:, 0].tolist() == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_microbatches_delayed(layout: str) -> None:
    """[0, 0] after two backwards, [4, 6] and [14, 18] after the delayed calls; then the hook, once; a third fails."""
    module = layer(1, 2, 1, schedule="deferred", single_grouped_weight=LAYOUTS[layout], bias=True)
    give(module)
    seen: list[list[float]] = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(stacked(module).flatten().tolist()))
    biases = []
    for x, dy in (([[1.0, 2.0], [3.0, 4.0]], [[1.0], [1.0]]), ([[5.0, 6.0]], [[2.0]])):
        module(torch.tensor(x), [len(x)]).backward(torch.tensor(dy))
        assert stacked(module).flatten().tolist() == [0, 0] and module.need_backward_dw()
        biases.append(module.wgrad_parameters("bias")[0].grad.item())  # pyright: ignore[reportOptionalMemberAccess]
    assert biases == [2, 4], "a bias is not delayed: 2 + 2"
    module.wgrad_parameters("bias")[0].grad = None  # an outer hook took it: neither a crash nor a second addition
    module.backward_dw()
    assert stacked(module).flatten().tolist() == [4, 6] and not seen
    module.backward_dw()
    assert stacked(module).flatten().tolist() == [14, 18] and seen == [[14, 18]]
    assert module.wgrad_parameters("bias")[0].grad is None
    with pytest.raises(RuntimeError, match=r"no weight gradient of .* is pending"):
        module.backward_dw()
    assert stacked(module).flatten().tolist() == [14, 18]


def test_overwriting_twice_leaves_the_last() -> None:
    module = layer(1, 2, 1, schedule="deferred")
    give(module, float("nan"))
    module.weight.overwrite_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    buffer = module.weight.main_grad  # pyright: ignore[reportAttributeAccessIssue]
    for x, dy in (([[1.0, 2.0], [3.0, 4.0]], [[1.0], [1.0]]), ([[5.0, 6.0]], [[2.0]])):
        module(torch.tensor(x), [len(x)]).backward(torch.tensor(dy))
    flush(module)
    assert buffer.flatten().tolist() == [10, 12], "into the buffer itself"


def test_a_weight_attached_late_to_a_meta_shell() -> None:
    module = layer(1, 2, 1, schedule="deferred", device="meta")
    module.weight = nn.Parameter(torch.zeros(1, 1, 2))
    assert module.weight.skip_backward_post_hook  # pyright: ignore[reportAttributeAccessIssue]
    give(module)
    module(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [2]).backward(torch.ones(2, 1))
    flush(module)
    assert stacked(module).flatten().tolist() == [4, 6]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", ["inline", "late"])
def test_a_frozen_weight_needs_no_buffer(schedule: str, layout: str) -> None:
    module = layer(2, 3, 4, schedule=schedule, single_grouped_weight=LAYOUTS[layout], bias=True)
    for p in weights(module):
        p.requires_grad_(False)
    x_RD = torch.randn(5, 3, requires_grad=True)
    dy_RF = torch.randn(5, 4)
    module(x_RD, [2, 3]).backward(dy_RF)
    expected = torch.cat([dy @ w for dy, w in zip(dy_RF.split([2, 3]), module.stacked_weight(), strict=True)])
    assert x_RD.grad is not None and torch.allclose(x_RD.grad, expected, atol=1e-6)
    assert all(p.grad is None and not hasattr(p, "grad_added_to_main_grad") for p in weights(module))
    assert all(p.grad is not None for p in module.wgrad_parameters("bias"))


def test_some_separate_experts_frozen() -> None:
    module = layer(3, 2, 1, single_grouped_weight=False)
    module.weight0.requires_grad_(False)
    give(module)
    module(torch.tensor(X), ROWS).backward(torch.tensor(DY))
    assert stacked(module)[:, 0].tolist() == [[0, 0], [0, 0], [10, 12]]
    assert module.weight0.grad is None and not hasattr(module.weight0, "grad_added_to_main_grad")
    assert module.weight2.grad is None


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rows_at_all_still_sets_the_flag(layout: str, schedule: str) -> None:
    module = layer(2, 4, 3, schedule=schedule, single_grouped_weight=LAYOUTS[layout])
    give(module, 7.0)
    module(torch.zeros(0, 4, requires_grad=True), [0, 0]).sum().backward()
    flush(module)
    assert (stacked(module) == 7).all() and all(p.grad_added_to_main_grad for p in weights(module))


# The protocol ---------------------------------------------------------------------------------------------------------


class Reducer:
    """What Megatron's DDP does with each parameter: attributes, and a hook after AccumulateGrad."""

    def __init__(self, module: mr.GroupedLinear, *, zero_out: bool = False) -> None:
        self.calls: dict[int, int] = {}
        self.flat = give(module)
        self.nodes = []
        for i, p in enumerate(weights(module)):
            p.grad_added_to_main_grad = False
            p.zero_out_wgrad = zero_out
            if getattr(p, "skip_backward_post_hook", False):
                module.register_wgrad_accumulation_and_reduce_hooks(self.hook(p, i))
                continue
            node = p.expand_as(p).grad_fn.next_functions[0][0]
            node.register_hook(self.hook(p, i))
            self.nodes.append(node)

    def hook(self, p: Any, index: int) -> Callable[..., None]:
        def ready(*_: Any) -> None:
            assert p.grad is not None, "a reducer that overlaps asserts this"
            if not p.grad_added_to_main_grad or p.zero_out_wgrad:
                p.main_grad.add_(p.grad)
            p.grad = None
            self.calls[index] = self.calls.get(index, 0) + 1

        return ready


@pytest.mark.parametrize("zero_out", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reducer_that_waits_for_grad_gets_zeros(layout: str, schedule: str, zero_out: bool) -> None:
    module = layer(3, 2, 1, schedule=schedule, single_grouped_weight=LAYOUTS[layout])
    reducer = Reducer(module, zero_out=zero_out)
    for iteration in range(2):
        for _ in range(2):
            with nan_filled_memory():
                module(torch.tensor(X), ROWS).backward(torch.tensor(DY))
        flush(module)
        assert stacked(module)[:, 0].tolist() == [[8, 12], [0, 0], [20, 24]]
        assert all(p.grad is None and p.grad_added_to_main_grad for p in weights(module))
        each = 1 if schedule == "deferred" else 2
        assert reducer.calls == dict.fromkeys(range(len(weights(module))), each * (iteration + 1))
        reducer.flat.zero_()
        for p in weights(module):
            p.grad_added_to_main_grad = False


def test_a_reducer_that_comes_later_is_noticed() -> None:
    """First alone, with a flag of our own; then a reducer puts its flag there, and waits."""
    module = layer(3, 2, 1)
    give(module)
    for _ in range(2):
        module(torch.tensor(X), ROWS).backward(torch.tensor(DY))
        assert module.weight.grad is None
    Reducer(module)
    for _ in range(2):
        module(torch.tensor(X), ROWS).backward(torch.tensor(DY))
    assert stacked(module)[:, 0].tolist() == [[8, 12], [0, 0], [20, 24]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_buffer_made_when_first_needed(layout: str) -> None:
    module = layer(3, 2, 1, single_grouped_weight=LAYOUTS[layout])
    made: dict[int, Tensor] = {}
    for p in weights(module):
        p.get_main_grad = lambda p=p: made.setdefault(id(p), torch.zeros(p.shape))
    module(torch.tensor(X), ROWS)
    assert not made
    for _ in range(2):
        module(torch.tensor(X), ROWS).backward(torch.tensor(DY))
    assert torch.cat([g.view(-1, 2) for g in made.values()]).tolist() == [[8, 12], [0, 0], [20, 24]]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_buffer(layout: str, schedule: str) -> None:
    module = layer(3, 2, 1, schedule=schedule, single_grouped_weight=LAYOUTS[layout])

    def run() -> None:
        module(torch.tensor(X), ROWS).backward(torch.tensor(DY))
        flush(module)

    name = "weight" if LAYOUTS[layout] else "weight0"
    with pytest.raises(RuntimeError, match=rf"{name} of GroupedLinear.*has none: expected a tensor of shape"):
        run()
    assert all(p.grad is None for p in weights(module))


@pytest.mark.parametrize(
    "buffer", [torch.zeros(3, 2), torch.zeros(6), torch.zeros(3, 1, 2, dtype=torch.float64)], ids=["2d", "flat", "f64"]
)
def test_a_buffer_that_does_not_fit(buffer: Tensor) -> None:
    module = layer(3, 2, 1)
    module.weight.main_grad = buffer  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RuntimeError, match=r"main_grad of weight of .* must be float32 .* of shape \(3, 1, 2\), got"):
        module(torch.tensor(X), ROWS).backward(torch.tensor(DY))
    assert not buffer.any()


def test_a_buffer_of_the_weights_dtype() -> None:
    module = layer(3, 2, 1, dtype=torch.bfloat16)
    give(module, 7.0, torch.bfloat16)
    module(torch.tensor(X).bfloat16(), ROWS).backward(torch.tensor(DY).bfloat16())
    assert stacked(module)[:, 0].tolist() == [[11, 13], [7, 7], [17, 19]]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_second_derivative_does_not_make_the_buffer_require_one() -> None:
    module = layer(3, 2, 1)
    flat = give(module)
    x_RD = torch.tensor(X, requires_grad=True)
    module(x_RD, ROWS).square().sum().backward(create_graph=True)
    assert not flat.requires_grad and not stacked(module).requires_grad and flat.any()


# The same bits --------------------------------------------------------------------------------------------------------


def run(schedule: str, layout: str, recipe: str, *, stored: bool, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """main_grad after two microbatches, poisoned tails and memory."""
    with mr.quantized_model_init(stored, RECIPES[recipe]):
        module = layer(4, 32, 64, schedule=schedule, single_grouped_weight=LAYOUTS[layout], dtype=dtype)
    give(module, 0.5)
    for index, splits in enumerate(([5, 0, 7, 4], [0, 0, 16, 0])):
        generator = torch.Generator().manual_seed(index)
        x_RD, dy_RF = (torch.randn(16, n, generator=generator).to(dtype) for n in (32, 64))
        torch.manual_seed(index)
        with mr.autocast(recipe=RECIPES[recipe]), nan_filled_memory():
            module(with_nan_tail(x_RD, 2), splits).backward(with_nan_tail(dy_RF, 2))
    flush(module)
    assert all(p.grad is None for p in weights(module))
    return stacked(module)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_schedule_and_layout_gives_the_same_bits(recipe: str, layout: str, schedule: str) -> None:
    for stored in (False,) if recipe == "high" else (False, True):
        got = run(schedule, layout, recipe, stored=stored)
        assert got.isfinite().all() and torch.equal(got, run("inline", "packed", recipe, stored=stored))


@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_is_grad_added_in_fp32(recipe: str) -> None:
    """The gradients of the two microbatches, each as `.grad` would have it, added in float32."""
    module = layer(4, 32, 64, fused=False, dtype=torch.bfloat16)
    expected = torch.full((4, 64, 32), 0.5)
    for index, splits in enumerate(([5, 0, 7, 4], [0, 0, 16, 0])):
        generator = torch.Generator().manual_seed(index)
        x_RD, dy_RF = (torch.randn(16, n, generator=generator).bfloat16() for n in (32, 64))
        torch.manual_seed(index)
        with mr.autocast(recipe=RECIPES[recipe]):
            module(x_RD, splits).backward(dy_RF)
        expected += module.weight.grad
        module.weight.grad = None
    assert torch.equal(run("inline", "packed", recipe, stored=False), expected)


def test_recompute_adds_once() -> None:
    module = layer(3, 2, 1)
    give(module)
    x_RD = torch.tensor(X, requires_grad=True)
    checkpoint(lambda x: module(x, ROWS), x_RD, use_reentrant=False).backward(torch.tensor(DY))
    assert stacked(module)[:, 0].tolist() == [[4, 6], [0, 0], [10, 12]]


def test_a_layer_called_twice_in_one_backward() -> None:
    for schedule in SCHEDULES:
        module = layer(3, 2, 1, schedule=schedule)
        give(module)
        y = module(torch.tensor(X), ROWS) + module(torch.tensor(X), ROWS)
        y.backward(torch.tensor(DY))
        flush(module)
        assert stacked(module)[:, 0].tolist() == [[8, 12], [0, 0], [20, 24]]


def test_a_copied_module_adds_to_its_own() -> None:
    module = layer(3, 2, 1)
    give(module)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        give(twin)
        twin(torch.tensor(X), ROWS).backward(torch.tensor(DY))
        assert stacked(twin).any() and not stacked(module).any()
        assert not hasattr(module.weight, "grad_added_to_main_grad")


@pytest.mark.parametrize("flag", ["none", "reducer's"])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "mxfp8"])
def test_master_weights_step_from_it(kind: str, flag: str) -> None:
    """An optimizer that looked at `.grad` alone would never train these weights, and not say so."""
    trained = []
    for fused in (True, False):
        with mr.quantized_model_init(kind == "mxfp8", RECIPES["mxfp8"]):
            module = layer(4, 32, 64, fused=fused, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
        flat = give(module)
        if fused and flag != "none":
            module.weight.grad_added_to_main_grad = False  # pyright: ignore[reportAttributeAccessIssue]
        optimizer = mr.optim.MasterWeights(torch.optim.AdamW, module.parameters(), lr=0.1, foreach=False)
        before = module.weight.detach().clone()
        for index in range(3):
            generator = torch.Generator().manual_seed(index)
            x_RD = torch.randn(16, 32, generator=generator).to(module.weight.dtype)
            module(x_RD, [5, 0, 7, 4]).sum().backward()
            optimizer.step()
            flat.zero_()
            optimizer.zero_grad()
        values = [w.dequantize() if hasattr(w, "records") else w for w in (before, module.weight.detach())]
        assert not torch.equal(*values) and module.weight.grad is None
        trained.append(values[1])
    assert torch.equal(*trained)


# Reducers of `.grad` --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """One gloo rank."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_torchs_ddp_is_refused_at_the_first_forward() -> None:
    model = _Model()
    flat = give(model.experts)
    with pytest.raises(RuntimeError, match=r"DDP reduces \.grad of the weight.*fuse_wgrad_accumulation=False"):
        DistributedDataParallel(model)(torch.tensor(X))
    assert not flat.any()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["experts.weight"])
    DistributedDataParallel(model)(torch.tensor(X)).backward(torch.tensor(DY))
    assert flat.any(), "whoever told DDP to ignore it reduces main_grad"


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(2, 2), layer(3, 2, 1)

    def forward(self, x_RD: Tensor) -> Tensor:
        return self.experts(self.first(x_RD), ROWS)


def test_reducers_of_grad_are_refused() -> None:
    module = layer(3, 2, 1, schedule="deferred")
    buckets = GradientBuckets(weights(module), group=None, scale=1.0, should_reduce=lambda: True, on_gradient=False)
    coordinator: Any = module.wgrad_coordinator
    for reduce in (lambda: coordinator.reduce_with_buckets(buckets), lambda: coordinator.reduce_with_fsdp(module)):
        with pytest.raises(ValueError, match="accumulates into main_grad, which nothing here would reduce"):
            reduce()
