"""Delayed weight gradients under Megatron's DDP and optimizers equal inline ones without overlap, bit by bit.

The baseline reduces in the same way, packed weights. Buckets exist only where reduction overlaps; they, and separate
weights, cut the buffers into other pieces, and at four ranks gloo adds those in another order.
"""

from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import pytest

Mcore = Callable[..., list[Any]]

AXES: dict[str, tuple[Any, ...]] = {
    "world": (2, 4),
    "ep": (1, 2),
    "distopt": (False, True),
    "overlap": (False, True),
    "schedule": ("inline", "each", "carry", "flush"),
    "layout": ("grouped", "discrete"),
    "precision": ("fp32", "bf16"),
    "fused": (False, True),
}


def exists(case: dict[str, Any]) -> bool:
    """Gradients of several microbatches that wait together are added in the weight's precision, unless they are added
    to main_grad: in bfloat16 that is another sum than the inline one."""
    rounds = case["precision"] == "bf16" and not case["fused"]
    return not (rounds and case["schedule"] in ("carry", "flush"))


ALL = [case for values in product(*AXES.values()) if exists(case := dict(zip(AXES, values, strict=True)))]


def pairs(case: dict[str, Any]) -> set[Any]:
    return set(combinations(case.items(), 2))


def pairwise() -> list[dict[str, Any]]:
    """Few cases that hold every pair of values: greedily, the best each time, the cheapest of equally good ones."""
    wanted, chosen = set().union(*map(pairs, ALL)), []
    while wanted:
        chosen.append(max(ALL, key=lambda case: len(pairs(case) & wanted)))
        wanted -= pairs(chosen[-1])
    return sorted(chosen, key=lambda case: case["world"])


SAMPLE = pairwise()
REST = [case for case in ALL if case not in SAMPLE]


def named(case: dict[str, Any]) -> str:
    flags = [key for key in ("distopt", "overlap", "fused") if case[key]]
    return "-".join([case["schedule"], case["layout"], case["precision"], f"{case['world']}x{case['ep']}", *flags])


def test_the_sample_covers_every_pair_of_values():
    assert len(ALL) == 448
    assert len(SAMPLE) <= 14
    assert set().union(*map(pairs, SAMPLE)) == set().union(*map(pairs, ALL))


def check(case: dict[str, Any], mcore: Mcore) -> None:
    for count, differences in mcore(case["world"], "training_cases.compare_axes", case):
        assert count == 6 * 7
        if case["world"] == 2 or not (case["overlap"] or case["layout"] == "discrete"):
            assert differences == {}
        else:
            gradients = {name: d for name, d in differences.items() if name.startswith("step 0")}
            assert {name: d for name, d in gradients.items() if not d < 1e-6} == {}


@pytest.mark.parametrize("case", SAMPLE, ids=named)
def test_training_equals_inline(case: dict[str, Any], mcore: Mcore):
    check(case, mcore)


@pytest.mark.slow
@pytest.mark.parametrize("case", REST, ids=named)
def test_training_equals_inline_in_the_full_product(case: dict[str, Any], mcore: Mcore):
    check(case, mcore)


def test_both_reducers_agree(mcore: Mcore):
    for differences in mcore(2, "training_cases.reducers_agree", {"schedule": "each", "ep": 2, "overlap": True}):
        assert differences
        assert {name: d for name, d in differences.items() if not d < 1e-6} == {}


def test_the_experts_that_are_compared_move(mcore: Mcore):
    for moved in mcore(2, "training_cases.experts_move"):
        assert len(moved) == 4 and all(moved.values())
