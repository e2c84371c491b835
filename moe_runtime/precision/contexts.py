"""The two contexts: which format new weights are stored in, and by which recipe layers multiply.

Both are ContextVars: nested use restores the outer state, an exception included, and threads do not see each other's.
Only nn/ reads them, once a construction or a forward, and turns what it reads into a plain argument.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from threading import Lock
from typing import ClassVar

from moe_runtime.precision.recipes import HighPrecision, Recipe

__all__ = [
    "Compute",
    "InitPolicy",
    "autocast",
    "current_compute",
    "current_init",
    "quantized_model_init",
    "recompute_context_fn",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class InitPolicy:
    """How a weight built now is stored; what `quantized_model_init` was given."""

    recipe: Recipe
    preserve_high_precision_init_val: bool = False
    omit_columnwise_primary_weight_storage: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """The recipe that a forward uses now. `recomputing`: it is that of an earlier forward, which runs once more."""

    recipe: Recipe
    recomputing: bool = False


_INIT: ContextVar[InitPolicy | None] = ContextVar("moe_runtime_quantized_model_init", default=None)
_COMPUTE: ContextVar[Compute | None] = ContextVar("moe_runtime_autocast", default=None)
_HIGH_PRECISION = Compute(recipe=HighPrecision())


@contextmanager
def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
    omit_columnwise_primary_weight_storage: bool = False,
) -> Iterator[None]:
    """Experts built inside store their weights quantized by `recipe`, and nothing else of them.

    preserve_high_precision_init_val        keep the values from which they were quantized, which fp32 masters start at
    omit_columnwise_primary_weight_storage  store the rowwise direction only: no quantized backward may read the weights
    Built under `torch.no_grad()`, weights are stored rowwise only as well. `enabled=False` restores high precision.
    Raises ValueError for no recipe, and for omission with a recipe whose backward reads the columnwise direction.
    """
    policy = None
    _check_recipe(recipe)
    if enabled:
        if recipe is None or not recipe.quantizes:
            raise ValueError(f"quantized_model_init needs a recipe that quantizes, got {recipe}")
        if omit_columnwise_primary_weight_storage and recipe.backward_override is None:
            raise ValueError(
                "omit_columnwise_primary_weight_storage needs a recipe whose backward does not read the columnwise "
                f'direction: expected backward_override="dequantized" or "high_precision", got None in {recipe}'
            )
        policy = InitPolicy(
            recipe=recipe,
            preserve_high_precision_init_val=preserve_high_precision_init_val,
            omit_columnwise_primary_weight_storage=omit_columnwise_primary_weight_storage,
        )
    token = _INIT.set(policy)
    try:
        yield
    finally:
        _INIT.reset(token)


@contextmanager
def autocast(enabled: bool = True, recipe: Recipe | None = None) -> Iterator[None]:
    """Grouped layers called inside multiply by `recipe`; without one, or not `enabled`, in high precision."""
    _check_recipe(recipe)
    with _Computing(Compute(recipe=recipe if enabled and recipe is not None else HighPrecision())):
        yield


def _check_recipe(recipe: Recipe | None) -> None:
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be one of moe_runtime.recipes, such as MXFP8BlockScaling(), got {recipe!r}")


class _Computing(AbstractContextManager[None]):
    """Sets the recipe inside. May be entered again: a graph that is kept is recomputed at each backward."""

    # Whether one is open in the whole process whose recipe quantizes. A compiler cannot read a ContextVar, but it can
    # guard on this: where there is nothing to read, layers in high precision compile without a break.
    any_quantizes: ClassVar[bool] = False
    _num_quantizing: ClassVar[int] = 0
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._tokens: list[Token[Compute | None]] = []

    def __enter__(self) -> None:
        self._count(1)
        self._tokens.append(_COMPUTE.set(self._compute))

    def __exit__(self, *failure: object) -> None:
        _COMPUTE.reset(self._tokens.pop())
        self._count(-1)

    def _count(self, change: int) -> None:
        if self._compute.recipe.quantizes:
            with _Computing._lock:
                _Computing._num_quantizing += change
                _Computing.any_quantizes = _Computing._num_quantizing > 0


def recompute_context_fn() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For `torch.utils.checkpoint.checkpoint(context_fn=)`: recompute sees the recipe of the forward.

    On CUDA a backward runs on a thread of its own, usually after the `autocast` of the forward has ended.
    """
    compute = current_compute()
    return _Computing(compute), _Computing(Compute(recipe=compute.recipe, recomputing=True))


def current_init() -> InitPolicy | None:
    """What a weight built now shall be; None: high precision."""
    return _INIT.get()


def current_compute() -> Compute:
    """By which recipe a forward multiplies now."""
    if not _Computing.any_quantizes:
        return _HIGH_PRECISION
    return _COMPUTE.get() or _HIGH_PRECISION
