"""Modules: configuration, parameters, and a forward that reads as the diagram."""

from moe_runtime.ep import Capacity
from moe_runtime.nn.balance import LoadMeter, load_balancing_loss, step_selection_biases
from moe_runtime.nn.grouped_linear import GroupedLinear
from moe_runtime.nn.grouped_lora import GroupedLoRA
from moe_runtime.nn.grouped_mlp import GroupedMLP
from moe_runtime.nn.lora_config import LoRAConfig
from moe_runtime.nn.moe_layer import MoEConfig, MoELayer, MoEOutput
from moe_runtime.nn.routed_experts import RoutedExperts, RoutedExpertsConfig, watch_exchanges
from moe_runtime.nn.router import Router
from moe_runtime.nn.routing import (
    AuxLoss,
    BatchScope,
    RouterConfig,
    RouterLosses,
    RoutingChoice,
    RoutingRecord,
)
from moe_runtime.nn.shared_experts import SharedExperts, SharedExpertsConfig
from moe_runtime.nn.storage_report import StorageReport, StoredParameter, storage_report

__all__ = [
    "AuxLoss",
    "BatchScope",
    "Capacity",
    "GroupedLinear",
    "GroupedLoRA",
    "GroupedMLP",
    "LoRAConfig",
    "LoadMeter",
    "MoEConfig",
    "MoELayer",
    "MoEOutput",
    "RoutedExperts",
    "RoutedExpertsConfig",
    "Router",
    "RouterConfig",
    "RouterLosses",
    "RoutingChoice",
    "RoutingRecord",
    "SharedExperts",
    "SharedExpertsConfig",
    "StorageReport",
    "StoredParameter",
    "load_balancing_loss",
    "step_selection_biases",
    "storage_report",
    "watch_exchanges",
]
