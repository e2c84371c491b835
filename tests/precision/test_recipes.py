"""Recipes are frozen values: which format each operand has, and what cannot be asked for."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest

import moe_runtime as mr
from moe_runtime.core.errors import UnsupportedError
from moe_runtime.formats import MXFP8, NVFP4, Float8, FP8Block
from moe_runtime.precision import Recipe

ALL: list[Any] = [
    mr.recipes.HighPrecision,
    mr.recipes.Float8CurrentScaling,
    mr.recipes.Float8BlockScaling,
    mr.recipes.MXFP8BlockScaling,
    mr.recipes.NVFP4BlockScaling,
]


@pytest.mark.parametrize(
    ("recipe", "weight", "rows", "gradient"),
    [
        (mr.recipes.MXFP8BlockScaling(), MXFP8(), MXFP8(), MXFP8()),
        (mr.recipes.Float8CurrentScaling(), Float8(), Float8(), Float8(element="e5m2")),
        (
            mr.recipes.Float8CurrentScaling(use_power_2_scales=True),
            Float8(power_of_two=True),
            Float8(power_of_two=True),
            Float8(element="e5m2", power_of_two=True),
        ),
        (mr.recipes.Float8BlockScaling(), FP8Block(two_dimensional=True), FP8Block(), FP8Block()),
        (
            mr.recipes.NVFP4BlockScaling(),
            NVFP4(two_dimensional=True),
            NVFP4(random_hadamard=True),
            NVFP4(random_hadamard=True, stochastic_rounding=True),
        ),
        (
            mr.recipes.NVFP4BlockScaling(
                disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
            ),
            NVFP4(),
            NVFP4(),
            NVFP4(),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Recipe) else "",
)
def test_formats_of_the_operands(recipe: Recipe, weight: Any, rows: Any, gradient: Any) -> None:
    """Tiles on weights only, rounding at random on gradients only, rotation on wgrad's two operands."""
    assert (recipe.weight, recipe.input, recipe.gradient) == (weight, rows, gradient)


@pytest.mark.parametrize("make", ALL)
def test_frozen_equal_by_value_and_keyword_only(make: Any) -> None:
    recipe = make()
    assert recipe == make() and hash(recipe) == hash(make()) and recipe.backward_override is None
    assert pickle.loads(pickle.dumps(recipe)) == recipe == copy.deepcopy(recipe)
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
        recipe.backward_override = "dequantized"
    with pytest.raises(TypeError, match="positional argument"):
        make("dequantized")


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("override", ["dequantized", "high_precision", None])
def test_whose_backward_is_quantized(make: Any, override: Any) -> None:
    recipe = make(backward_override=override)
    assert recipe.quantizes == (make is not mr.recipes.HighPrecision)
    assert recipe.quantized_backward == (recipe.quantizes and override is None)
    assert recipe == dataclasses.replace(make(), backward_override=override)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("override", ["fp32", "", True, "Dequantized"])
def test_unknown_overrides(make: Any, override: Any) -> None:
    with pytest.raises(ValueError, match=r'must be None, "high_precision" or "dequantized", got'):
        make(backward_override=override)


def test_high_precision_has_no_formats() -> None:
    for operand in ("weight", "input", "gradient"):
        with pytest.raises(ValueError, match="the high-precision recipe has no quantized formats"):
            getattr(mr.recipes.HighPrecision(), operand)


def test_delayed_scaling_is_recognized_and_refused() -> None:
    for arguments in ({}, {"margin": 0, "amax_history_len": 1024}):
        with pytest.raises(UnsupportedError, match=r"DelayedScaling is not supported.*expected Float8CurrentScaling"):
            mr.recipes.DelayedScaling(**arguments)


def test_names_are_those_of_the_configuration() -> None:
    assert [make.name for make in ALL] == ["high_precision", "float8", "fp8_block", "mxfp8", "nvfp4"]
