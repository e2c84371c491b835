"""What ranks run for test_parallel.py and test_checkpoint.py."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import moe_runtime as mr
from moe_runtime import checkpoint
from moe_runtime.checkpoint import tensors
from moe_runtime.comm.layout import layout_of
from moe_runtime.core.errors import CheckpointError
from moe_runtime.integrations import transformers as hf
from moe_runtime.optim import clip_grad_norm_
from moe_runtime.parallel import gradient_sync
from moe_runtime.precision import Recipe

FIELDS: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
}
TOKENS = 16


def build(
    data: str,
    expert: int,
    *,
    replicate: int = 1,
    discrete: bool = False,
    recipe: Recipe | None = None,
    dtype: torch.dtype | None = None,
    bf16: bool = False,
    **fields: Any,
) -> nn.Module:
    """A small Qwen3-MoE, distributed and initialized from seed 5; `recipe` stores its experts, `bf16` computes so."""
    config = hf.load_config(model_type="qwen3_moe", fields={**FIELDS, **fields})
    with mr.quantized_model_init(recipe is not None, recipe, preserve_high_precision_init_val=True):
        model = hf.build(config, single_grouped_weight=not discrete, dtype=dtype)
    plan = mr.ParallelPlan(
        data=data,  # pyright: ignore[reportArgumentType]
        expert=expert,
        replicate=replicate,
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32 if bf16 else None,
    )
    if data == "fsdp2":
        wrapped = mr.distribute(model, plan)
        hf.initialize(model, seed=5, device=torch.device("cpu"))
        return wrapped
    hf.initialize(model, seed=5, device=torch.device("cpu"))
    return mr.distribute(model, plan)


def batch(step: int, microbatch: int, num_microbatches: int) -> Tensor:
    """This rank's rows of a global microbatch of 4 sequences, the same rows whatever the number of ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    rows = torch.randint(0, FIELDS["vocab_size"], (4, TOKENS), generator=generator)
    count = 4 // world
    return rows[rank * count : (rank + 1) * count]


def backward(model: nn.Module, step: int, num_microbatches: int = 1) -> float:
    """Forward and backward of one global batch; returns the global loss."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    total = torch.zeros((), dtype=torch.float64)
    for index in range(num_microbatches):
        ids = batch(step, index, num_microbatches)
        with gradient_sync(model, last=index == num_microbatches - 1):
            logits = model(input_ids=ids, use_cache=False).logits.float()
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            loss = loss / (4 * (TOKENS - 1) * num_microbatches)
            (loss * world).backward()
        total += loss.detach().double()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item()


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every gradient as one tensor over all experts, by its name in checkpoints."""
    layout, found = layout_of(model), {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        key, value = tensors.global_view(name.removeprefix("module."), parameter.grad, layout)
        found[key] = whole(value)
    return {name: value.clone() for name, value in found.items()}


def whole(value: Tensor) -> Tensor:
    """The full tensor, gathered one mesh axis at a time: torch 2.11 cannot gather both axes of our mesh at once."""
    if not isinstance(value, DTensor):
        return value
    for axis in reversed(range(value.device_mesh.ndim)):
        placements = list(value.placements)
        placements[axis] = Replicate()
        value = value.redistribute(placements=placements)
    return value.to_local()


def train(
    data: str, expert: int, replicate: int, discrete: bool, num_microbatches: int
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and norms of 3 SGD steps, and every gradient of the first."""
    model = build(data, expert, replicate=replicate, discrete=discrete)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    losses, norms, gradients = [], [], {}
    for step in range(3):
        losses.append(backward(model, step, num_microbatches))
        gradients = gradients or full_gradients(model)
        norms.append(clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients


def save(folder: str, data: str, expert: int, discrete: bool) -> dict[str, Tensor]:
    """Two AdamW steps, a checkpoint, one more step; the state after it, whole."""
    model = build(data, expert, discrete=discrete)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for step in range(2):
        _adam_step(model, optimizer, step)
    checkpoint.save(Path(folder), 2, model, optimizer, {"note": "two steps"})
    return state(model, optimizer)


def load(folder: str, data: str, expert: int, discrete: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a fresh model and optimizer hold after loading the newest checkpoint."""
    model = build(data, expert, discrete=discrete)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    found = checkpoint.latest(Path(folder))
    assert found is not None
    facts = checkpoint.load(found, model, optimizer)
    return state(model, optimizer), facts


def load_other_model(folder: str, data: str, expert: int) -> str:
    """The sentence for a checkpoint of a model with other sizes."""
    model = build(data, expert, hidden_size=40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    found = checkpoint.latest(Path(folder))
    assert found is not None
    try:
        checkpoint.load(found, model, optimizer)
    except CheckpointError as error:
        return str(error)
    return ""


def _adam_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    backward(model, step)
    optimizer.step()
    optimizer.zero_grad()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every entry of a checkpoint, whole."""
    entries = {**tensors.model_tensors(model), **tensors.optimizer_tensors(model, optimizer)}
    return {name: whole(value).detach().clone() for name, value in entries.items()}


class Layer(nn.Module):
    """A dense layer and routed experts, for cases that need no language model."""

    def __init__(self, num_experts: int, activation: str = "swiglu", *, fused: bool = False) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.experts = mr.RoutedExperts(
            mr.RoutedExpertsConfig(
                num_experts=num_experts,
                hidden_size=4,
                intermediate_size=4,
                activation=activation,  # pyright: ignore[reportArgumentType]
                fuse_wgrad_accumulation=fused,
            )
        )

    def forward(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        return self.experts(x_TD, ids_TK, gates_TK) + 0 * self.dense(x_TD)


def scalar_expert_gradient(expert: int, data: str, values: list[float]) -> float:
    """D1 of the field's faults: one weight, local loss = w * x, every token to expert 0; the weight's gradient."""
    model = Layer(2, "relu2")
    with torch.no_grad():
        for linear in (model.experts.experts.gate_up, model.experts.experts.down):
            linear.weight.copy_(torch.eye(4).expand(2, 4, 4))
    wrapped = mr.distribute(model, mr.ParallelPlan(data=data, expert=expert))  # pyright: ignore[reportArgumentType]
    # relu(sqrt(x))^2 is x, so the output's first column is w * x with w = down.weight[0, 0, 0] = 1.
    x_TD = torch.zeros(1, 4)
    x_TD[0, 0] = values[dist.get_rank()] ** 0.5
    y_TD = wrapped(x_TD, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    y_TD[:, 0].mean().backward()
    return full_gradients(wrapped)["experts.experts.down.weight"][0, 0, 0].item()


def expert_norm(data: str, expert: int, empty: bool) -> tuple[float, float]:
    """D2: squared expert gradients of 20 and 100 on the two expert ranks; (norm, factor that clipping to 1 applied)."""
    model = Layer(2)
    wrapped = mr.distribute(model, mr.ParallelPlan(data=data, expert=expert))  # pyright: ignore[reportArgumentType]
    layout = layout_of(wrapped)
    for name, parameter in wrapped.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        if name.endswith("experts.down.weight"):
            square = (0.0 if empty else 20.0, 100.0)[layout.expert_rank]
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            later_shard = isinstance(gradient, DTensor) and gradient.device_mesh.get_local_rank() > 0
            local.view(-1)[0] = 0.0 if later_shard else square**0.5
    norm = clip_grad_norm_(wrapped, 1.0).item()
    gradients = full_gradients(wrapped)
    return norm, gradients["experts.experts.down.weight"].max().item() / 10.0


def accumulated_in_ddp() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Expert gradients of two microbatches under no_sync then sync, and the mean of two synchronized backwards."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    wrapped = mr.distribute(Layer(2), mr.ParallelPlan(data="ddp", expert=2))
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(3, 4, generator=generator) for _ in range(2)]
    # Rank 0 never sends anything to expert 1: its parameters must take part all the same.
    ids_TK = torch.zeros(3, 1, dtype=torch.int64)

    def run(index: int) -> None:
        wrapped(batches[index], ids_TK, torch.ones(3, 1)).square().sum().backward()

    with wrapped.no_sync():  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        run(0)
    run(1)
    together = full_gradients(wrapped)
    apart: dict[str, Tensor] = {}
    for index in range(2):
        wrapped.zero_grad()
        run(index)
        for name, value in full_gradients(wrapped).items():
            apart[name] = apart[name] + value if name in apart else value
    return together, apart


def routed(expert: int, case: str) -> dict[str, Tensor]:
    """Output and gradients of RoutedExperts on a hostile routing, gathered over ranks; `expert` 1 is one process."""
    torch.manual_seed(0)
    config = mr.RoutedExpertsConfig(num_experts=4, hidden_size=16, intermediate_size=8)
    module = mr.RoutedExperts(config)
    rank, world = (dist.get_rank(), dist.get_world_size()) if expert > 1 else (0, 1)
    ids_TK = {
        "all_to_expert_0": torch.zeros(8, 2, dtype=torch.int64),
        "dropped": torch.tensor([[0, -1], [-1, -1], [3, 1], [2, -1], [-1, 0], [1, 2], [-1, -1], [3, 0]]),
        "mixed": torch.randint(0, 4, (8, 2)),
        "none": torch.full((8, 2), -1),
    }[case]
    x_TD, gates_TK, dy_TD = torch.randn(8, 16), torch.rand(8, 2), torch.randn(8, 16)
    gates_TK = torch.where(ids_TK < 0, torch.full_like(gates_TK, float("nan")), gates_TK)
    part = slice(rank * 8 // world, (rank + 1) * 8 // world)
    if expert > 1:
        module.shard_experts(dist.group.WORLD)
    x = x_TD[part].clone().requires_grad_()
    gates = gates_TK[part].clone().requires_grad_()
    y = module(x, ids_TK[part], gates)
    y.backward(dy_TD[part])
    found = {"y": y.detach(), "dx": x.grad, "dgates": gates.grad}
    found |= {name: p.grad for name, p in module.named_parameters()}
    return {name: _gathered(value, world) for name, value in found.items()}


def _gathered(value: Tensor | None, world: int) -> Tensor:
    assert value is not None
    if world == 1:
        return value
    parts = [torch.empty_like(value) for _ in range(world)]
    dist.all_gather(parts, value.contiguous())
    return torch.cat(parts)


def refusals() -> list[str]:
    """Sentences for plans that do not fit, from every rank, before any collective."""
    found = []
    for plan, experts, *fused in (
        ({"data": "none"}, 4),
        ({"data": "fsdp2", "replicate": 3}, 4),
        ({"data": "fsdp2", "expert": 3}, 4),
        ({"data": "fsdp2", "expert": 2}, 3),
        ({"data": "fsdp2", "expert": 2}, 0),
        ({"data": "ddp", "expert": 2}, 4, True),
    ):
        model: nn.Module = nn.Linear(4, 4)
        if experts:
            model = Layer(experts, fused=bool(fused))
        try:
            mr.distribute(model, mr.ParallelPlan(**plan))
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("")
    return found


def values_after_wrap() -> dict[str, Tensor]:
    """D7: expert weights 1 and 2 by expert id, dense weights that differ by rank; what a rank holds after wrapping."""
    model = Layer(2)
    with torch.no_grad():
        model.dense.weight.fill_(float(dist.get_rank()))
        for linear in (model.experts.experts.gate_up, model.experts.experts.down):
            linear.weight[0].fill_(1.0)
            linear.weight[1].fill_(2.0)
    wrapped = mr.distribute(model, mr.ParallelPlan(data="ddp", expert=2))
    return {name.removeprefix("module."): p.detach().clone() for name, p in wrapped.named_parameters()}
