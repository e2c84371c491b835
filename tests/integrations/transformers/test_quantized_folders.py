"""Folders with quantized experts: gpt-oss's MXFP4 blocks and DeepSeek's FP8 blocks, dequantized or kept as they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import config_of, folder_of, reference
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Mxfp4Config

import moe_runtime as mr
from moe_runtime import formats
from moe_runtime.checkpoint import hf as folders
from moe_runtime.core.errors import CheckpointError
from moe_runtime.integrations import transformers as hf
from moe_runtime.tensor import GroupedTensor, QuantizedTensor, Quantizer

WEIGHTS = "model.safetensors"
GPT_OSS = {"hidden_size": 64, "intermediate_size": 32}
DEEPSEEK = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256}
RAGGED = {"hidden_size": 192, "moe_intermediate_size": 160, "intermediate_size": 256}
EXPERTS = "model.layers.1.mlp.experts"


def _rewrite(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> Path:
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


@pytest.fixture
def mxfp4(tmp_path: Path) -> Path:
    """gpt-oss as it is published: experts as (E, out, groups, 16) blocks and (E, out, groups) scales."""
    folder = folder_of(reference("gpt_oss", **GPT_OSS), tmp_path / "mxfp4")
    tensors: dict[str, Tensor] = {}
    for key, value in load_file(folder / WEIGHTS).items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            tensors[key] = value
            continue
        quantizer = Quantizer(format=formats.MXFP4(), columnwise=False)
        packed = GroupedTensor.pack(value.transpose(1, 2).contiguous(), quantizer)
        assert isinstance(packed, QuantizedTensor) and packed.records.row is not None
        tensors[f"{key}_blocks"] = packed.records.row.payload.unflatten(-1, (-1, 16)).contiguous()
        tensors[f"{key}_scales"] = packed.records.row.scale
    return _rewrite(folder, tensors, {"quant_method": "mxfp4"})


def _fp8(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(bytes, scale of each 128 x 128 tile, the values that they stand for), tile by tile."""
    rows, cols = value.shape
    payload, values = torch.empty(rows, cols, dtype=torch.float8_e4m3fn), torch.empty(rows, cols)
    scale = torch.empty(-(-rows // 128), -(-cols // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            tile = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale[i, j] = value[tile].abs().max() / 448
            payload[tile] = (value[tile] / scale[i, j]).to(torch.float8_e4m3fn)
            values[tile] = payload[tile].float() * scale[i, j]
    return payload, scale, values


def _deepseek(folder: Path, fields: dict[str, Any]) -> tuple[Path, Any]:
    """DeepSeek as it is published, and a Hugging Face model of the values that its bytes stand for."""
    theirs = reference("deepseek_v3", **fields)
    folder_of(theirs, folder)
    tensors, values = {}, {}
    for key, value in load_file(folder / WEIGHTS).items():
        tensors[key] = values[key] = value
        if "_proj" in key and key.endswith(".weight"):
            tensors[key], tensors[f"{key}_scale_inv"], values[key] = _fp8(value)
    save_file(values, folder / WEIGHTS, metadata={"format": "pt"})
    plain = AutoModelForCausalLM.from_pretrained(folder)
    _rewrite(folder, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    return folder, plain


def _experts(model: nn.Module) -> dict[str, Tensor]:
    experts: Any = model.get_submodule(EXPERTS)
    if isinstance(experts, mr.RoutedExperts):
        return {name: getattr(experts.experts, name).weight for name in ("gate_up", "down")}
    return {"gate_up": experts.gate_up_proj, "down": experts.down_proj}


def test_mxfp4_is_dequantized_as_transformers_does(mxfp4: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(mxfp4, quantization_config=Mxfp4Config(dequantize=True))
    model = hf.build(config_of("gpt_oss", **GPT_OSS))
    assert folders.load(model, mxfp4).packed == ()
    for name, weight in _experts(model).items():
        assert torch.equal(weight.detach().transpose(1, 2), _experts(theirs)[name].detach()), name


def test_ragged_fp8_blocks_are_dequantized(tmp_path: Path) -> None:
    folder, plain = _deepseek(tmp_path / "fp8", RAGGED)
    for discrete in (False, True):
        model = hf.build(hf.load_config(config_file=str(folder / "config.json")), single_grouped_weight=not discrete)
        folders.load(model, folder)
        experts: Any = model.get_submodule(EXPERTS)
        for name, expected in _experts(plain).items():
            assert torch.equal(getattr(experts.experts, name).stacked_weight().detach(), expected.detach())
        assert torch.equal(model.model.layers[0].mlp.up_proj.weight, plain.model.layers[0].mlp.up_proj.weight)


def test_gpt_oss_blocks_are_kept_as_the_bytes_they_are(mxfp4: Path) -> None:
    model = hf.build(config_of("gpt_oss", **GPT_OSS))
    replaced = folders.pack_experts(model, mxfp4)
    assert len(replaced) == 4
    assert set(folders.load(model, mxfp4).packed) == set(replaced)
    tensors = load_file(mxfp4 / WEIGHTS)
    for name, weight in _experts(model).items():
        assert isinstance(weight, QuantizedTensor) and weight.quantizer.format == formats.MXFP4()
        assert not weight.requires_grad and not weight.columnwise
        row = weight.record("rowwise")
        assert row is not None
        key = f"{EXPERTS}.{name}_proj"
        assert torch.equal(row.payload, tensors[f"{key}_blocks"].flatten(-2))
        assert torch.equal(row.scale, tensors[f"{key}_scales"])
    plain = hf.build(config_of("gpt_oss", **GPT_OSS))
    folders.load(plain, mxfp4)
    ids = torch.arange(24).view(1, 24)
    assert torch.equal(*(m(input_ids=ids, use_cache=False).logits for m in (model, plain)))


def test_deepseek_blocks_are_kept_as_the_bytes_they_are(tmp_path: Path) -> None:
    folder, plain = _deepseek(tmp_path / "fp8", DEEPSEEK)
    config = hf.load_config(config_file=str(folder / "config.json"))
    packed, trained = hf.build(config), None
    assert len(folders.pack_experts(packed, folder)) == 2
    with mr.quantized_model_init(recipe=mr.recipes.Float8BlockScaling()):
        trained = hf.build(config)
    tensors = load_file(folder / WEIGHTS)
    for model, columnwise in ((packed, False), (trained, True)):
        assert len(folders.load(model, folder).packed) == 2
        for name, weight in _experts(model).items():
            assert isinstance(weight, QuantizedTensor) and weight.columnwise == columnwise
            assert torch.equal(weight.dequantize(), _experts(plain)[name].detach())
            row = weight.record("rowwise")
            assert row is not None
            last = "up_proj" if name == "gate_up" else "down_proj"
            expected = tensors[f"{EXPERTS}.5.{last}.weight"].view(torch.uint8)
            assert torch.equal(row.payload[5, -128:], expected[-128:])
            if columnwise:
                column = weight.record("columnwise")
                assert column is not None and torch.equal(column.payload, row.payload.mT)


def test_blocks_that_no_expert_fills_are_left_to_be_dequantized(tmp_path: Path) -> None:
    folder, _ = _deepseek(tmp_path / "fp8", RAGGED)
    model = hf.build(hf.load_config(config_file=str(folder / "config.json")))
    assert folders.pack_experts(model, folder) == ()
    assert not any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters())


def test_initial_values_of_quantized_experts_are_the_folders(tmp_path: Path) -> None:
    theirs = reference("qwen3_moe", moe_intermediate_size=32)
    folder = folder_of(theirs, tmp_path / "theirs")
    for kept in (True, False):
        with mr.quantized_model_init(recipe=mr.recipes.MXFP8BlockScaling(), preserve_high_precision_init_val=kept):
            model = hf.build(config_of("qwen3_moe", moe_intermediate_size=32))
        assert folders.load(model, folder).packed == ()
        for name, weight in _experts(model).items():
            assert isinstance(weight, GroupedTensor) and isinstance(weight, QuantizedTensor)
            expected = _experts(theirs)[name].detach()
            value = weight.get_high_precision_init_val()
            assert (value is None) == (not kept) and (value is None or torch.equal(value, expected))
            again = GroupedTensor.pack(expected, weight.quantizer)
            assert torch.equal(weight.dequantize(), again.dequantize())


def test_quantized_folders_are_written_as_values(mxfp4: Path, tmp_path: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(mxfp4, quantization_config=Mxfp4Config(dequantize=True))
    written = hf.convert(mxfp4, tmp_path / "values")
    assert "quantization_config" not in json.loads((written / "config.json").read_text())
    found = AutoModelForCausalLM.from_pretrained(written).state_dict()
    for key, value in theirs.state_dict().items():
        assert torch.equal(found[key], value), key


def test_nan_in_bytes_is_refused_by_name(mxfp4: Path) -> None:
    tensors = load_file(mxfp4 / WEIGHTS)
    tensors[f"{EXPERTS}.down_proj_scales"][2, 3, 0] = 255
    save_file(tensors, mxfp4 / WEIGHTS, metadata={"format": "pt"})
    for pack in (False, True):
        model = hf.build(config_of("gpt_oss", **GPT_OSS))
        if pack:
            folders.pack_experts(model, mxfp4)
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.experts\.down\.weight holds NaN"):
            folders.load(model, mxfp4)


def test_mxfp4_scales_of_more_groups_than_blocks_are_refused(mxfp4: Path) -> None:
    """Their first groups would fit, and be read as if they were all."""
    tensors = load_file(mxfp4 / WEIGHTS)
    key = next(key for key in sorted(tensors) if key.endswith("down_proj_scales"))
    tensors[key] = torch.cat((tensors[key], tensors[key]), dim=-1)
    save_file(tensors, mxfp4 / WEIGHTS, metadata={"format": "pt"})
    model = hf.build(hf.load_config(config_file=str(mxfp4 / "config.json")))
    with pytest.raises(CheckpointError, match=rf"{key} must have shape "):
        folders.load(model, mxfp4)


def test_scales_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder, _ = _deepseek(tmp_path / "fp8", RAGGED)
    tensors = load_file(folder / WEIGHTS)
    key = f"{EXPERTS}.3.up_proj.weight_scale_inv"
    tensors[key] = tensors[key][:1]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    model = hf.build(hf.load_config(config_file=str(folder / "config.json")))
    with pytest.raises(CheckpointError, match=rf"{key} must have shape \(2, 2\), got \(1, 2\)"):
        folders.load(model, folder)
