"""Spread a model over ranks."""

from moe_runtime.parallel.distribute import distribute
from moe_runtime.parallel.plan import ParallelPlan

__all__ = ["ParallelPlan", "distribute"]
