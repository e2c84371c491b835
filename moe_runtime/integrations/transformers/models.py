"""A Hugging Face config, and the model of it on meta with our experts in place of theirs."""

import difflib
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from moe_runtime.core.errors import ConfigError, UnsupportedError
from moe_runtime.integrations.transformers.experts import (
    TEMPLATE,
    biased_router,
    experts_modules,
    is_told_ids,
    replace_experts,
    router_modules,
)
from moe_runtime.integrations.transformers.names import attach_checkpoint_names
from moe_runtime.precision import recompute_context_fn


def load_config(
    *, config_file: str = "", model_type: str = "", fields: Mapping[str, Any] | None = None
) -> PretrainedConfig:
    """The Hugging Face config of a config.json, or of a model type with some fields set.

    Raises ConfigError for an unknown type and for values that the config class refuses. Names of fields are not checked
    here: transformers keeps a misspelled one as an attribute that nothing reads.
    """
    if not config_file and model_type not in transformers.CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, transformers.CONFIG_MAPPING.keys(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"model.model_type must be one that transformers knows, got {model_type!r}{hint}")
    try:
        if config_file:
            return AutoConfig.from_pretrained(config_file, **dict(fields or {}))
        return AutoConfig.for_model(model_type, **dict(fields or {}))
    except (StrictDataclassError, ValueError, TypeError, AttributeError) as error:
        source = config_file or model_type
        raise ConfigError(f"[model] does not make a config of {source!r}: {' '.join(str(error).split())}") from error


def build(
    config: PretrainedConfig,
    *,
    experts_backend: str = "grouped",
    single_grouped_weight: bool = True,
    balance_bias: bool = False,
    delay_wgrad_compute: bool = False,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """The causal language model of `config` on meta.

    experts_backend  "grouped": RoutedExperts in place of every experts module; "hf": Hugging Face's own grouped_mm path
    delay_wgrad_compute  the experts' weight gradients are computed after backward, by a deferred coordinator
    balance_bias     routers get a selection bias for auxiliary-loss-free balancing, where their class has none
    Raises UnsupportedError, naming the class, for experts or routers that cannot be replaced.
    """
    template, model = (on_meta(config, dtype or torch.float32) for _ in range(2))
    # How the classes initialize is asked of an untouched copy, which costs no memory on meta.
    model.__dict__[TEMPLATE] = template
    if not experts_modules(model):
        raise UnsupportedError(
            f"no mixture of experts is made of a {config.model_type!r} config: {type(model).__name__} has no experts "
            "module that this version knows how to find"
        )
    if experts_backend == "grouped":
        replace_experts(
            model,
            dtype=dtype,
            single_grouped_weight=single_grouped_weight,
            delay_wgrad_compute=delay_wgrad_compute,
        )
    if balance_bias:
        for name, module in router_modules(model).items():
            if not hasattr(module, "e_score_correction_bias"):
                model.set_submodule(name, biased_router(module, dtype))
    attach_checkpoint_names(model, template)
    return model


def on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of `config` as transformers makes it, dense or not, without storage."""
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except ValueError as error:
            raise UnsupportedError(f"no language model is made of a {config.model_type!r} config: {error}") from error
    if any(is_told_ids(module) for module in experts_modules(model).values()):
        model.set_experts_implementation("grouped_mm")
    return model


def enable_activation_checkpointing(model: PreTrainedModel) -> None:
    """Recompute each block's activations in backward instead of keeping them."""
    # transformers renamed it; the older name warns in newer versions.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": recompute_context_fn})
