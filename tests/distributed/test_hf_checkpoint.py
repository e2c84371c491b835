"""Hugging Face folders and ranks: each reads what it holds, any layout writes the same folder, failures are shared."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_cases import load_and_save, load_damaged, load_packed, save_where_rank_one_cannot
from safetensors.torch import load_file, save_file
from tiny_models import config_of, folder_of, reference
from transformers import AutoModelForCausalLM

from moe_runtime import formats
from moe_runtime.checkpoint import hf as folders
from moe_runtime.integrations import transformers as hf
from moe_runtime.tensor import GroupedTensor, QuantizedTensor, Quantizer
from moe_runtime.testing.ranks import RankPool

Ranks = Callable[[int], RankPool]
EXPERT = "model.layers.0.mlp.experts.5.down_proj.weight"


@pytest.mark.parametrize(
    ("name", "data", "expert", "discrete", "fused"),
    [
        ("qwen3_moe", "fsdp2", 2, False, False),
        ("qwen3_moe", "fsdp2", 2, True, True),
        ("qwen3_moe", "fsdp2", 1, False, False),
        ("qwen3_moe", "ddp", 2, False, True),
        ("qwen3_moe", "ddp", 2, True, False),
        ("gpt_oss", "fsdp2", 2, False, False),
        ("nemotron_h", "fsdp2", 1, True, False),
    ],
)
def test_two_ranks_read_their_part_and_write_the_whole(
    name: str, data: str, expert: int, discrete: bool, fused: bool, ranks: Ranks, tmp_path: Path
) -> None:
    theirs = reference(name)
    source = folder_of(theirs, tmp_path / "theirs", fused=not fused)
    out = tmp_path / "ours"
    results = ranks(2).run(load_and_save, name, str(source), str(out), data, expert, discrete, fused)
    with folders.Folder(source) as held:
        sizes = {key: torch.Size(held.shape(key)).numel() * held.dtype(key).itemsize for key in held}
    experts = sum(size for key, size in sizes.items() if ".experts." in key)
    for bytes_read, _ in results:
        if data == "fsdp2":
            # Half of everything; uneven dimensions give one rank some more.
            assert bytes_read < 0.6 * sum(sizes.values())
        else:
            assert bytes_read == sum(sizes.values()) - experts // 2
    found = AutoModelForCausalLM.from_pretrained(out).state_dict()
    for key, value in theirs.state_dict().items():
        assert torch.equal(found[key], value), key
    if expert == 2 and not fused and name != "gpt_oss":
        files = {path.name for path in out.glob("*.safetensors")}
        with folders.Folder(out) as held:
            writers = {held.file_of(key) for key in held if ".experts.5." in key}
            assert writers < files and writers.isdisjoint({held.file_of(key) for key in held if ".experts.0." in key})


def test_four_expert_values_are_their_ids_at_any_degree(ranks: Ranks, tmp_path: Path) -> None:
    """Case G1: a fault that keeps one rank's experts for all loads without a complaint."""
    theirs = reference("qwen3_moe", num_experts=6)
    with torch.no_grad():
        for layer in theirs.model.layers:
            for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                weight.copy_(torch.arange(6.0)[:, None, None].expand_as(weight))
    source = folder_of(theirs, tmp_path / "theirs")
    for expert in (1, 2):
        out = tmp_path / f"ours{expert}"
        results = ranks(2).run(load_and_save, "qwen3_moe", str(source), str(out), "ddp", expert, False, False)
        for rank, (_, local) in enumerate(results):
            first = 3 * rank if expert == 2 else 0
            for key, value in local.items():
                expected = torch.arange(float(first), float(first + value.shape[0]))[:, None, None]
                assert torch.equal(value, expected.expand_as(value)), key
        tensors = {key: value for path in out.glob("*.safetensors") for key, value in load_file(path).items()}
        assert all((tensors[f"model.layers.1.mlp.experts.{e}.up_proj.weight"] == e).all() for e in range(6))


def test_what_one_rank_cannot_read_fails_on_all(ranks: Ranks, tmp_path: Path) -> None:
    source = folder_of(reference("qwen3_moe"), tmp_path / "theirs")
    tensors = load_file(source / "model.safetensors")
    tensors[EXPERT][0, 0] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    sentences = ranks(2).run(load_damaged, str(source), 2)
    assert len(set(sentences)) == 1 and "layers.0.mlp.experts.experts.down.weight holds NaN" in sentences[0]


def test_what_one_rank_cannot_write_fails_on_all_and_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    source = folder_of(reference("qwen3_moe"), tmp_path / "theirs")
    sentences = ranks(2).run(save_where_rank_one_cannot, str(source), str(tmp_path / "out"))
    assert len(set(sentences)) == 1 and "No space left on device" in sentences[0]
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("expert", [1, 2])
def test_packed_experts_are_sharded_as_bytes(expert: int, ranks: Ranks, tmp_path: Path) -> None:
    fields = {"hidden_size": 64, "intermediate_size": 32}
    source = folder_of(reference("gpt_oss", **fields), tmp_path / "theirs")
    tensors = load_file(source / "model.safetensors")
    payloads = {}
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        weight = tensors.pop(key).transpose(1, 2).contiguous()
        packed = GroupedTensor.pack(weight, Quantizer(format=formats.MXFP4(), columnwise=False))
        assert isinstance(packed, QuantizedTensor) and packed.records.row is not None
        tensors[f"{key}_blocks"] = packed.records.row.payload.unflatten(-1, (-1, 16)).contiguous()
        tensors[f"{key}_scales"] = packed.records.row.scale
        payloads[key.replace("_proj", ".weight").replace("mlp.experts", "mlp.experts.experts")] = (
            packed.records.row.payload
        )
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    alone = _logits_alone(str(source), fields)
    for found in ranks(2).run(load_packed, str(source), expert, fields):
        for key, payload in payloads.items():
            assert torch.equal(found[f"{key}.rowwise.qdata"], payload), key
        torch.testing.assert_close(found["logits"], alone, rtol=1e-5, atol=1e-6)


def _logits_alone(source: str, fields: dict[str, int]) -> torch.Tensor:
    """Of one process, with dequantized experts."""
    model = hf.build(config_of("gpt_oss", **fields))
    folders.load(model, source)
    with torch.no_grad():
        return model(input_ids=torch.arange(24).view(1, 24), use_cache=False).logits
