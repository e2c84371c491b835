"""How far quantized products lie from those in high precision, for each recipe and override.

    python -m moe_runtime.bench.recipes [--device cuda] [--dtype bfloat16]

One grouped layer with random operands: ||quantized - exact|| / ||exact|| of the output, of the gradient of the rows and
of the gradient of the weight, over all and the worst of any expert's block of 16 columns.
"""

# R routed rows   D in features   F out features   E experts

import argparse
from typing import NamedTuple

import torch
from torch import Tensor

import moe_runtime as mr
from moe_runtime.precision import Recipe, recipes
from moe_runtime.testing.compare import assert_close_per_expert

_SPLITS = [0, 700, 33, 1, 410, 512, 128, 264]
_IN, _OUT = 512, 256


class Errors(NamedTuple):
    """Relative error of one tensor: over all, and of the worst expert's block of columns."""

    whole: float
    worst: float

    def __str__(self) -> str:
        return f"{self.whole:.2e}, {self.worst:.2e}"


def main() -> None:
    """Prints one markdown row a recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    exact = _products(recipes.HighPrecision(), arguments.device, dtype)
    print("| recipe | backward_override | output: whole, worst | dgrad | wgrad |")
    print("|---|---|---|---|---|")
    for kind in (
        recipes.Float8CurrentScaling,
        recipes.Float8BlockScaling,
        recipes.MXFP8BlockScaling,
        recipes.NVFP4BlockScaling,
    ):
        for override in (None, "dequantized", "high_precision"):
            recipe = kind(backward_override=override)
            found = _products(recipe, arguments.device, dtype)
            errors = [
                _errors(got, want, by_rows=index < 2)
                for index, (got, want) in enumerate(zip(found, exact, strict=True))
            ]
            print(f"| {recipe.name} | {override or 'none'} | {' | '.join(map(str, errors))} |", flush=True)


def _products(recipe: Recipe, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of the rows, gradient of the weight."""
    torch.manual_seed(0)
    layer = mr.GroupedLinear(len(_SPLITS), _IN, _OUT, dtype=dtype)
    x_RD = torch.randn(sum(_SPLITS), _IN, dtype=dtype)
    dy_RF = torch.randn(sum(_SPLITS), _OUT, dtype=dtype)
    layer, x_RD, dy_RF = layer.to(device), x_RD.to(device).requires_grad_(), dy_RF.to(device)
    with mr.autocast(recipe=recipe):
        y_RF = layer(x_RD, _SPLITS)
    y_RF.backward(dy_RF)
    assert x_RD.grad is not None and layer.weight.grad is not None
    return y_RF.detach(), x_RD.grad, layer.weight.grad


def _errors(got: Tensor, expected: Tensor, *, by_rows: bool) -> Errors:
    ends = torch.tensor(_SPLITS).cumsum(0) if by_rows else None
    whole = float((got.double() - expected.double()).norm() / expected.double().norm())
    return Errors(whole, assert_close_per_expert(got.cpu(), expected.cpu(), float("inf"), ends=ends))


if __name__ == "__main__":
    main()
