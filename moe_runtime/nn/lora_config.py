"""LoRAConfig: which layers get an adapter, and of what kind."""

import math
from dataclasses import KW_ONLY, dataclass

__all__ = ["LoRAConfig"]


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """A low-rank update scale * B A beside each layer named.

    rank            of the update
    alpha           scale = alpha / rank; with `use_rslora` alpha / sqrt(rank)
    dropout         share of the update's inputs that are dropped in training
    share_outer     one factor for all experts of a layer on the side of the model width: A of "gate_up", B of "down"
    target_modules  names, or ends of dotted names: "gate_up" and "down" are those of routed experts; others are
                    ordinary linear layers, which get PEFT's adapters
    seed            A is drawn from it, for each expert by its name and id; B is 0
    """

    rank: int
    alpha: float
    _: KW_ONLY
    use_rslora: bool = False
    dropout: float = 0.0
    share_outer: bool = False
    target_modules: tuple[str, ...] = ("gate_up", "down")
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")
        if not self.alpha > 0:
            raise ValueError(f"alpha must be positive, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if isinstance(self.target_modules, str) or not self.target_modules:
            raise ValueError(f"target_modules must be at least one name, in a tuple; got {self.target_modules!r}")

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)
