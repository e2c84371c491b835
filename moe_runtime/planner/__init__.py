"""What a run will need, computed from its sizes before anything is allocated. Frozen values in, numbers out."""

from moe_runtime.planner.memory import (
    Batch,
    Layer,
    Line,
    MemoryPlan,
    Optimizer,
    Placement,
    Weight,
    expert_format,
    layer_bytes,
    layer_terms,
    plan_memory,
    weight_bytes,
)

__all__ = [
    "Batch",
    "Layer",
    "Line",
    "MemoryPlan",
    "Optimizer",
    "Placement",
    "Weight",
    "expert_format",
    "layer_bytes",
    "layer_terms",
    "plan_memory",
    "weight_bytes",
]
