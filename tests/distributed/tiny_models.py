"""One tiny model of each mixture-of-experts architecture that is supported, by Hugging Face's model type."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from moe_runtime.integrations import transformers as hf

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DEEPSEEK: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
LINEAR_ATTENTION: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
    "head_dim": 8,
}
# Expert width 20 and model width 32: an orientation guessed from sizes would show.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "intermediate_size": 20, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 6, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 20, "head_dim": 8, "num_experts_per_tok": 2},
    "qwen3_next": {"num_experts": 6, "moe_intermediate_size": 20, "num_experts_per_tok": 2, **LINEAR_ATTENTION},
    "olmoe": {"num_experts": 6, "intermediate_size": 20, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 6,
        "moe_intermediate_size": 20,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **DEEPSEEK,
    },
    "glm4_moe": {
        "n_routed_experts": 6,
        "moe_intermediate_size": 20,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
    },
    "granitemoe": {"num_local_experts": 6, "intermediate_size": 20, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 6, "intermediate_size": 20, "num_experts_per_tok": 2, "head_dim": 8},
    "llama4_text": {
        "num_local_experts": 6,
        "intermediate_size": 20,
        "intermediate_size_mlp": 28,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "interleave_moe_layer_step": 1,
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "n_routed_experts": 6,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 12,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "head_dim": 8,
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 8,
    },
}


def config_of(name: str, **fields: Any) -> Any:
    """The config of architecture `name`, some fields replaced."""
    return hf.load_config(model_type=name, fields={**COMMON, **ARCHITECTURES[name], **fields})


def reference(name: str, seed: int = 0, **fields: Any) -> Any:
    """Hugging Face's own model, every value of it drawn at random: none is zero, none is like another."""
    model = AutoModelForCausalLM.from_config(config_of(name, **fields))
    randomize(model, seed)
    return model


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    """Every floating-point tensor that a folder holds, uniform in +-0.1."""
    generator = torch.Generator().manual_seed(seed)
    held = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point() and id(tensor) in held:
            tensor.uniform_(-0.1, 0.1, generator=generator)


def folder_of(model: Any, folder: Path, *, fused: bool = False, shard: str = "50GB") -> Path:
    """`model` as Hugging Face writes it."""
    model.save_pretrained(folder, save_original_format=not fused, max_shard_size=shard)
    return folder
