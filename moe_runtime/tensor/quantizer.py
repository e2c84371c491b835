"""Quantizer: a number format and the directions that are wanted of it. What writes a parameter's bytes."""

# E members   R rows   C columns

from dataclasses import dataclass, replace

from torch import Tensor

from moe_runtime.formats import Format, HighPrecision, Quantized
from moe_runtime.kernels.quantize import quantize

__all__ = ["Quantizer"]


@dataclass(kw_only=True, slots=True)
class Quantizer:
    """Quantizes to `format`, rowwise, columnwise or both.

    A parameter owns its copy (`GroupedTensor.pack` makes it): the usages of a quantizer that a layer holds for its
    activations, reset at every forward, are never a parameter's.
    """

    format: Format
    rowwise: bool = True
    columnwise: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.format, HighPrecision):
            raise ValueError(f"a quantizer needs a quantized format, got {self.format}")
        if not self.format.columnwise_allowed and self.columnwise:
            raise ValueError(f"{self.format.name} is stored row-wise only, got columnwise=True")
        if not self.rowwise and not self.columnwise:
            raise ValueError("a quantizer needs rowwise=True or columnwise=True, got neither")

    def set_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Want a direction from now on, or no more; None changes nothing."""
        changed = replace(
            self,
            rowwise=self.rowwise if rowwise is None else rowwise,
            columnwise=self.columnwise if columnwise is None else columnwise,
        )
        self.rowwise, self.columnwise = changed.rowwise, changed.columnwise

    def copy(self) -> "Quantizer":
        """An independent quantizer of the same format and usages."""
        return replace(self)

    def quantize(self, x_ERC: Tensor, *, seed: int | None = None) -> tuple[Quantized | None, Quantized | None]:
        """(rowwise, columnwise) records of x, None for a direction that is not wanted; see kernels/quantize."""
        return quantize(x_ERC, self.format, rowwise=self.rowwise, columnwise=self.columnwise, seed=seed)
