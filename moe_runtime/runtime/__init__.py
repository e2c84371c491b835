"""Scheduling gradients: when weight gradients are computed and reduced, and that they are, exactly once."""

from moe_runtime.runtime.buckets import GradientBuckets
from moe_runtime.runtime.coordinator import WgradCoordinator
from moe_runtime.runtime.schedules import Schedule, WgradSlot, late_node

__all__ = ["GradientBuckets", "Schedule", "WgradCoordinator", "WgradSlot", "late_node"]
