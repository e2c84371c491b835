"""A model filled from the checkpoint of a run, as from a Hugging Face folder: plain, and into quantized experts."""

from pathlib import Path

import pytest
import torch
from torch import nn

from moe_runtime import checkpoint, quantized_model_init, recipes
from moe_runtime.checkpoint.hf import load
from moe_runtime.core.errors import CheckpointError
from moe_runtime.integrations import transformers as hf
from moe_runtime.tensor import GroupedTensor

FIELDS = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": True,
}
CPU = torch.device("cpu")


def model(seed: int | None = None, *, grouped: bool = True, **changed: object) -> nn.Module:
    """Of `seed`'s values, or on meta."""
    config = hf.load_config(model_type="qwen3_moe", fields={**FIELDS, **changed})
    built = hf.build(config, single_grouped_weight=grouped, dtype=torch.float32)
    if seed is not None:
        hf.initialize(built, seed=seed, device=CPU)
    return built


@pytest.fixture(params=[True, False], ids=["packed", "separate"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[nn.Module, Path]:
    trained = model(3, grouped=request.param)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    return trained, checkpoint.save(tmp_path, 7, trained, optimizer, {})


def test_every_tensor_is_the_checkpoints(saved: tuple[nn.Module, Path]) -> None:
    trained, path = saved
    other = model()
    report = load(other, path)
    assert report.bytes_read == sum(p.nbytes for p in trained.parameters())
    ids_BS = torch.arange(10)[None]
    assert torch.equal(other(ids_BS).logits, trained(ids_BS).logits)


def test_quantized_experts_hold_the_checkpoints_values_rounded(saved: tuple[nn.Module, Path]) -> None:
    trained, path = saved
    recipe = recipes.MXFP8BlockScaling(backward_override="dequantized")
    with quantized_model_init(recipe=recipe, omit_columnwise_primary_weight_storage=True):
        base = model()
    load(base, path)
    name = "model.layers.1.mlp.experts.experts.down.weight"
    weight = base.get_parameter(name)
    values = trained.state_dict()
    members = [values[f"{name}{e}"] for e in range(6)] if f"{name}0" in values else list(values[name])
    expected = GroupedTensor.pack(torch.stack([torch.as_tensor(m) for m in members]), weight.quantizer)  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(weight.dequantize(), expected.dequantize())
    assert not weight.columnwise  # pyright: ignore[reportAttributeAccessIssue]


def test_another_models_checkpoint_is_refused(saved: tuple[nn.Module, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"belongs to another model: .* should have shape"):
        load(model(moe_intermediate_size=48), saved[1])
