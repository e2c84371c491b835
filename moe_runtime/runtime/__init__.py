"""Scheduling gradients: when weight gradients are computed and reduced, and that they are, exactly once."""

from moe_runtime.runtime.buckets import GradientBuckets
from moe_runtime.runtime.coordinator import WgradCoordinator
from moe_runtime.runtime.jobs import JobKey, in_backward
from moe_runtime.runtime.main_grad import MainGrad
from moe_runtime.runtime.ownership import check_main_grad
from moe_runtime.runtime.schedules import Schedule, WgradSlot, late_node

__all__ = [
    "GradientBuckets",
    "JobKey",
    "MainGrad",
    "Schedule",
    "WgradCoordinator",
    "WgradSlot",
    "check_main_grad",
    "in_backward",
    "late_node",
]
