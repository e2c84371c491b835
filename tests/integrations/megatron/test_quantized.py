"""Quantized experts under Megatron's optimizers: masters start at unrounded values, a step reaches every byte."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

Mcore = Callable[..., list[Any]]
LAYOUTS = {"grouped": {"single_grouped_weight": True}, "discrete": {"single_grouped_weight": False}}


@pytest.mark.parametrize(
    ("recipe", "keep", "distopt", "layout", "ep"),
    [
        ("mxfp8", True, True, "grouped", 1),
        ("mxfp8", True, True, "grouped", 2),
        ("nvfp4", True, True, "discrete", 1),
        ("mxfp8", False, True, "discrete", 1),
        ("nvfp4", True, False, "grouped", 1),
    ],
)
def test_masters_start_at_the_values_before_rounding(
    recipe: str, keep: bool, distopt: bool, layout: str, ep: int, mcore: Mcore
):
    ranks = mcore(2, "mcore_quantized.masters", recipe, keep, distopt, LAYOUTS[layout], ep)
    shardless = 0
    for name in ranks[0]:
        covered = torch.zeros(ranks[0][name]["start"].numel(), dtype=torch.int64)
        for rank in ranks:
            found = rank[name]
            assert not found["kept"], "values are freed on every rank"
            if found["main"] is None:
                shardless += 1
                continue
            first, end = found["place"] or (0, covered.numel())
            assert found["main"].equal(found["start"][first:end])
            covered[first:end] += 1
        # At expert degree 2 each rank has experts, and so masters, of its own.
        assert covered.eq(1 if distopt and ep == 1 else 2).all()
    if layout == "discrete" and distopt:
        assert shardless > 0, "some rank holds no master of some weight"


@pytest.mark.parametrize(
    ("recipe", "distopt", "layout", "delayed"),
    [
        ("mxfp8", True, "grouped", True),
        ("nvfp4", True, "grouped", False),
        ("mxfp8", True, "discrete", False),
        ("mxfp8", False, "grouped", True),
    ],
)
def test_a_step_writes_every_stored_direction(recipe: str, distopt: bool, layout: str, delayed: bool, mcore: Mcore):
    for found in mcore(2, "mcore_quantized.write_back", recipe, distopt, LAYOUTS[layout], delayed):
        assert len(found) == (2 if layout == "grouped" else 8)
        for name, facts in found.items():
            assert all(facts.values()), (name, facts)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            "no switch",
            "ValueError: experts.linear_fc1.weight is quantized, and the distributed optimizer",
        ),
        ("storage remap", "RuntimeError: the .data of a quantized tensor cannot be replaced"),
        ("float32", "ValueError: experts.linear_fc1.weight is quantized and of nominal type torch.float32"),
        ("nothing", "nothing"),
    ],
)
def test_what_could_not_be_trained_is_refused(fault: str, sentence: str, mcore: Mcore):
    (got,) = mcore(1, "mcore_quantized.refusal", fault)
    assert got.startswith(sentence) or got.startswith(sentence.replace("experts.", "module.experts."))
