"""Folder to folder: names, dtype and tokenizer; and a dense model made a mixture of experts that computes the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import COMMON, config_of, folder_of, randomize, reference
from transformers import AutoConfig, AutoModelForCausalLM

from moe_runtime.checkpoint import hf as folders
from moe_runtime.core.errors import CheckpointError, ConfigError, UnsupportedError
from moe_runtime.integrations import transformers as hf

IDS = torch.arange(48).view(2, 24)


@pytest.mark.parametrize("name", ["mixtral", "granitemoe", "nemotron_h"])
def test_other_style_and_back_is_bit_equal(name: str, tmp_path: Path) -> None:
    theirs = reference(name)
    source = folder_of(theirs, tmp_path / "theirs", shard="20KB")
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.bin").write_bytes(b"1")
    options = folders.SaveOptions(style="fused", max_shard_bytes=50_000)
    fused = hf.convert(source, tmp_path / "fused", options=options)
    back = hf.convert(fused, tmp_path / "back")
    assert (back / "tokenizer.json").read_text() == "{}" and not (back / "notes.bin").exists()
    with folders.Folder(source) as first, folders.Folder(back) as last, folders.Folder(fused) as other:
        assert sorted(first) == sorted(last) and sorted(first) != sorted(other)
        for key in first:
            assert torch.equal(*(f.read(key, tuple((0, n) for n in f.shape(key))) for f in (first, last))), key


def test_dtype_is_cast_but_for_what_must_stay_in_fp32(tmp_path: Path) -> None:
    theirs = reference("deepseek_v3")
    source = folder_of(theirs, tmp_path / "theirs")
    written = hf.convert(source, tmp_path / "bf16", options=folders.SaveOptions(dtype=torch.bfloat16))
    assert json.loads((written / "config.json").read_text())["dtype"] == "bfloat16"
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).state_dict()
    found = AutoModelForCausalLM.from_pretrained(written).state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
    assert {value.dtype for value in found.values()} == {torch.bfloat16, torch.float32}


def test_dense_folders_are_converted_too(tmp_path: Path) -> None:
    source, theirs = _dense("qwen3", tmp_path)
    written = hf.convert(source, tmp_path / "ours", options=folders.SaveOptions(max_shard_bytes=5000))
    found = AutoModelForCausalLM.from_pretrained(written).state_dict()
    assert all(torch.equal(found[key], value) for key, value in theirs.state_dict().items())


def test_what_is_no_folder_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a Hugging Face folder with a config\.json"):
        hf.convert(tmp_path, tmp_path / "out")
    source = folder_of(reference("mixtral"), tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="exists already and is not empty"):
        hf.convert(source, source)
    weights = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(weights[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no whole safetensors file"):
        hf.convert(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


# Upcycling -----------------------------------------------------------------------------------------------------------


def _dense(name: str, folder: Path, **fields: Any) -> tuple[Path, Any]:
    fields = {**COMMON, "intermediate_size": 48, "head_dim": 8, **fields}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields)).eval()
    randomize(model, 3)
    return folder_of(model, folder / name), model


@pytest.mark.parametrize(
    ("granularity", "expansion", "top_k"), [(1, 4, None), (1, 4, 2), (2, 3, None), (4, 2, 8), (3, 2, 3)]
)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_an_upcycled_model_computes_what_the_dense_one_does(
    name: str, granularity: int, expansion: int, top_k: int | None, tmp_path: Path
) -> None:
    source, dense = _dense(name, tmp_path)
    plan = hf.UpcycleConfig(granularity=granularity, expansion=expansion, top_k=top_k)
    style = "fused" if expansion == 4 else "per_expert"
    written = hf.upcycle(source, tmp_path / "moe", plan, options=folders.SaveOptions(style=style))
    mixture = AutoModelForCausalLM.from_pretrained(written).eval()
    experts = mixture.model.layers[0].mlp.experts
    assert experts.down_proj.shape == (granularity * expansion, 32, 48 // granularity)
    assert mixture.config.num_experts_per_tok == (top_k or granularity)
    expected = dense(input_ids=IDS, use_cache=False).logits
    found = mixture(input_ids=IDS, use_cache=False).logits
    assert (found - expected).norm() / expected.norm() < 1e-6
    ours = hf.build(mixture.config)
    folders.load(ours, written)
    assert (ours(input_ids=IDS, use_cache=False).logits - expected).norm() / expected.norm() < 1e-6


def test_copies_are_chosen_by_token(tmp_path: Path) -> None:
    """Copies must not tie: equal router rows for all would give every token the same experts for ever."""
    source, _ = _dense("qwen3", tmp_path)
    written = hf.upcycle(source, tmp_path / "moe", hf.UpcycleConfig(granularity=2, expansion=4))
    model = hf.build(hf.load_config(config_file=str(written / "config.json")))
    folders.load(model, written)
    rows_ED = model.model.layers[1].mlp.gate.weight
    assert torch.equal(rows_ED[0::2], rows_ED[1::2]) and len(rows_ED.unique(dim=0)) == 4
    recorder = hf.RoutingRecorder(model)
    with recorder.recording():
        model(input_ids=IDS, use_cache=False)
    for ids_TK in recorder.ids_TK:
        assert torch.equal(ids_TK.sort(1).values % 2, torch.tensor([0, 1]).expand(48, 2)), "every slice, once"
        assert len((ids_TK[:, 0] // 2).unique()) > 1


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"granularity": 2, "top_k": 3}, "top_k must be a multiple of granularity = 2"),
        ({"granularity": 2, "expansion": 2, "top_k": 6}, "at most granularity x expansion = 4; got 6"),
        ({"expansion": 0}, "expansion must be at least 1, got 0"),
        ({"router_std": 0.0}, "copies of a slice would tie"),
    ],
)
def test_plans_that_cannot_be_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        hf.UpcycleConfig(**fields)


def test_models_that_cannot_be_upcycled_are_refused(tmp_path: Path) -> None:
    source, _ = _dense("llama", tmp_path)
    with pytest.raises(ConfigError, match="granularity must divide intermediate_size = 48, got 5"):
        hf.upcycle(source, tmp_path / "out", hf.UpcycleConfig(granularity=5))
    biased, _ = _dense("llama", tmp_path / "biased", mlp_bias=True)
    with pytest.raises(UnsupportedError, match="mixtral has no mlp_bias"):
        hf.upcycle(biased, tmp_path / "out", hf.UpcycleConfig())
    config_of("mixtral").save_pretrained(tmp_path / "moe")
    with pytest.raises(UnsupportedError, match="must be one of llama, mistral, qwen3 to be upcycled, got 'mixtral'"):
        hf.upcycle(tmp_path / "moe", tmp_path / "out", hf.UpcycleConfig())
    assert not (tmp_path / "out").exists()
