"""The plan's numbers: against tensors that are made, and against hand computation."""

from dataclasses import replace

import pytest
import torch

from moe_runtime import quantized_model_init, recipes
from moe_runtime.formats import MXFP8, NVFP4
from moe_runtime.nn import GroupedLinear
from moe_runtime.planner import (
    Batch,
    Layer,
    Optimizer,
    Placement,
    Weight,
    expert_format,
    layer_terms,
    plan_memory,
    weight_bytes,
)
from moe_runtime.precision import Recipe
from moe_runtime.tensor import GroupedTensor

RECIPES: list[Recipe] = [
    recipes.Float8CurrentScaling(backward_override="dequantized"),
    recipes.Float8BlockScaling(backward_override="dequantized"),
    recipes.MXFP8BlockScaling(backward_override="dequantized"),
    recipes.NVFP4BlockScaling(backward_override="dequantized"),
    recipes.NVFP4BlockScaling(backward_override="dequantized", disable_2d_quantization=True),
]
BATCH = Batch(sequences=4, seq_length=16, value_bytes=2, vocab=1000)
LAYER = Layer(hidden=64, heads=4, key_heads=2, head_width=16, expert_width=48, num_experts=8, top_k=2)


@pytest.mark.parametrize("omit", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_stored_bytes_are_those_of_the_parameter(recipe: Recipe, omit: bool) -> None:
    with quantized_model_init(recipe=recipe, omit_columnwise_primary_weight_storage=omit):
        weight = GroupedLinear(3, 128, 256, dtype=torch.bfloat16).weight
    assert isinstance(weight, GroupedTensor)
    planned = Weight(
        name="w",
        shape=(3, 256, 128),
        value_bytes=2,
        format=expert_format(recipe, stored_quantized=True),
        columnwise=not omit,
    )
    assert weight_bytes(planned) == weight.stored_bytes  # pyright: ignore[reportAttributeAccessIssue]


def test_plain_bytes_and_bytes_a_parameter() -> None:
    shape, values = (128, 768, 2048), 128 * 768 * 2048
    assert weight_bytes(Weight(name="w", shape=shape, value_bytes=2)) == 2 * values
    assert expert_format(recipes.MXFP8BlockScaling(), stored_quantized=False) is None
    assert expert_format(recipes.HighPrecision(), stored_quantized=True) is None
    rowwise = Weight(name="w", shape=shape, value_bytes=2, format=MXFP8())
    assert weight_bytes(rowwise) == values * 33 // 32
    assert (
        weight_bytes(Weight(name="w", shape=shape, value_bytes=2, format=MXFP8(), columnwise=True)) == values * 33 // 16
    )
    fp4 = weight_bytes(Weight(name="w", shape=shape, value_bytes=2, format=NVFP4()))
    assert fp4 == values * 9 // 16 + 4 * 128


def weights(trained_bytes: int = 2) -> list[Weight]:
    return [
        Weight(name="experts", shape=(8, 96, 64), value_bytes=2, is_expert=True, format=MXFP8()),
        Weight(name="embedding", shape=(1000, 64), value_bytes=2),
        Weight(name="a", shape=(8, 4, 64), value_bytes=trained_bytes, is_expert=True, trains=True),
        Weight(name="b", shape=(8, 96, 4), value_bytes=trained_bytes, is_expert=True, trains=True),
    ]


def test_every_line_of_one_process() -> None:
    plan = plan_memory(
        weights(),
        placement=Placement(),
        optimizer=Optimizer(states=2, masters=True, steps=True),
        layers=[LAYER, LAYER],
        batch=BATCH,
    )
    adapters = 2 * 8 * 4 * (64 + 96)
    assert plan.of("base experts") == 8 * 96 * 64 * 33 // 32
    assert plan.of("base, the rest") == 128_000
    assert plan.of("adapters") == plan.of("gradients") == adapters
    assert plan.of("optimizer") == adapters // 2 * 12 + 2 * 4
    assert plan.of("activations") == 2 * sum(layer_terms(LAYER, BATCH).values())
    assert plan.of("logits and loss") == 64 * 1000 * 14
    assert plan.total == sum(line.num_bytes for line in plan.lines) and len(plan.lines) == 7


def test_what_ranks_share() -> None:
    def planned(placement: Placement, trained_bytes: int = 4) -> dict[str, int]:
        optimizer = Optimizer(states=2, masters=True, steps=False)
        plan = plan_memory(weights(trained_bytes), placement=placement, optimizer=optimizer, layers=[], batch=BATCH)
        return {line.name: line.num_bytes for line in plan.lines}

    alone, sharded = planned(Placement()), planned(Placement(shard=4, expert=2))
    for name in ("base experts", "base, the rest", "adapters", "gradients", "optimizer"):
        assert sharded[name] * 4 == alone[name], name
    by_expert = planned(Placement(shard=1, expert=2))
    assert by_expert["base experts"] * 2 == alone["base experts"]
    assert by_expert["base, the rest"] == alone["base, the rest"]
    # fp32 adapters are their own masters.
    assert alone["optimizer"] == 2 * alone["adapters"]


def test_recomputed_blocks_keep_their_input_and_one_runs_again() -> None:
    batch = replace(BATCH, recompute=True)
    optimizer = Optimizer(states=0)
    plan = plan_memory([], placement=Placement(), optimizer=optimizer, layers=[LAYER] * 3, batch=batch)
    assert plan.of("activations") == 3 * 64 * 64 * 2 + sum(layer_terms(LAYER, batch).values())
    assert plan.of("optimizer") == plan.of("adapters") == 0
    with pytest.raises(KeyError):
        plan.of("something else")
