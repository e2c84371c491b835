"""Compute: differentiable functions of plain tensors."""

from moe_runtime.functional.activation import Activation, Layout, activate, check_activation
from moe_runtime.functional.ends import ends_from_splits
from moe_runtime.functional.grouped_linear import HeldWeight, add_expert_bias, grouped_linear, stack_experts
from moe_runtime.functional.moe_mlp import TokenRows, moe_mlp
from moe_runtime.functional.quantized_linear import check_weight

__all__ = [
    "Activation",
    "HeldWeight",
    "Layout",
    "TokenRows",
    "activate",
    "add_expert_bias",
    "check_activation",
    "check_weight",
    "ends_from_splits",
    "grouped_linear",
    "moe_mlp",
    "stack_experts",
]
