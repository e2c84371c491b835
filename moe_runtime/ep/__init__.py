"""Expert parallelism: moving tokens to their experts and back."""

from moe_runtime.ep.capacity import Capacity
from moe_runtime.ep.dispatcher import AllToAllDispatcher, Dispatched, Dispatcher, LocalDispatcher
from moe_runtime.ep.plan import DispatchPlan

__all__ = ["AllToAllDispatcher", "Capacity", "DispatchPlan", "Dispatched", "Dispatcher", "LocalDispatcher"]
