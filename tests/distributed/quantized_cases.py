"""What ranks run for test_quantized.py."""

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_cases import backward, build, state
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import moe_runtime as mr
from moe_runtime import checkpoint
from moe_runtime.optim import clip_grad_norm_
from moe_runtime.precision import Recipe
from moe_runtime.tensor import QuantizedTensor

RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "mxfp8": mr.recipes.MXFP8BlockScaling(),
    "mxfp8 dequantized": mr.recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "nvfp4": mr.recipes.NVFP4BlockScaling(),
    "float8": mr.recipes.Float8CurrentScaling(backward_override="dequantized"),
}
FIELDS = {"moe_intermediate_size": 32}


def quantized_model(recipe: str, data: str, expert: int, **options: Any) -> nn.Module:
    """The small model of parallel_cases with experts stored by a recipe of RECIPES."""
    return build(data, expert, recipe=RECIPES[recipe], **FIELDS, **options)


def masters(model: nn.Module) -> mr.optim.MasterWeights:
    """AdamW on fp32 masters."""
    return mr.optim.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.01, foreach=False)


def train(
    recipe: str, data: str, expert: int, replicate: int, discrete: bool, bf16: bool = False
) -> tuple[list[float], list[float]]:
    """Losses and norms of 3 SGD steps on masters."""
    model = quantized_model(recipe, data, expert, replicate=replicate, discrete=discrete, bf16=bf16)
    optimizer = mr.optim.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.5, foreach=False)
    losses, norms = [], []
    for step in range(3):
        with mr.autocast(recipe=RECIPES[recipe]):
            losses.append(backward(model, step))
        norms.append(clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def one_expert_a_rank(world_plan: bool) -> list[float]:
    """Losses of 3 steps in bf16 on fp32 masters where each rank's share of experts is one, over 2 sharding ranks."""
    data, expert = ("fsdp2", 2) if world_plan else ("none", 1)
    dtype = torch.float32 if world_plan else torch.bfloat16
    model = build(data, expert, dtype=dtype, num_experts=2, bf16=world_plan, **FIELDS)
    options = {"lr": 0.5, "foreach": False}
    if world_plan:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), **options)
    else:
        optimizer = mr.optim.MasterWeights(torch.optim.SGD, model.parameters(), **options)
    losses = []
    for step in range(3):
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def save(folder: str, recipe: str, data: str, expert: int, discrete: bool) -> dict[str, Tensor]:
    """Two steps, a checkpoint; the state, whole: bytes, scales, masters, moments."""
    model = quantized_model(recipe, data, expert, discrete=discrete)
    optimizer = masters(model)
    for step in range(2):
        with mr.autocast(recipe=RECIPES[recipe]):
            backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(Path(folder), 2, model, optimizer, {})
    return state(model, optimizer)


def load(folder: str, recipe: str, data: str, expert: int, discrete: bool) -> dict[str, Tensor]:
    """What a fresh model and optimizer hold after loading the newest checkpoint."""
    model = quantized_model(recipe, data, expert, discrete=discrete)
    optimizer = masters(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter))
    found = checkpoint.latest(Path(folder))
    assert found is not None
    checkpoint.load(found, model, optimizer)
    return state(model, optimizer)


def first_masters(recipe: str, data: str, expert: int) -> dict[str, Tensor]:
    """Masters before any step, whole, and whether initial values are still held anywhere."""
    model = quantized_model(recipe, data, expert)
    optimizer = masters(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            assert not isinstance(local, QuantizedTensor) or local.get_high_precision_init_val() is None, name
    return {name: value for name, value in state(model, optimizer).items() if "experts" in name}


def refused_shard(num_experts: int, shard: int) -> str:
    """The sentence for a plan whose shard degree does not divide the experts."""
    layer = _layer(num_experts, RECIPES["mxfp8"])
    try:
        mr.distribute(layer, mr.ParallelPlan(data="fsdp2", shard=shard, replicate=dist.get_world_size() // shard))
    except ValueError as error:
        return str(error)
    return ""


def refused_separate() -> str:
    """The sentence for separate quantized weights under FSDP2."""
    try:
        quantized_model("mxfp8", "fsdp2", 2, discrete=True)
    except ValueError as error:
        return str(error)
    return ""


def gathered(recipe: str, frozen: bool) -> tuple[float, list[str]]:
    """Bytes a parameter that FSDP2 gathers of row-wise experts, and floating tensors of their shape after forward."""
    name = RECIPES[recipe]
    with mr.quantized_model_init(recipe=name, omit_columnwise_primary_weight_storage=True):
        experts = mr.RoutedExperts(mr.RoutedExpertsConfig(num_experts=4, hidden_size=64, intermediate_size=64))
    experts.requires_grad_(not frozen)
    count = sum(p.numel() for p in experts.parameters())
    shapes = {tuple(p.shape) for p in experts.parameters()}
    model = mr.distribute(nn.Sequential(nn.Linear(64, 64), _Routed(experts)), mr.ParallelPlan(data="fsdp2", expert=1))
    seen: list[int] = []
    name_of = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    original = getattr(dist, name_of)

    def counting(output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        seen.append(output_tensor.numel() * output_tensor.element_size())
        return original(output_tensor, input_tensor, *args, **options)

    setattr(dist, name_of, counting)  # what FSDP2 calls, newer torch by the first name
    try:
        with mr.autocast(recipe=name):
            y = model(torch.randn(16, 64))
        gc.collect()
        alive = [
            f"{tuple(t.shape)} {t.dtype}"
            for t in gc.get_objects()
            if type(t) is Tensor and t.is_floating_point() and tuple(t.shape) in shapes
        ]
        y.sum().backward()
    finally:
        setattr(dist, name_of, original)
    dense = sum(p.numel() * 4 for n, p in model.named_parameters() if n.startswith("0."))
    return (seen[0] - dense) / count, alive


class _Routed(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x_TD: Tensor) -> Tensor:
        ids_TK = torch.arange(x_TD.shape[0])[:, None] % 4
        return self.experts(x_TD, ids_TK, torch.ones(x_TD.shape[0], 1))


def offloaded(recipe: str) -> bool:
    """Whether a quantized layer whose shards FSDP2 keeps on the CPU has the gradients of one that it does not."""
    gradients = []
    for policy in (OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)):
        torch.manual_seed(0)
        with mr.quantized_model_init(recipe=RECIPES[recipe]):
            layer = mr.GroupedLinear(4, 64, 64)
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), offload_policy=policy)
        x_RD = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
        with mr.autocast(recipe=RECIPES[recipe]):
            layer(x_RD, [8, 0, 20, 4]).square().sum().backward()
        gradient = layer.weight.grad
        assert isinstance(gradient, DTensor)
        gradients.append(gradient.to_local())
    return torch.equal(*gradients)


def _layer(num_experts: int, recipe: Recipe | None) -> nn.Module:
    with mr.quantized_model_init(recipe is not None, recipe):
        config = mr.RoutedExpertsConfig(num_experts=num_experts, hidden_size=32, intermediate_size=32)
        return nn.Sequential(nn.Linear(32, 32), mr.RoutedExperts(config))
