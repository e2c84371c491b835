"""Modules: configuration, parameters, and a forward that reads as the diagram."""

from moe_runtime.ep import Capacity
from moe_runtime.nn.balance import LoadMeter, load_balancing_loss, step_selection_biases
from moe_runtime.nn.grouped_linear import GroupedLinear
from moe_runtime.nn.grouped_mlp import GroupedMLP
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

__all__ = [
    "AuxLoss",
    "BatchScope",
    "Capacity",
    "GroupedLinear",
    "GroupedMLP",
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
    "load_balancing_loss",
    "step_selection_biases",
    "watch_exchanges",
]
