"""What ranks run for test_lora.py."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import moe_runtime as mr
from moe_runtime import checkpoint
from moe_runtime.checkpoint import hf as folders
from moe_runtime.checkpoint.tensors import leave_out_frozen, local_of
from moe_runtime.integrations import transformers as hf
from moe_runtime.nn.adapters import adapter_parameters
from moe_runtime.optim import clip_grad_norm_
from moe_runtime.parallel.sync import coordinator_of
from moe_runtime.precision import Recipe
from moe_runtime.tensor import QuantizedTensor

RECIPES: dict[str, Recipe] = {
    "mxfp8": mr.recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "nvfp4": mr.recipes.NVFP4BlockScaling(backward_override="dequantized"),
}
STEPS, SEQUENCES, LENGTH = 3, 4, 16


def fields(name: str) -> dict[str, Any]:
    """Of a tiny model whose sizes every format can store."""
    common = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    own = {
        "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True},
        "gpt_oss": {"num_local_experts": 4, "intermediate_size": 32, "num_experts_per_tok": 2},
    }
    return {**common, "num_key_value_heads": 2, "head_dim": 16, **own[name]}


def model_of(
    base: str,
    recipe: str,
    data: str,
    expert: int,
    schedule: str = "inline",
    targets: tuple[str, ...] = ("gate_up", "down"),
) -> Any:
    """Built on meta, adapted, distributed, loaded: on no rank is there ever more of the base than its own part."""
    config = hf.load_config(config_file=f"{base}/config.json")
    stored = RECIPES.get(recipe)
    with mr.quantized_model_init(
        enabled=stored is not None, recipe=stored, omit_columnwise_primary_weight_storage=stored is not None
    ):
        model = hf.build(config, dtype=torch.float32, delay_wgrad_compute=schedule == "deferred")
    if recipe == "mxfp4":
        assert len(folders.pack_experts(model, base)) == 4
    mr.add_lora(model, mr.LoRAConfig(4, 16.0, target_modules=targets))
    coordinator = None if schedule == "inline" else mr.WgradCoordinator(schedule)  # pyright: ignore[reportArgumentType]
    plan = mr.ParallelPlan(data=data, expert=expert)  # pyright: ignore[reportArgumentType]
    if data == "ddp":  # which copies real parameters
        report = folders.load(model, base)
        wrapped: Any = mr.distribute(model, plan, coordinator)
    else:
        wrapped = mr.distribute(model, plan, coordinator)
        report = folders.load(wrapped, base)
    assert (recipe == "mxfp4") == (len(report.packed) == 4)
    for name, parameter in wrapped.named_parameters():
        assert not parameter.is_meta, name
        local = local_of(parameter.detach())
        stored_whole = ".experts.experts." in name and ".lora." not in name and not name.endswith("bias")
        assert isinstance(local, QuantizedTensor) == stored_whole, name
        assert parameter.requires_grad == (name in dict(adapter_parameters(wrapped))), name
    return wrapped


def _step(model: Any) -> float:
    """This rank's share of the one batch there is; the mean loss over ranks."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (SEQUENCES, LENGTH)).chunk(world)[rank]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    coordinator = coordinator_of(model)
    if coordinator is not None:
        coordinator.flush()
    mean = loss.detach().clone()
    if world > 1:
        dist.all_reduce(mean)
    return float(mean / world)


def train(
    base: str, recipe: str, data: str, expert: int, schedule: str, targets: tuple[str, ...], out: str
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and norms of 3 SGD steps, and the adapters; saved as a checkpoint and as PEFT's folder in `out`."""
    model = model_of(base, recipe, data, expert, schedule, targets)
    leave_out_frozen(model)
    trained = [parameter for _, parameter in adapter_parameters(model)]
    optimizer = torch.optim.SGD(trained, lr=0.5, momentum=0.9, foreach=False)
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(_step(model))
        norms.append(float(clip_grad_norm_(model, 10.0)))
        optimizer.step()
        optimizer.zero_grad()
    if out:
        checkpoint.save(Path(out), STEPS, model, optimizer, {})
        mr.export_peft(model, f"{out}/adapter")
    return losses, norms, mr.lora_state_dict(model)


def reload(
    base: str, recipe: str, data: str, expert: int, targets: tuple[str, ...], out: str
) -> list[dict[str, Tensor]]:
    """The adapters that `train` saved, from its checkpoint, from its folder, and from its state, in fresh models."""
    found = []
    for kind in ("checkpoint", "folder", "state"):
        model = model_of(base, recipe, data, expert, targets=targets)
        leave_out_frozen(model)
        if kind == "checkpoint":
            trained = [parameter for _, parameter in adapter_parameters(model)]
            latest = checkpoint.latest(Path(out))
            assert latest is not None
            checkpoint.load(latest, model, torch.optim.SGD(trained, lr=0.5, momentum=0.9, foreach=False))
        elif kind == "folder":
            mr.import_peft(model, f"{out}/adapter")
        else:
            mr.load_lora_state_dict(model, found[0])
        found.append(mr.lora_state_dict(model))
    return found


def merged(base: str, recipe: str, expert: int) -> tuple[float, float]:
    """Relative change of the logits by merging, and by unmerging again."""
    model = model_of(base, recipe, "fsdp2", expert)
    torch.manual_seed(7)
    state = {name: torch.randn_like(value) / 8 for name, value in mr.lora_state_dict(model).items()}
    mr.load_lora_state_dict(model, state)
    ids = torch.arange(LENGTH)[None] % 64

    @torch.no_grad()
    def logits() -> Tensor:
        return model.eval()(input_ids=ids).logits

    before = logits()
    mr.merge_lora(model)
    after = logits()
    mr.unmerge_lora(model)
    again = logits()
    return float((after - before).norm() / before.norm()), float((again - before).norm())


def payloads(base: str) -> dict[str, Tensor]:
    """Bytes of packed experts after load, in one process."""
    model = model_of(base, "mxfp4", "none", 1)
    return {
        f"{name}.{part}": tensor.clone()
        for name, parameter in model.named_parameters()
        if isinstance(parameter, QuantizedTensor)
        for part, tensor in parameter.records.tensors().items()
    }


def refused_ddp(base: str) -> str:
    """The sentence for adapters of split experts alone under DDP."""
    try:
        model_of(base, "mxfp8", "ddp", 2)
    except ValueError as error:
        return str(error)
    return ""
