"""The plan against a model: every byte of parameters, and every byte that autograd keeps of a block."""

import pytest
import torch
from torch import Tensor, nn

from moe_runtime import autocast, quantized_model_init, recipes
from moe_runtime.checkpoint.hf import names_of
from moe_runtime.cli.finetune_plan import weights_of
from moe_runtime.integrations import transformers as hf
from moe_runtime.integrations.peft import add_lora
from moe_runtime.nn import LoRAConfig, storage_report
from moe_runtime.planner import Batch, Layer, layer_bytes, weight_bytes
from moe_runtime.precision import Recipe
from moe_runtime.tensor import QuantizedTensor

CPU = torch.device("cpu")
MXFP8 = recipes.MXFP8BlockScaling(backward_override="dequantized")
HIGH = recipes.HighPrecision()


def adapted(layer: Layer, vocab: int, dtype: torch.dtype, recipe: Recipe, dropout: float) -> nn.Module:
    fields = {
        "vocab_size": vocab,
        "hidden_size": layer.hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.key_heads,
        "head_dim": layer.head_width,
        "num_experts": layer.num_experts,
        "num_experts_per_tok": layer.top_k,
        "moe_intermediate_size": layer.expert_width,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    }
    config = hf.load_config(model_type="qwen3_moe", fields=fields)
    with quantized_model_init(
        enabled=recipe.quantizes, recipe=recipe, omit_columnwise_primary_weight_storage=recipe.quantizes
    ):
        model = hf.build(config, dtype=dtype)
    model.requires_grad_(False)
    add_lora(model, LoRAConfig(layer.rank, 8.0, dropout=dropout))
    return model


def kept_in_blocks(model: nn.Module, batch: Batch, recipe: Recipe) -> list[int]:
    """Bytes that each decoder block saves for backward, parameters left out and no storage counted twice."""
    parts = [part for p in model.parameters() for part in _tensors(p)]
    seen = {part.untyped_storage().data_ptr() for part in parts}
    kept: dict[int | None, int] = {}
    held: list[Tensor] = []
    inside: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        for part in _tensors(tensor):
            storage = part.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                held.append(part)  # alive, so that no other storage gets its address
                block = inside[-1] if inside else None
                kept[block] = kept.get(block, 0) + storage.nbytes()
        return tensor

    for index, block in enumerate(model.get_submodule("model.layers").children()):
        block.register_forward_pre_hook(lambda _m, _a, index=index: inside.append(index))
        block.register_forward_hook(lambda _m, _a, _o: inside.clear())
    ids_BS = torch.randint(0, batch.vocab, (batch.sequences, batch.seq_length))
    positions_BS = torch.arange(batch.seq_length).expand_as(ids_BS) % (batch.seq_length // 2)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(recipe=recipe):
        model(input_ids=ids_BS, position_ids=positions_BS, use_cache=False)
    return [kept[0], kept[1]]


def _tensors(tensor: Tensor) -> list[Tensor]:
    return list(tensor.records.tensors().values()) if isinstance(tensor, QuantizedTensor) else [tensor]


@pytest.mark.parametrize(
    ("dtype", "recipe", "dropout"),
    [
        (torch.float32, HIGH, 0.0),
        (torch.bfloat16, HIGH, 0.0),
        (torch.bfloat16, HIGH, 0.25),
        (torch.bfloat16, MXFP8, 0.0),
        (torch.float32, MXFP8, 0.25),
    ],
)
def test_a_block_keeps_what_was_planned(dtype: torch.dtype, recipe: Recipe, dropout: float) -> None:
    layer = Layer(
        hidden=96,
        heads=6,
        key_heads=2,
        head_width=16,
        expert_width=64,
        num_experts=8,
        top_k=3,
        head_norms=True,
        adapted=frozenset({"gate_up", "down"}),
        rank=8,
        dropout=dropout > 0,
    )
    batch = Batch(sequences=3, seq_length=32, value_bytes=dtype.itemsize, vocab=128)
    model = adapted(layer, batch.vocab, dtype, recipe, dropout)
    planned = sum(weight_bytes(weight) for weight in weights_of(model))
    fill = names_of(model).fill_rest
    assert fill is not None
    fill(model, CPU, frozenset())
    assert planned == sum(parameter.num_bytes for parameter in storage_report(model).parameters)
    first, second = kept_in_blocks(model, batch, recipe)
    assert second == layer_bytes(layer, batch)
    # Its input takes no gradient, so attention before the first adapter keeps nothing.
    assert first < second


def test_what_trains_is_told_apart() -> None:
    layer = Layer(hidden=32, heads=2, key_heads=2, head_width=16, expert_width=32, num_experts=4, top_k=2, rank=4)
    weights = weights_of(adapted(layer, 64, torch.bfloat16, HIGH, 0.0))
    trained = [weight for weight in weights if weight.trains]
    assert len(trained) == 8 and all(weight.is_expert for weight in trained)
    assert {weight.shape for weight in trained} == {(4, 4, 32), (4, 64, 4), (4, 32, 4)}
    assert sum(weight.is_expert for weight in weights) == 12
