"""Recipes: which number format each operand of the three GEMMs is quantized to, as frozen values.

    fprop   y  = x rowwise    @ w rowwise          formats: input, weight
    dgrad   dx = dy rowwise   @ w columnwise       formats: gradient, weight
    wgrad   dw = dy columnwise @ x columnwise      formats: gradient, input

`backward_override` changes dgrad and wgrad only:

    None              both from quantized operands, as above
    "dequantized"     from the values that fprop multiplied: x and w rowwise, dequantized; dy in high precision
    "high_precision"  from the originals of x and w; dy in high precision

A recipe is data. What multiplies by it is functional/, where it is asked for is `autocast` and `quantized_model_init`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from moe_runtime.core.errors import UnsupportedError
from moe_runtime.formats import MXFP8, NVFP4, Float8, Format, FP8Block

__all__ = [
    "BackwardOverride",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "HighPrecision",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
]

BackwardOverride = Literal["high_precision", "dequantized"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(ABC):
    """The common part of all recipes."""

    name: ClassVar[str]
    backward_override: BackwardOverride | None = None

    def __post_init__(self) -> None:
        if self.backward_override not in (None, *get_args(BackwardOverride)):
            raise ValueError(
                f'backward_override must be None, "high_precision" or "dequantized", got {self.backward_override!r}'
            )

    @property
    def quantizes(self) -> bool:
        """Whether any operand is quantized."""
        return True

    @property
    def quantized_backward(self) -> bool:
        """Whether dgrad and wgrad read quantized operands, and so the weight's columnwise direction."""
        return self.quantizes and self.backward_override is None

    @property
    @abstractmethod
    def weight(self) -> Format:
        """Of the weight, in both directions."""

    @property
    @abstractmethod
    def input(self) -> Format:
        """Of the rows that enter the layer."""

    @property
    @abstractmethod
    def gradient(self) -> Format:
        """Of the gradient of the rows that leave it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HighPrecision(Recipe):
    """Nothing is quantized: what an `autocast` without a recipe means."""

    name: ClassVar[str] = "high_precision"

    @property
    def quantizes(self) -> bool:
        return False

    @property
    def weight(self) -> Format:
        raise ValueError("the high-precision recipe has no quantized formats")

    @property
    def input(self) -> Format:
        raise ValueError("the high-precision recipe has no quantized formats")

    @property
    def gradient(self) -> Format:
        raise ValueError("the high-precision recipe has no quantized formats")


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale a tensor, from its own largest magnitude; E4M3, gradients E5M2.

    use_power_2_scales  cut scales to powers of two
    """

    name: ClassVar[str] = "float8"
    use_power_2_scales: bool = False

    @property
    def weight(self) -> Format:
        return Float8(power_of_two=self.use_power_2_scales)

    @property
    def input(self) -> Format:
        return Float8(power_of_two=self.use_power_2_scales)

    @property
    def gradient(self) -> Format:
        return Float8(element="e5m2", power_of_two=self.use_power_2_scales)


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8BlockScaling(Recipe):
    """FP8 (E4M3) with a float32 scale for each 128 values of a row, and each 128 x 128 tile of a weight.

    Source: DeepSeek-V3 technical report, section 3.3.
    """

    name: ClassVar[str] = "fp8_block"

    @property
    def weight(self) -> Format:
        return FP8Block(two_dimensional=True)

    @property
    def input(self) -> Format:
        return FP8Block()

    @property
    def gradient(self) -> Format:
        return FP8Block()


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8: E4M3 with a power-of-two scale for each 32 values. Source: OCP Microscaling Formats (MX) v1.0."""

    name: ClassVar[str] = "mxfp8"

    @property
    def weight(self) -> Format:
        return MXFP8()

    @property
    def input(self) -> Format:
        return MXFP8()

    @property
    def gradient(self) -> Format:
        return MXFP8()


@dataclass(frozen=True, kw_only=True, slots=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4: E2M1 with an E4M3 scale for each 16 values and a float32 scale a tensor.

    Weights take 16 x 16 tiles; the operands of wgrad are rotated by a random Hadamard transform; gradients are rounded
    stochastically, from a seed that torch's CPU generator gives. Each can be switched off. A weight in one-dimensional
    blocks cannot make its columnwise copy from its rowwise one, one in tiles can.
    Source: "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149).
    """

    name: ClassVar[str] = "nvfp4"
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False

    @property
    def weight(self) -> Format:
        return NVFP4(two_dimensional=not self.disable_2d_quantization)

    @property
    def input(self) -> Format:
        return NVFP4(random_hadamard=not self.disable_rht)

    @property
    def gradient(self) -> Format:
        return NVFP4(random_hadamard=not self.disable_rht, stochastic_rounding=not self.disable_stochastic_rounding)


class DelayedScaling:
    """Refused: scales from past steps' magnitudes are wrong for an expert whose load changes from step to step."""

    def __init__(self, *args: object, **options: object) -> None:
        raise UnsupportedError(
            "DelayedScaling is not supported: an expert without rows has no history to scale by; "
            "expected Float8CurrentScaling, which takes the scale from the values themselves"
        )
