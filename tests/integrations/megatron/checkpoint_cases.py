"""Megatron's distributed checkpoints of a model with our experts: save at one layout, go on at another."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore_world import EXPERTS, config, expert_weights, groups, moe_layer
from megatron.core import dist_checkpointing, parallel_state
from torch import Tensor
from training_cases import Case, build, gradients, iteration, stacked

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
LOCAL_LAYOUT = {**METADATA, "distrib_optim_sharding_type": "dp_reshardable"}


def save_and_go_on(axes: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """Two steps, save, one more step: what that step left, all experts by global id."""
    ddp, optimizer, coordinator = build(Case(**axes))
    for step in range(2):
        _step(ddp, optimizer, coordinator, axes, step)
    dist_checkpointing.save(_sharded(ddp, optimizer), folder)
    return _step(ddp, optimizer, coordinator, axes, 2)


def load_and_go_on(axes: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """The same step after loading at another layout."""
    ddp, optimizer, coordinator = build(Case(**axes))
    # Without Transformer Engine, Megatron's optimizer has no state to load into before its first step.
    _step(ddp, optimizer, coordinator, axes, 9)
    with torch.no_grad():
        for parameter in ddp.module.parameters():
            parameter.fill_(torch.nan)
    loaded = dist_checkpointing.load(_sharded(ddp, optimizer, is_loading=True), folder, strict="raise_all")
    ddp.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    return _step(ddp, optimizer, coordinator, axes, 2)


def _sharded(ddp: Any, optimizer: Any, is_loading: bool = False) -> dict[str, Any]:
    model = {}
    for name, module in ddp.module.named_children():
        if name == "layers":
            for i, layer in enumerate(module):
                model.update(layer.sharded_state_dict(prefix=f"layers.{i}."))
        else:
            model[f"{name}.weight"] = dist_checkpointing.ShardedTensor.from_rank_offsets(
                f"{name}.weight", module.weight, replica_id=(0, 0, dist.get_rank())
            )
    return {
        "model": model,
        "optimizer": optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(METADATA)),
    }


def _step(ddp: Any, optimizer: Any, coordinator: Any, axes: dict[str, Any], step: int) -> dict[str, Tensor]:
    iteration(ddp, optimizer, coordinator, axes.get("schedule", "inline"), step)
    found = {f"grad {name}": value for name, value in gradients(ddp).items()}
    stepped, _, _ = optimizer.step()
    assert stepped
    if ddp.ddp_config.overlap_param_gather:
        ddp.start_param_sync(force_sync=True)
    found.update(stacked({name: p.detach().clone() for name, p in ddp.module.named_parameters()}))
    return {name: _all_experts(value) if "linear_fc" in name else value for name, value in found.items()}


def _all_experts(value: Tensor) -> Tensor:
    group = parallel_state.get_expert_model_parallel_group()
    parts = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(parts, value.contiguous(), group=group)
    return torch.cat(parts)


def exchange_with_sequential(ep: int, folder: str, layout: dict[str, Any], singleton: bool) -> list[dict[str, bool]]:
    """A layer's checkpoint of Megatron's experts read by ours, and of ours by Megatron's: what is equal then."""
    results = []
    for ours_first in (False, True):
        groups(ep)
        cfg = config(ep, add_bias_linear=True)
        made = [moe_layer(cfg, ours=ours, seed=9 - ours, **(layout if ours else {})) for ours in (False, True)]
        source, target = reversed(made) if ours_first else made
        with torch.no_grad():
            for name, parameter in source.named_parameters():
                if name.endswith(("bias", *(f"bias{e}" for e in range(EXPERTS)))):
                    generator = torch.Generator().manual_seed(
                        len(name) + parallel_state.get_expert_model_parallel_rank()
                    )
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        options = {"metadata": {"singleton_local_shards": singleton}}
        path = f"{folder}/{int(ours_first)}"
        if dist.get_rank() == 0:
            Path(path).mkdir()

        dist.barrier()
        dist_checkpointing.save(source.sharded_state_dict(prefix="mlp.", **options), path)
        sharded = target.sharded_state_dict(prefix="mlp.", **options)
        # Only what is no weight may be on one side alone: the place of Transformer Engine's extra state, empty here.
        loaded, *alone = dist_checkpointing.load(sharded, path, strict="return_all")
        assert all("_extra_state" in key for keys in alone for key in keys), alone
        target.load_state_dict({name.removeprefix("mlp."): value for name, value in loaded.items()}, strict=True)
        ours, theirs = expert_weights(target.experts), expert_weights(source.experts)
        results.append({name: ours[name].equal(theirs[name]) for name in sorted(ours.keys() | theirs.keys())})
        results[-1]["router"] = target.router.weight.equal(source.router.weight)
    return results


def flat_range_refusal() -> str:
    groups()
    layer = moe_layer(config(), ours=True)
    entry = layer.experts.sharded_state_dict()["linear_fc1.weight"]
    try:
        dataclasses.replace(entry, flattened_range=slice(0, 3)).build()
    except ValueError as error:
        return str(error)
    return ""
