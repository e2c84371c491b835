"""moe_runtime: a distributed training runtime for grouped mixture-of-experts layers in PyTorch.

    import moe_runtime as mr

Names are loaded when first used, so that reading a configuration or printing help does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "GroupedLinear": "moe_runtime.nn",
    "GroupedMLP": "moe_runtime.nn",
    "GroupedTensor": "moe_runtime.tensor",
    "ParallelPlan": "moe_runtime.parallel",
    "RoutedExperts": "moe_runtime.nn",
    "RoutedExpertsConfig": "moe_runtime.nn",
    "Router": "moe_runtime.nn",
    "RouterConfig": "moe_runtime.nn",
    "WgradCoordinator": "moe_runtime.runtime",
    "distribute": "moe_runtime.parallel",
}
_SUBPACKAGES = ("checkpoint", "optim", "parallel")

if TYPE_CHECKING:
    from moe_runtime import checkpoint as checkpoint
    from moe_runtime import optim as optim
    from moe_runtime import parallel as parallel
    from moe_runtime.nn import GroupedLinear as GroupedLinear
    from moe_runtime.nn import GroupedMLP as GroupedMLP
    from moe_runtime.nn import RoutedExperts as RoutedExperts
    from moe_runtime.nn import RoutedExpertsConfig as RoutedExpertsConfig
    from moe_runtime.nn import Router as Router
    from moe_runtime.nn import RouterConfig as RouterConfig
    from moe_runtime.parallel import ParallelPlan as ParallelPlan
    from moe_runtime.parallel import distribute as distribute
    from moe_runtime.runtime import WgradCoordinator as WgradCoordinator
    from moe_runtime.tensor import GroupedTensor as GroupedTensor


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBPACKAGES})
