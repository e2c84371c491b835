"""moe_runtime: a distributed training runtime for grouped mixture-of-experts layers in PyTorch.

    import moe_runtime as mr

Names are loaded when first used, so that reading a configuration or printing help does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "AuxLoss": "moe_runtime.nn",
    "BatchScope": "moe_runtime.nn",
    "Capacity": "moe_runtime.nn",
    "GroupedLinear": "moe_runtime.nn",
    "GroupedLoRA": "moe_runtime.nn",
    "GroupedMLP": "moe_runtime.nn",
    "GroupedTensor": "moe_runtime.tensor",
    "Quantizer": "moe_runtime.tensor",
    "LoRAConfig": "moe_runtime.nn",
    "MoEConfig": "moe_runtime.nn",
    "MoELayer": "moe_runtime.nn",
    "MoEOutput": "moe_runtime.nn",
    "ParallelPlan": "moe_runtime.parallel",
    "RoutedExperts": "moe_runtime.nn",
    "RoutedExpertsConfig": "moe_runtime.nn",
    "Router": "moe_runtime.nn",
    "RouterConfig": "moe_runtime.nn",
    "RouterLosses": "moe_runtime.nn",
    "RoutingChoice": "moe_runtime.nn",
    "RoutingRecord": "moe_runtime.nn",
    "SharedExperts": "moe_runtime.nn",
    "SharedExpertsConfig": "moe_runtime.nn",
    "WgradCoordinator": "moe_runtime.runtime",
    "add_lora": "moe_runtime.integrations.peft",
    "autocast": "moe_runtime.precision",
    "distribute": "moe_runtime.parallel",
    "export_peft": "moe_runtime.integrations.peft",
    "import_peft": "moe_runtime.integrations.peft",
    "load_lora_state_dict": "moe_runtime.integrations.peft",
    "lora_state_dict": "moe_runtime.integrations.peft",
    "merge_lora": "moe_runtime.integrations.peft",
    "quantized_model_init": "moe_runtime.precision",
    "recipes": "moe_runtime.precision",
    "recompute_context_fn": "moe_runtime.precision",
    "storage_report": "moe_runtime.nn",
    "unmerge_lora": "moe_runtime.integrations.peft",
}
_SUBPACKAGES = ("checkpoint", "formats", "optim", "parallel")

if TYPE_CHECKING:
    from moe_runtime import checkpoint as checkpoint
    from moe_runtime import formats as formats
    from moe_runtime import optim as optim
    from moe_runtime import parallel as parallel
    from moe_runtime.integrations.peft import add_lora as add_lora
    from moe_runtime.integrations.peft import export_peft as export_peft
    from moe_runtime.integrations.peft import import_peft as import_peft
    from moe_runtime.integrations.peft import load_lora_state_dict as load_lora_state_dict
    from moe_runtime.integrations.peft import lora_state_dict as lora_state_dict
    from moe_runtime.integrations.peft import merge_lora as merge_lora
    from moe_runtime.integrations.peft import unmerge_lora as unmerge_lora
    from moe_runtime.nn import AuxLoss as AuxLoss
    from moe_runtime.nn import BatchScope as BatchScope
    from moe_runtime.nn import Capacity as Capacity
    from moe_runtime.nn import GroupedLinear as GroupedLinear
    from moe_runtime.nn import GroupedLoRA as GroupedLoRA
    from moe_runtime.nn import GroupedMLP as GroupedMLP
    from moe_runtime.nn import LoRAConfig as LoRAConfig
    from moe_runtime.nn import MoEConfig as MoEConfig
    from moe_runtime.nn import MoELayer as MoELayer
    from moe_runtime.nn import MoEOutput as MoEOutput
    from moe_runtime.nn import RoutedExperts as RoutedExperts
    from moe_runtime.nn import RoutedExpertsConfig as RoutedExpertsConfig
    from moe_runtime.nn import Router as Router
    from moe_runtime.nn import RouterConfig as RouterConfig
    from moe_runtime.nn import RouterLosses as RouterLosses
    from moe_runtime.nn import RoutingChoice as RoutingChoice
    from moe_runtime.nn import RoutingRecord as RoutingRecord
    from moe_runtime.nn import SharedExperts as SharedExperts
    from moe_runtime.nn import SharedExpertsConfig as SharedExpertsConfig
    from moe_runtime.nn import storage_report as storage_report
    from moe_runtime.parallel import ParallelPlan as ParallelPlan
    from moe_runtime.parallel import distribute as distribute
    from moe_runtime.precision import autocast as autocast
    from moe_runtime.precision import quantized_model_init as quantized_model_init
    from moe_runtime.precision import recipes as recipes
    from moe_runtime.precision import recompute_context_fn as recompute_context_fn
    from moe_runtime.runtime import WgradCoordinator as WgradCoordinator
    from moe_runtime.tensor import GroupedTensor as GroupedTensor
    from moe_runtime.tensor import Quantizer as Quantizer


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBPACKAGES})
