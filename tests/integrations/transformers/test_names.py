"""In and out of Hugging Face folders without loss: every architecture, both name styles, read by transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ARCHITECTURES, config_of, folder_of, reference
from transformers import AutoModelForCausalLM

from moe_runtime.checkpoint import hf as folders
from moe_runtime.core.errors import CheckpointError
from moe_runtime.integrations import transformers as hf

# Architectures that both transformers 4 and 5 hold as one tensor a layer, under the same keys in memory and on disk.
ONE_STYLE = ("gpt_oss", "llama4_text")


def _assert_same(found: Any, expected: Any) -> None:
    found, expected = found.state_dict(), expected.state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("fused", [False, True], ids=["per_expert", "fused"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_load_then_save_then_from_pretrained_is_bit_equal(name: str, fused: bool, tmp_path: Path) -> None:
    theirs = reference(name)
    source = folder_of(theirs, tmp_path / "theirs", fused=fused, shard="20KB")
    assert (source / "model.safetensors.index.json").is_file()
    model = hf.build(config_of(name), single_grouped_weight=not fused)
    report = folders.load(model, source)
    with folders.Folder(source) as held:
        size = sum(torch.Size(held.shape(key)).numel() * held.dtype(key).itemsize for key in held)
    assert report.bytes_read == size, "every byte is read once"
    for style in folders.STYLES:
        options = folders.SaveOptions(style=style, max_shard_bytes=30_000)
        written = folders.save(model, tmp_path / style, options=options)
        _assert_same(AutoModelForCausalLM.from_pretrained(written), theirs)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_keys_are_those_that_transformers_writes(name: str, tmp_path: Path) -> None:
    theirs = reference(name)
    model = hf.build(config_of(name))
    folders.load(model, folder_of(theirs, tmp_path / "theirs"))
    for style in folders.STYLES:
        expected = folder_of(theirs, tmp_path / f"theirs_{style}", fused=style == "fused")
        found = folders.save(model, tmp_path / style, options=folders.SaveOptions(style=style))
        with folders.Folder(found) as ours, folders.Folder(expected) as other:
            described = [{key: (folder.shape(key), folder.dtype(key)) for key in folder} for folder in (ours, other)]
        assert described[0] == described[1]
    names = folders.names_of(model)
    assert (names.pieces["per_expert"] == names.pieces["fused"]) == (name in ONE_STYLE)


def test_a_folder_fills_the_model_in_initializes_place(tmp_path: Path) -> None:
    theirs = reference("qwen3_moe").eval()
    model = hf.build(config_of("qwen3_moe"), balance_bias=True)
    folders.load(model, folder_of(theirs, tmp_path / "theirs"))
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert all(not bias.any() for bias in hf.selection_biases(model))
    ids = torch.arange(24).view(1, 24)
    expected = theirs(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected, rtol=1e-5, atol=1e-6)


def test_tied_embeddings_are_one_tensor_under_either_name(tmp_path: Path) -> None:
    fields = {"tie_word_embeddings": True}
    theirs = reference("qwen3_moe", **fields)
    source = folder_of(theirs, tmp_path / "theirs")
    model = hf.build(config_of("qwen3_moe", **fields))
    folders.load(model, source)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    written = folders.save(model, tmp_path / "ours")
    _assert_same(AutoModelForCausalLM.from_pretrained(written), theirs)
    with folders.Folder(written) as held:
        assert "lm_head.weight" not in held


def test_a_selection_bias_is_not_lost_silently(tmp_path: Path) -> None:
    model = hf.build(config_of("mixtral"), balance_bias=True)
    hf.initialize(model, seed=1, device=torch.device("cpu"))
    folders.save(model, tmp_path / "zero")
    hf.selection_biases(model)[1][3] = 0.5
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.gate\.expert_bias is not zero .* in `drop`"):
        folders.save(model, tmp_path / "lost")
    assert not (tmp_path / "lost").exists()
    folders.save(model, tmp_path / "lost", options=folders.SaveOptions(drop=("expert_bias$",)))
    AutoModelForCausalLM.from_pretrained(tmp_path / "lost")


def test_conditional_models_prefix_and_left_over_keys(tmp_path: Path) -> None:
    """Llama 4 is published inside a model that sees: its text part has a prefix there, and more stands beside it."""
    from safetensors.torch import load_file, save_file

    theirs = reference("llama4_text")
    source = folder_of(theirs, tmp_path / "theirs")
    tensors = {f"language_model.{key}": value for key, value in load_file(source / "model.safetensors").items()}
    save_file({**tensors, "vision_model.conv.weight": torch.ones(2)}, source / "model.safetensors")
    model = hf.build(config_of("llama4_text"))
    with pytest.raises(CheckpointError, match=r"holds vision_model\.conv\.weight, which belongs to no tensor"):
        folders.load(model, source)
    folders.load(model, source, ignore=(r"^vision_model\.",))
    _assert_same(AutoModelForCausalLM.from_pretrained(folders.save(model, tmp_path / "ours")), theirs)
