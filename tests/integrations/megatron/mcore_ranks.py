"""Run a case in the ranks' processes, where megatron is patched for the CPU; here it is not even imported."""

import importlib
from typing import Any


def on_rank(module: str, function: str, *args: Any) -> Any:
    """`module.function(*args)`; what `RankPool.run` calls."""
    importlib.import_module("mcore_shims")
    return getattr(importlib.import_module(module), function)(*args)
