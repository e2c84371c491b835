"""Compute: differentiable functions of plain tensors."""

from moe_runtime.functional.activation import Activation, Layout, activate, check_activation
from moe_runtime.functional.ends import ends_from_splits
from moe_runtime.functional.grouped_linear import (
    HeldAdapter,
    HeldWeight,
    add_expert_bias,
    grouped_linear,
    stack_experts,
)
from moe_runtime.functional.grouped_lora import add_lora_update
from moe_runtime.functional.moe_mlp import TokenRows, moe_mlp
from moe_runtime.functional.quantized_linear import check_weight

__all__ = [
    "Activation",
    "HeldAdapter",
    "HeldWeight",
    "Layout",
    "TokenRows",
    "activate",
    "add_expert_bias",
    "add_lora_update",
    "check_activation",
    "check_weight",
    "ends_from_splits",
    "grouped_linear",
    "moe_mlp",
    "stack_experts",
]
