"""Adapters on a frozen quantized base over ranks: the same as in one process, and whole wherever they are loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_cases import RECIPES, fields, merged, payloads, refused_ddp, reload, train
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_runtime import formats
from moe_runtime.checkpoint import hf as folders
from moe_runtime.integrations import transformers as hf
from moe_runtime.tensor import GroupedTensor, QuantizedTensor, Quantizer
from moe_runtime.testing.ranks import RankPool

Ranks = Callable[[int], RankPool]
EXPERTS = ("gate_up", "down")
WEIGHTS = "model.safetensors"


def _base(folder: Path, name: str) -> Path:
    model = hf.build(hf.load_config(model_type=name, fields=fields(name)))
    hf.initialize(model, seed=0, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return folders.save(model, folder / name)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A random base by how its experts are stored: in values, or as gpt-oss is published, in MXFP4 blocks."""
    folder = tmp_path_factory.mktemp("bases")
    plain, packed = _base(folder, "qwen3_moe"), _base(folder, "gpt_oss")
    tensors: dict[str, Tensor] = {}
    for key, value in load_file(packed / WEIGHTS).items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            tensors[key] = value
            continue
        quantized = GroupedTensor.pack(
            value.transpose(1, 2).contiguous(), Quantizer(format=formats.MXFP4(), columnwise=False)
        )
        assert isinstance(quantized, QuantizedTensor) and quantized.records.row is not None
        tensors[f"{key}_blocks"] = quantized.records.row.payload.unflatten(-1, (-1, 16)).contiguous()
        tensors[f"{key}_scales"] = quantized.records.row.scale
    save_file(tensors, packed / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return {"mxfp4": str(packed), **dict.fromkeys(RECIPES, str(plain))}


PLANS = [
    pytest.param("mxfp8", "fsdp2", 1, "inline", EXPERTS, marks=pytest.mark.slow),
    ("mxfp8", "fsdp2", 2, "deferred", EXPERTS),
    ("mxfp4", "fsdp2", 2, "inline", EXPERTS),
    pytest.param("mxfp8", "ddp", 2, "inline", (*EXPERTS, "o_proj"), marks=pytest.mark.slow),
    pytest.param("nvfp4", "fsdp2", 2, "late", (*EXPERTS, "q_proj"), marks=pytest.mark.slow),
    pytest.param("mxfp4", "fsdp2", 1, "deferred", EXPERTS, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("recipe", "data", "expert", "schedule", "targets"), PLANS)
def test_two_ranks_learn_what_one_process_learns(
    recipe: str,
    data: str,
    expert: int,
    schedule: str,
    targets: tuple[str, ...],
    ranks: Ranks,
    bases: dict[str, str],
    tmp_path: Path,
) -> None:
    base, out = bases[recipe], tmp_path / "run"
    out.mkdir()
    losses, norms, state = train(base, recipe, "none", 1, "inline", targets, "")
    # Enough is learned for a gradient that was lost or scaled to show.
    assert losses[-1] < losses[0] and all(value.any() for value in state.values())
    for got_losses, got_norms, got in ranks(2).run(train, base, recipe, data, expert, schedule, targets, str(out)):
        assert torch.tensor(got_losses) == pytest.approx(torch.tensor(losses), rel=1e-6)
        assert torch.tensor(got_norms) == pytest.approx(torch.tensor(norms), rel=1e-5)
        assert got.keys() == state.keys()
        for name, value in state.items():
            assert float((got[name] - value).norm() / value.norm()) < 1e-6, name
    saved = got
    for loaded in reload(base, recipe, "none", 1, targets, str(out)):
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())


def test_saved_at_two_ranks_loaded_at_others(ranks: Ranks, bases: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    _, _, state = train(bases["mxfp8"], "mxfp8", "none", 1, "inline", EXPERTS, str(out))
    for found in ranks(2).run(reload, bases["mxfp8"], "mxfp8", "fsdp2", 2, EXPERTS, str(out)):
        for loaded in found:
            assert all(torch.equal(loaded[name], value) for name, value in state.items())
    with folders.Folder(out / "adapter") as held:
        sizes = sum(torch.Size(held.shape(key)).numel() for key in held)
    assert sizes == sum(value.numel() for value in state.values())


def test_merging_over_ranks(ranks: Ranks, bases: dict[str, str]) -> None:
    for change, undone in ranks(2).run(merged, bases["mxfp8"], "mxfp8", 2):
        assert 0 < change < 0.2 and undone == 0


def test_ddp_without_anything_to_reduce_is_refused(ranks: Ranks, bases: dict[str, str]) -> None:
    for message in ranks(2).run(refused_ddp, bases["mxfp8"]):
        assert "data='ddp' needs a trainable parameter outside of the experts" in message


def test_packed_blocks_are_taken_as_they_are(bases: dict[str, str]) -> None:
    found: dict[str, Any] = payloads(bases["mxfp4"])
    given = load_file(f"{bases['mxfp4']}/{WEIGHTS}")
    assert len(found) == 8
    for name, tensor in found.items():
        stem, part = name.rsplit(".", 1)
        key = stem.replace(".experts.experts.", ".experts.").replace("gate_up.weight", "gate_up_proj")
        key = key.replace("down.weight", "down_proj") + {"row_payload": "_blocks", "row_scale": "_scales"}[part]
        assert torch.equal(tensor, given[key].reshape(tensor.shape)), name
