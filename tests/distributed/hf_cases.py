"""What ranks run for test_hf_checkpoint.py."""

from typing import Any

import torch
import torch.distributed as dist
from tiny_models import config_of
from torch import Tensor

import moe_runtime as mr
from moe_runtime.checkpoint import hf as folders
from moe_runtime.checkpoint import tensors
from moe_runtime.checkpoint.hf import writer
from moe_runtime.core.errors import CheckpointError
from moe_runtime.integrations import transformers as hf
from moe_runtime.tensor import QuantizedTensor


def _distributed(name: str, data: str, expert: int, discrete: bool) -> Any:
    """The model distributed: on meta under FSDP2, with other values under DDP, which copies real parameters."""
    model = hf.build(config_of(name), single_grouped_weight=not discrete)
    plan = mr.ParallelPlan(data=data, expert=expert)  # pyright: ignore[reportArgumentType]
    if data == "fsdp2":
        return mr.distribute(model, plan)
    hf.initialize(model, seed=9, device=torch.device("cpu"))
    return mr.distribute(model, plan)


def load_and_save(
    name: str, source: str, out: str, data: str, expert: int, discrete: bool, fused: bool
) -> tuple[int, dict[str, Tensor]]:
    """(bytes this rank read, its own expert values by global entry name), and the model written to `out`."""
    model = _distributed(name, data, expert, discrete)
    report = folders.load(model, source)
    entries = tensors.model_tensors(model)
    local = {key: tensors.local_of(value).clone() for key, value in entries.items() if ".experts.experts." in key}
    options = folders.SaveOptions(style="fused" if fused else "per_expert", max_shard_bytes=40_000)
    folders.save(model, out, options=options)
    return report.bytes_read, local


def load_damaged(source: str, expert: int) -> str:
    """The sentence with which a rank refuses a folder that only one rank can see is damaged."""
    model = _distributed("qwen3_moe", "fsdp2", expert, False)
    try:
        folders.load(model, source)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def save_where_rank_one_cannot(source: str, out: str) -> str:
    """The sentence with which ranks fail together when the disk of one is full."""
    model = _distributed("qwen3_moe", "fsdp2", 2, False)
    folders.load(model, source)
    if dist.get_rank() == 1:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        writer.ShardWriter.add, kept = full, writer.ShardWriter.add
    try:
        folders.save(model, out)
    except CheckpointError as error:
        return str(error)
    finally:
        if dist.get_rank() == 1:
            writer.ShardWriter.add = kept
    return "saved"


def load_packed(source: str, expert: int, fields: dict[str, Any]) -> dict[str, Tensor]:
    """Global payloads of experts that were packed before they were sharded."""
    model = hf.build(config_of("gpt_oss", **fields))
    folders.pack_experts(model, source)
    model = mr.distribute(model, mr.ParallelPlan(data="fsdp2", expert=expert))
    assert len(folders.load(model, source).packed) == 4
    found: dict[str, Tensor] = {}
    for key, value in tensors.model_tensors(model).items():
        if key.endswith(".rowwise.qdata"):
            found[key] = value.full_tensor() if hasattr(value, "full_tensor") else value
    assert all(
        isinstance(tensors.local_of(parameter), QuantizedTensor)
        for name, parameter in model.named_parameters()
        if name.endswith("down.weight")
    )
    ids = torch.arange(24).view(1, 24)
    found["logits"] = model(input_ids=ids, use_cache=False).logits.detach()
    return found
