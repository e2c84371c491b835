"""Scheduling gradients: when weight gradients are computed and reduced, and that they are, exactly once."""

from moe_runtime.runtime.buckets import GradientBuckets
from moe_runtime.runtime.coordinator import WgradCoordinator
from moe_runtime.runtime.jobs import in_backward
from moe_runtime.runtime.schedules import Schedule, WgradSlot, late_node

__all__ = ["GradientBuckets", "Schedule", "WgradCoordinator", "WgradSlot", "in_backward", "late_node"]
