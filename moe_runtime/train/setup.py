"""From a configuration to something that can step: device, model, optimizer, schedule."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from moe_runtime.checkpoint.hf import load, names_of
from moe_runtime.comm.layout import ParallelLayout, layout_of
from moe_runtime.core.log import get_logger
from moe_runtime.integrations import transformers as hf
from moe_runtime.optim import MasterWeights
from moe_runtime.parallel import ParallelPlan, distribute
from moe_runtime.precision import Recipe, quantized_model_init, recipes
from moe_runtime.runtime import WgradCoordinator
from moe_runtime.train.config import Config, OptimConfig, RecipeConfig, WgradConfig

_RECIPES = {
    recipe.name: recipe
    for recipe in (
        recipes.HighPrecision,
        recipes.Float8CurrentScaling,
        recipes.Float8BlockScaling,
        recipes.MXFP8BlockScaling,
    )
}
_LOGGER = get_logger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A model ready to train. `model` is what to call; `inner` the same without a DDP wrapper."""

    model: nn.Module
    inner: nn.Module
    optimizer: Optimizer
    layout: ParallelLayout
    recorder: hf.RoutingRecorder
    device: torch.device
    num_experts: int
    num_moe_layers: int


def build(config: Config, hf_config: Any, device: torch.device) -> Trainee:
    """Model and optimizer of `config` on `device`, split over the ranks of the default process group.

    bfloat16 computes in bf16 with fp32 masters: FSDP2 keeps fp32 shards and gathers bf16; elsewhere parameters are bf16
    and `MasterWeights` holds their fp32 copies. Experts that a recipe stores quantized have masters everywhere.
    A new run's values come from `model.checkpoint`, each rank reading what it holds, or are drawn from the seed.
    Raises CheckpointError on every rank, naming tensors, for a checkpoint that does not fit the model.
    """
    sharded = config.parallel.data == "fsdp2"
    low_precision = config.train.dtype != "float32"
    compute_dtype = DTYPES[config.train.dtype]
    recipe = recipe_of(config.recipe)
    stores_quantized = recipe.quantizes and config.recipe.quantized_weights
    with quantized_model_init(
        enabled=stores_quantized,
        recipe=recipe,
        preserve_high_precision_init_val=True,
        omit_columnwise_primary_weight_storage=config.recipe.omit_columnwise_weights,
    ):
        model = hf.build(
            hf_config,
            experts_backend=config.experts.backend,
            single_grouped_weight=config.experts.single_grouped_weight,
            balance_bias=config.router.bias_update_rate > 0,
            delay_wgrad_compute=config.wgrad.schedule == "deferred",
            dtype=torch.float32 if sharded else compute_dtype,
        )
    if config.train.activation_checkpointing:
        hf.enable_activation_checkpointing(model)
    recorder = hf.RoutingRecorder(model)
    plan = ParallelPlan(
        expert=config.parallel.expert,
        data=config.parallel.data,
        replicate=config.parallel.replicate,
        param_dtype=compute_dtype if sharded and low_precision else None,
        reduce_dtype=torch.float32 if sharded and low_precision else None,
    )
    # FSDP2 shards before anything is real, so that no rank ever holds the whole model. DDP copies real parameters, and
    # tied ones are tied before sharding.
    shard_first = sharded and not getattr(hf_config, "tie_word_embeddings", False)
    coordinator = make_coordinator(config.wgrad)
    source = "" if config.run.resume else config.model.checkpoint
    names = names_of(model) if source else None
    held = frozenset() if names is None else names.shapes.keys() - names.own
    wrapped = distribute(model, plan, coordinator) if shard_first else None
    hf.initialize(model, seed=config.run.seed, device=device, leave=held)
    wrapped = wrapped if wrapped is not None else distribute(model, plan, coordinator)
    if source:
        report = load(wrapped, source)
        _LOGGER.info("%d tensors of %s, %.3f MB read here", report.num_tensors, source, report.bytes_read / 1e6)
    modules = hf.experts_modules(model)
    optimizer = make_optimizer(config.optim, wrapped, (low_precision and not sharded) or stores_quantized)
    if coordinator is not None:
        coordinator.guard(optimizer)
    return Trainee(
        model=wrapped,
        inner=model,
        optimizer=optimizer,
        layout=layout_of(wrapped),
        recorder=recorder,
        device=device,
        num_experts=hf.num_experts(model),
        num_moe_layers=len(modules),
    )


def recipe_of(config: RecipeConfig) -> Recipe:
    """The recipe that a configuration names."""
    override = config.backward_override or None
    if config.name == "nvfp4":
        return recipes.NVFP4BlockScaling(
            backward_override=override,
            disable_rht=config.disable_rht,
            disable_stochastic_rounding=config.disable_stochastic_rounding,
            disable_2d_quantization=config.disable_2d_quantization,
        )
    return _RECIPES[config.name](backward_override=override)


def make_coordinator(config: WgradConfig) -> WgradCoordinator | None:
    """What runs weight gradients later; None where they are computed in their place."""
    if config.schedule == "inline":
        return None
    return WgradCoordinator(config.schedule, config.budget_mb * 2**20 or None, config.side_stream)


def make_optimizer(config: OptimConfig, model: nn.Module, needs_masters: bool) -> Optimizer:
    """Over the parameters that require gradients, with fp32 masters where they are needed."""
    options: dict[str, Any] = {"lr": config.lr}
    if config.name == "adamw":
        kind = AdamW
        options |= {"betas": (config.beta1, config.beta2), "eps": config.eps, "fused": True}
    else:
        kind = SGD
        options |= {"momentum": config.momentum}
    groups = _parameter_groups(model, config.weight_decay)
    return MasterWeights(kind, groups, **options) if needs_masters else kind(groups, **options)


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not. Experts stand apart: optimizers cannot mix tensors of different meshes."""
    experts = layout_of(model).expert_parameters
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # A packed bias (E, F) is a matrix by shape only.
            decays = parameter.dim() >= 2 and not name.rpartition(".")[2].startswith("bias")
            groups.setdefault((name.removeprefix("module.") in experts, decays), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
        for (_, decays), parameters in sorted(groups.items(), key=lambda item: item[0])
    ]


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of step 0, 1, ...: linear warm-up to `lr`, then a cosine to `min_lr_ratio * lr` at the last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(total_steps - 1 - config.warmup_steps, 1)
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def forward_flops_per_token(model: nn.Module, layout: ParallelLayout, num_experts: int, top_k: int) -> float:
    """Two FLOPs a weight that a token meets: all dense matrices but the embedding, and top_k of num_experts experts.

    Attention scores are left out, so a utilization made from this is a lower bound.
    """
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or "embed" in name:
            continue
        is_expert = parameter.dim() == 3
        share = top_k / num_experts if is_expert else 1.0
        degree = layout.expert if name.removeprefix("module.") in layout.expert_parameters else 1
        total += 2.0 * parameter.numel() * degree * share
    return total
