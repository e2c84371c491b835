"""Modules: configuration, parameters, and a forward that reads as the diagram."""

from moe_runtime.nn.balance import LoadMeter, load_balancing_loss, step_selection_biases
from moe_runtime.nn.grouped_linear import GroupedLinear
from moe_runtime.nn.grouped_mlp import GroupedMLP
from moe_runtime.nn.routed_experts import RoutedExperts, RoutedExpertsConfig
from moe_runtime.nn.router import Router, RouterConfig

__all__ = [
    "GroupedLinear",
    "GroupedMLP",
    "LoadMeter",
    "RoutedExperts",
    "RoutedExpertsConfig",
    "Router",
    "RouterConfig",
    "load_balancing_loss",
    "step_selection_biases",
]
