"""What ranks run for test_wgrad.py: a small model trained twice, once inline and once by another schedule."""

# T tokens   D model width   K top-k

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moe_runtime as mr
from moe_runtime.comm.all_to_all import Exchange
from moe_runtime.nn import GroupedLinear
from moe_runtime.optim import clip_grad_norm_
from moe_runtime.parallel import coordinator_of, gradient_sync
from moe_runtime.runtime import GradientBuckets, WgradSlot
from moe_runtime.runtime.jobs import JobKey
from moe_runtime.tensor import QuantizedTensor

EXPERTS, WIDTH, TOKENS, TOP_K, STEPS = 6, 32, 6, 2, 5
MXFP8 = mr.recipes.MXFP8BlockScaling()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the product; the fields are its axes."""

    schedule: str = "deferred"
    data: str = "none"
    world: int = 1
    microbatches: int = 1
    precision: str = "fp32"
    checkpointing: bool = False
    discrete: bool = False
    expert: int = 1
    budget_bytes: int | None = None
    bias: bool = False
    weights: str = "plain"

    def __str__(self) -> str:
        words = [self.schedule, self.data, f"w{self.world}", f"m{self.microbatches}", self.precision, f"e{self.expert}"]
        words += ["ckpt"] * self.checkpointing + ["discrete"] * self.discrete + ["bias"] * self.bias
        words += [self.weights] * (self.weights != "plain")
        words += [] if self.budget_bytes is None else [f"budget{self.budget_bytes}"]
        return "-".join(words)


class Block(nn.Module):
    """x + experts(linear(x)), gates from the linear layer as well."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.checkpointing = case.checkpointing
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = mr.RoutedExperts(
            mr.RoutedExpertsConfig(
                num_experts=EXPERTS,
                hidden_size=WIDTH,
                intermediate_size=WIDTH,
                single_grouped_weight=not case.discrete,
                delay_wgrad_compute=case.schedule == "deferred",
                bias=case.bias,
            )
        )

    def forward(self, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
        if self.checkpointing:
            out_TD = checkpoint(self._layer, x_TD, ids_TK, use_reentrant=False, context_fn=mr.recompute_context_fn)
            assert isinstance(out_TD, Tensor)
            return x_TD + out_TD
        return x_TD + self._layer(x_TD, ids_TK)

    def _layer(self, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
        h_TD = self.dense(x_TD)
        return self.experts(h_TD, ids_TK, h_TD[:, :TOP_K].sigmoid())


class Model(nn.Module):
    """Two blocks."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(case) for _ in range(2))

    def forward(self, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
        for block in self.blocks:
            x_TD = block(x_TD, ids_TK)
        return x_TD


def build(case: Case, *, reference_reducer: bool = False) -> nn.Module:
    """The model of a case, wrapped; `reference_reducer`: inline, but reduced in the pieces of the deferred schedule."""
    torch.manual_seed(7)
    with mr.quantized_model_init(case.weights == "mxfp8", MXFP8, preserve_high_precision_init_val=True):
        model = Model(case)
    half = case.precision == "bf16"
    if half and case.data != "fsdp2":
        model.to(torch.bfloat16)
    if reference_reducer and case.expert == 1 and case.data != "none":
        return _inline_in_pieces(model, case)
    coordinator = mr.WgradCoordinator(case.schedule, case.budget_bytes)  # pyright: ignore[reportArgumentType]
    return mr.distribute(model, plan_of(case), coordinator)


def plan_of(case: Case) -> mr.ParallelPlan:
    """bf16 under FSDP2 is its mixed precision: bf16 parameters, fp32 reduction."""
    mixed = case.precision == "bf16" and case.data == "fsdp2"
    return mr.ParallelPlan(
        data=case.data,  # pyright: ignore[reportArgumentType]
        expert=case.expert,
        param_dtype=torch.bfloat16 if mixed else None,
        reduce_dtype=torch.float32 if mixed else None,
    )


def _inline_in_pieces(model: Model, case: Case) -> nn.Module:
    """Without expert parallelism, torch reduces expert weights together with dense ones; here, apart from them.

    With three or more ranks the sum of a bucket depends, in its last bit, on what else is in it.
    """
    if case.data == "fsdp2":
        plan = plan_of(case)
        policy = MixedPrecisionPolicy(param_dtype=plan.param_dtype, reduce_dtype=plan.reduce_dtype)
        for block in model.blocks:
            fully_shard(block.experts, mp_policy=policy, shard_placement_fn=_placement)
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)
    ours = [name for name, _ in model.named_parameters() if ".experts." in name and "weight" in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ours)
    wrapped = DistributedDataParallel(model)
    GradientBuckets(
        [p for name, p in model.named_parameters() if name in ours],
        group=dist.group.WORLD,
        scale=1.0 / case.world,
        should_reduce=lambda: wrapped.require_backward_grad_sync,
    )
    return wrapped


def _placement(parameter: nn.Parameter) -> Shard:
    return Shard(1 if parameter.dim() == 3 and parameter.shape[0] % dist.get_world_size() else 0)


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def batch(case: Case, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    """Tokens and expert ids of this rank; one expert gets nothing in each microbatch, expert 0 on rank 0 never does."""
    rank, _ = rank_and_world()
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    x_TD = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    ids_TK = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    ids_TK[ids_TK == (step + microbatch) % EXPERTS] = -1
    if rank == 0:
        ids_TK[ids_TK == 0] = 1
    return x_TD, ids_TK


def backward(model: nn.Module, case: Case, step: int) -> None:
    """Every microbatch of one step."""
    for index in range(case.microbatches):
        x_TD, ids_TK = batch(case, step, index)
        with gradient_sync(model, last=index == case.microbatches - 1):
            with mr.autocast(case.weights == "mxfp8", MXFP8):
                loss = model(x_TD, ids_TK).float().square().mean()
            loss.backward()


def train(case: Case, model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The gradients of each of 5 steps, and at last the weights."""
    options = {"lr": 0.25, "momentum": 0.9, "foreach": False}
    optimizer: torch.optim.Optimizer
    if case.weights == "mxfp8":
        optimizer = mr.optim.MasterWeights(torch.optim.SGD, model.parameters(), **options)
    else:
        optimizer = torch.optim.SGD(model.parameters(), **options)
    coordinator = coordinator_of(model)
    if coordinator is not None:
        coordinator.guard(optimizer)
    for step in range(STEPS):
        backward(model, case, step)
        if coordinator is not None:
            coordinator.flush()
        found = gradients(model)
        if case.data == "none" or coordinator is not None:
            found["norm"] = clip_grad_norm_(model, 1e3)
        yield found
        optimizer.step()
        optimizer.zero_grad()
    yield values(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every gradient, whole over its shards."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name.removeprefix("module.")] = whole(parameter.grad)
    return found


def values(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every weight, of a quantized one each of its tensors."""
    found = {}
    for name, parameter in model.named_parameters():
        value = whole(parameter)
        parts = value.records.tensors() if isinstance(value, QuantizedTensor) else {"": value}
        found |= {f"{name.removeprefix('module.')}{part and '.'}{part}": tensor for part, tensor in parts.items()}
    return found


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def compare(case: Case) -> list[str]:
    """Where a case and the inline schedule with the same reducer differ: a line for each differing tensor of each step.

    At two ranks the inline run is exactly what `distribute` makes: a sum of two has one order. At three and four it is
    reduced in the same pieces as the deferred one, which the late one never needs.
    """
    pieces = case.world > 2 and case.schedule == "deferred"
    return differences(case, build(case), inline_run(replace(case, schedule="inline", budget_bytes=None), pieces))


@cache
def inline_run(case: Case, pieces: bool = False) -> list[dict[str, Tensor]]:
    """What `train` yields inline; kept, since many cases are compared with one."""
    return list(train(case, build(case, reference_reducer=pieces)))


def differences(case: Case, model: nn.Module, inline: list[dict[str, Tensor]]) -> list[str]:
    lines = []
    for step, (got, expected) in enumerate(zip(train(case, model), inline, strict=True)):
        for name, value in expected.items():
            if name in got and (got[name].dtype, got[name].shape) != (value.dtype, value.shape):
                lines.append(f"step {step}: {name} is {got[name].dtype} {tuple(got[name].shape)}")
            elif name == "norm" and name not in got:
                continue
            elif not torch.equal(got[name], value):
                worst = (got[name].double() - value.double()).abs().max().item()
                lines.append(f"step {step}: {name} differs by {worst:.1e}")
        for name, value in expected.items():
            # One separate expert may have no rows.
            assert value.isfinite().all() and (value.any() or name[-1].isdigit()), f"step {step}: {name} tests nothing"
    return lines


class Naive:
    """What not to do: computes weight gradients after backward and adds them to `.grad`, and tells nobody."""

    schedule = "deferred"

    def __init__(self, model: nn.Module) -> None:
        self.weights: dict[str, Tensor] = {}
        self.jobs: list[tuple[str, Callable[[], Tensor]]] = []
        self.modules = {name: m for name, m in model.named_modules() if isinstance(m, GroupedLinear)}
        for name, module in self.modules.items():
            module.own_wgrad(self, name)  # pyright: ignore[reportArgumentType]

    def slot(self, module: str, parameter: str) -> WgradSlot:
        # The parameter of this forward: under FSDP2 the gathered one.
        self.weights[module] = self.modules[module].weight
        return WgradSlot(self, JobKey(module, parameter, 0, 0))  # pyright: ignore[reportArgumentType]

    def accept(self, key: JobKey, compute: Callable[[], Tensor], operands: tuple[Tensor, ...]) -> None:
        self.jobs.append((key.module, compute))

    def check_nothing_pending(self, action: str) -> None:
        pass

    def flush(self) -> None:
        for module, compute in self.jobs:
            weight, gradient = self.weights[module], compute()
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
        self.jobs.clear()


def naive(data: str) -> tuple[list[list[str]], dict[str, Tensor]]:
    """Steps without an update: where the naive gradients differ from the inline ones of [this step, the step before].

    Also the last gradients themselves.
    """
    case = Case(schedule="inline", data=data, world=dist.get_world_size())
    inline, planted = build(case), build(case)
    owner = Naive(planted.module if isinstance(planted, DistributedDataParallel) else planted)
    found: list[list[str]] = [[], []]
    before: dict[str, Tensor] = {}
    got: dict[str, Tensor] = {}
    for step in range(3):
        backward(inline, case, step)
        backward(planted, case, step)
        owner.flush()
        expected = gradients(inline)
        got = {name: whole(p.grad) for name, p in planted.named_parameters() if p.grad is not None}
        got = {name.removeprefix("module."): value for name, value in got.items()}
        for lines, reference in zip(found, (expected, before), strict=True):
            lines += [f"{step}:{name}" for name, value in reference.items() if not _same(got.get(name), value)]
        before = expected
        inline.zero_grad()
        planted.zero_grad()
    return found, got


def _same(got: Tensor | None, expected: Tensor) -> bool:
    return got is not None and torch.equal(got, expected)


def drift(data: str) -> str:
    """The sentence for a deferred model that the user wraps without `distribute`."""
    case = Case(schedule="deferred")
    model = Model(case)
    coordinator = mr.WgradCoordinator("deferred").attach(model)
    wrapped = DistributedDataParallel(model) if data == "ddp" else fully_shard(model)
    x_TD, ids_TK = batch(case, 0, 0)
    try:
        wrapped(x_TD, ids_TK).square().mean().backward()
        coordinator.flush()
    except RuntimeError as error:
        return str(error)
    return ""


def without_coordinator(data: str) -> str:
    """The sentence for delayed layers that no coordinator was attached to, wrapped, then asked for their gradients."""
    case = Case(schedule="deferred")
    model = Model(case)
    wrapped = DistributedDataParallel(model) if data == "ddp" else fully_shard(model)
    x_TD, ids_TK = batch(case, 0, 0)
    try:
        wrapped(x_TD, ids_TK).square().mean().backward()
        for module in model.modules():
            if isinstance(module, GroupedLinear):
                module.backward_dw()
    except RuntimeError as error:
        return str(error)
    return ""


def whole_model_sync() -> str:
    """The sentence for switching reduction of every unit on, deferred ones included, behind the coordinator's back."""
    case = Case(data="fsdp2", world=dist.get_world_size())
    model = build(case)
    model.set_requires_gradient_sync(True)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    x_TD, ids_TK = batch(case, 0, 0)
    try:
        model(x_TD, ids_TK).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def scalar_average(data: str) -> list[float]:
    """E6: rank 0 uses expert 0 only (x = 2), rank 1 expert 1 only (x = 4); dW[0, 0] of both experts, deferred."""
    model = nn.ModuleDict({"dense": nn.Linear(4, 4), "experts": _one_layer()})
    coordinator = mr.WgradCoordinator("deferred")
    wrapped = mr.distribute(_Scalar(model), mr.ParallelPlan(data=data), coordinator)  # pyright: ignore[reportArgumentType]
    rank, _ = rank_and_world()
    x_TD = torch.zeros(1, 4)
    x_TD[0, 0] = (2.0, 4.0)[rank]
    wrapped(x_TD, torch.full((1, 1), rank), torch.ones(1, 1))[:, 0].sum().backward()
    coordinator.flush()
    found = gradients(wrapped)
    return [found["experts.experts.down.weight"][e, 0, 0].item() for e in range(2)]


class _Scalar(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.dense, self.experts = parts["dense"], parts["experts"]

    def forward(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        # relu(sqrt(x))^2 is x, so that the second weight sees x itself.
        return self.experts(x_TD.sqrt(), ids_TK, gates_TK) + 0 * self.dense(x_TD)


def _one_layer() -> mr.RoutedExperts:
    config = mr.RoutedExpertsConfig(
        num_experts=2, hidden_size=4, intermediate_size=4, activation="relu2", delay_wgrad_compute=True
    )
    layer = mr.RoutedExperts(config)
    with torch.no_grad():
        for linear in (layer.experts.gate_up, layer.experts.down):
            linear.weight.copy_(torch.eye(4).expand(2, 4, 4))
    return layer


def after_a_failed_microbatch(case: Case) -> list[str]:
    """Training after a backward that raised halfway on all ranks, and `abort`.

    Under DDP in a microbatch that is not reduced, for torch's DDP itself refuses to go on after a failure in one that
    is; under FSDP2 in one that is reduced, for `reset_iter_state` keeps what was accumulated in others.
    """
    model, clean = build(case), inline_run(replace(case, schedule="inline", budget_bytes=None))
    coordinator = coordinator_of(model)
    assert coordinator is not None
    x_TD, ids_TK = batch(case, 99, 0)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    dense = inner.blocks[0].dense  # pyright: ignore
    handle = dense.register_forward_hook(lambda _module, _inputs, out_TD: out_TD.register_hook(_raise) and None)
    with gradient_sync(model, last=case.data == "fsdp2"):
        out_TD = model(x_TD, ids_TK)
        try:
            out_TD.float().square().mean().backward()
        except ArithmeticError:
            pass
        else:
            raise AssertionError("the planted exception did not come")
    handle.remove()
    coordinator.abort()
    model.zero_grad()
    if case.data == "fsdp2":
        model.reset_iter_state()  # pyright: ignore
    return differences(case, model, clean)


def _raise(gradient: Tensor) -> None:
    raise ArithmeticError("planted")


def after_an_abort(case: Case) -> list[str]:
    """Training after two microbatches, each reduced, whose deferred gradients are dropped when some were placed."""
    model, clean = build(case), inline_run(replace(case, schedule="inline", budget_bytes=None))
    coordinator = coordinator_of(model)
    assert coordinator is not None
    for index in range(2):
        x_TD, ids_TK = batch(case, 99, index)
        model(x_TD, ids_TK).float().square().mean().backward()
    assert coordinator.abort() > 0
    model.zero_grad()
    return differences(case, model, clean)


def two_backwards_without_no_sync(schedule: str) -> list[str]:
    """Under DDP with expert parallelism: accumulated over two reduced backwards, against their separate sums."""
    case = Case(schedule=schedule, data="ddp", world=dist.get_world_size(), expert=2)
    model, apart = build(case), build(case)
    sums: dict[str, Tensor] = {}
    for index in range(2):
        for wrapped in (model, apart):
            x_TD, ids_TK = batch(case, 0, index)
            wrapped(x_TD, ids_TK).square().mean().backward()
            coordinator = coordinator_of(wrapped)
            assert coordinator is not None
            coordinator.flush()
        for name, value in gradients(apart).items():
            sums[name] = sums[name] + value if name in sums else value
        apart.zero_grad()
    got = gradients(model)
    return [name for name, value in sums.items() if not torch.allclose(got[name], value, rtol=1e-5, atol=1e-7)]


def microbatch_by_microbatch(data: str) -> list[str]:
    """backward_dw after each microbatch, module by module in backward's order, against one flush."""
    case = Case(data=data, world=dist.get_world_size(), microbatches=2)
    model, flushed = build(case), build(case)
    for index in range(2):
        x_TD, ids_TK = batch(case, 0, index)
        with gradient_sync(model, last=index == 1):
            model(x_TD, ids_TK).float().square().mean().backward()
        for module in reversed(list(model.modules())):
            if isinstance(module, GroupedLinear):
                module.backward_dw()
    coordinator = coordinator_of(model)
    assert coordinator is not None
    lines = coordinator.pending()
    backward(flushed, case, 0)
    coordinator = coordinator_of(flushed)
    assert coordinator is not None
    coordinator.flush()
    got = gradients(model)
    return lines + [n for n, v in gradients(flushed).items() if not torch.allclose(got[n], v, rtol=1e-5, atol=1e-7)]


def marks_after_sharding() -> list[str]:
    """Names of delayed weights without their mark, after `distribute` and after materializing."""
    with torch.device("meta"):
        model = Model(Case())
    wrapped = mr.distribute(model, mr.ParallelPlan(data="fsdp2"), mr.WgradCoordinator("deferred"))
    lost = [f"sharded {name}" for name in _unmarked(wrapped)]
    wrapped.to_empty(device="cpu")
    return lost + [f"materialized {name}" for name in _unmarked(wrapped)]


def _unmarked(model: nn.Module) -> list[str]:
    named = {name: p for name, p in model.named_parameters() if name.endswith(("gate_up.weight", "down.weight"))}
    assert len(named) == 4
    return [name for name, p in named.items() if not getattr(p, "skip_backward_post_hook", False)]


def event_order(schedule: str) -> list[str]:
    """Exchanges and GEMMs of one backward through RoutedExperts, in the order they happen, on two ranks."""
    events: list[str] = []
    experts = sys.modules["moe_runtime.functional.moe_mlp"]

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return function(*args, **kwargs)

        return call

    config = mr.RoutedExpertsConfig(
        num_experts=2, hidden_size=8, intermediate_size=8, delay_wgrad_compute=schedule == "deferred"
    )
    module = mr.RoutedExperts(config)
    module.shard_experts(dist.group.WORLD)  # pyright: ignore[reportArgumentType]
    coordinator = mr.WgradCoordinator(schedule).attach(module)  # pyright: ignore[reportArgumentType]
    x_TD = torch.randn(4, 8, requires_grad=True)
    out_TD = module(x_TD, torch.tensor([[0, 1]] * 4), torch.rand(4, 2, requires_grad=True))
    with ExitStack() as patched:
        for owner, attribute, name in (
            (Exchange, "launch", "launch"),
            (Exchange, "finish", "wait"),
            (experts, "ragged_k_gemm_tn", "wgrad"),
            (experts, "gemm_dact", "dgrad"),
            (experts, "ragged_m_gemm_nn", "dgrad"),
        ):
            patched.enter_context(mock.patch.object(owner, attribute, recorded(name, getattr(owner, attribute))))
        out_TD.sum().backward()
        events.append("end of backward")
        if schedule == "deferred":
            coordinator.flush()
    return events
