"""Hugging Face MoE models with our experts in place of theirs. The only package that imports transformers.

Building goes in four steps, so that no step holds more than one module's full values:

    build       the model on meta, each experts module replaced by RoutedExperts (no class is patched)
    distribute  (by the caller) split experts, shard parameters
    initialize  materialize, and fill every module as its Hugging Face class would, from a seed of its own
    observe     hooks that record which experts were chosen, for balancing and metrics

A model that `build` made knows its Hugging Face names: `checkpoint.hf.load` fills it from a folder in `initialize`'s
place, and `checkpoint.hf.save` writes it.
"""

try:
    import huggingface_hub as _huggingface_hub  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError("moe_runtime.integrations.transformers needs: pip install 'moe-runtime[train]'") from error

from moe_runtime.integrations.transformers.chat import ChatTokenizer, Sample
from moe_runtime.integrations.transformers.experts import (
    ExpertsLayout,
    experts_layout,
    experts_modules,
    router_modules,
)
from moe_runtime.integrations.transformers.folders import CONFIG_FILE, UpcycleConfig, convert, describe, upcycle
from moe_runtime.integrations.transformers.initial_values import initialize
from moe_runtime.integrations.transformers.models import build, enable_activation_checkpointing, load_config
from moe_runtime.integrations.transformers.observe import RoutingRecorder, num_experts, selection_biases

__all__ = [
    "CONFIG_FILE",
    "ChatTokenizer",
    "ExpertsLayout",
    "RoutingRecorder",
    "Sample",
    "UpcycleConfig",
    "build",
    "convert",
    "describe",
    "enable_activation_checkpointing",
    "experts_layout",
    "experts_modules",
    "initialize",
    "load_config",
    "num_experts",
    "router_modules",
    "selection_biases",
    "upcycle",
]
