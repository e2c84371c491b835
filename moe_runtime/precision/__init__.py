"""Precision: recipes, and the two contexts that ask for them."""

from moe_runtime.precision import recipes
from moe_runtime.precision.contexts import (
    Compute,
    InitPolicy,
    autocast,
    current_compute,
    current_init,
    quantized_model_init,
    recompute_context_fn,
)
from moe_runtime.precision.recipes import BackwardOverride, Recipe

__all__ = [
    "BackwardOverride",
    "Compute",
    "InitPolicy",
    "Recipe",
    "autocast",
    "current_compute",
    "current_init",
    "quantized_model_init",
    "recipes",
    "recompute_context_fn",
]
