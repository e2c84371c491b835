"""Spread a model over ranks."""

from moe_runtime.parallel.distribute import distribute
from moe_runtime.parallel.plan import ParallelPlan
from moe_runtime.parallel.sync import coordinator_of, gradient_sync

__all__ = ["ParallelPlan", "coordinator_of", "distribute", "gradient_sync"]
