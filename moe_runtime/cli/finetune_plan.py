"""The planner's questions answered from a model on meta: which parameters, which blocks, how much at a time."""

from typing import Any

from torch import nn

from moe_runtime.integrations.transformers import experts_modules
from moe_runtime.nn import RoutedExperts
from moe_runtime.planner import Batch, Layer, MemoryPlan, Optimizer, Placement, Weight, plan_memory
from moe_runtime.tensor import QuantizedTensor
from moe_runtime.train.finetune_config import FinetuneConfig
from moe_runtime.train.loop import hf_top_k

_PRODUCTS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_up": "gate_up",
    "down": "down",
}
_BYTES = {"float32": 4, "bfloat16": 2}


def plan_of(config: FinetuneConfig, model: nn.Module, text_config: Any, world_size: int) -> MemoryPlan:
    """The plan of one rank for `model`, on meta with its adapters; `text_config` is its Hugging Face config."""
    value_bytes = _BYTES[config.train.dtype]
    sharded = config.parallel.data == "fsdp2"
    sequences = config.train.global_batch_size // (config.train.microbatches * world_size)
    return plan_memory(
        weights_of(model),
        placement=Placement(
            shard=world_size // config.parallel.replicate if sharded else 1, expert=config.parallel.expert
        ),
        optimizer=Optimizer(
            states={"adamw": 2, "sgd": 1 if config.optim.momentum else 0}[config.optim.name],
            masters=config.train.dtype != "float32",
            steps=config.optim.name == "adamw",
        ),
        layers=_layers(config, model, text_config),
        batch=Batch(
            sequences=sequences,
            seq_length=config.data.seq_length,
            value_bytes=value_bytes,
            vocab=text_config.vocab_size,
            packed=config.data.packing,
            recompute=config.train.activation_checkpointing,
        ),
    )


def weights_of(model: nn.Module) -> list[Weight]:
    """Every parameter of a model that is not distributed yet."""
    experts = tuple(f"{name}." for name in experts_modules(model))
    return [_weight(name, parameter, name.startswith(experts)) for name, parameter in model.named_parameters()]


def _weight(name: str, parameter: nn.Parameter, is_expert: bool) -> Weight:
    quantizer = parameter.quantizer if isinstance(parameter, QuantizedTensor) else None
    return Weight(
        name=name,
        shape=tuple(parameter.shape),
        value_bytes=parameter.dtype.itemsize,
        is_expert=is_expert,
        trains=parameter.requires_grad,
        format=None if quantizer is None else quantizer.format,
        columnwise=quantizer is not None and quantizer.columnwise,
    )


def _layers(config: FinetuneConfig, model: nn.Module, text_config: Any) -> list[Layer]:
    heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    adapted = frozenset(_PRODUCTS[name] for name in config.lora.target_modules if name in _PRODUCTS)
    return [
        Layer(
            hidden=module.config.hidden_size,
            heads=heads,
            key_heads=kv_heads,
            head_width=head_dim,
            expert_width=module.config.intermediate_size,
            num_experts=module.config.num_experts,
            top_k=hf_top_k(text_config),
            adapted=adapted,
            rank=config.lora.rank,
            dropout=config.lora.dropout > 0,
            head_norms=_has_head_norms(model),
        )
        for module in experts_modules(model).values()
        if isinstance(module, RoutedExperts)
    ]


def _has_head_norms(model: nn.Module) -> bool:
    return any(name.endswith(".q_norm") for name, _ in model.named_modules())
