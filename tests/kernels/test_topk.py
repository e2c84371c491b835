"""Choosing the k best: against a sort of Python tuples, with the ties that a router meets."""

# T tokens   E experts   K top-k

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.functional.topk import topk
from moe_runtime.kernels.topk import topk_ids
from moe_runtime.testing import strided


def by_hand(scores: list[float], k: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:k]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_experts=st.integers(1, 9), num_tokens=st.integers(0, 4))
def test_against_a_sort_by_score_then_id(data: st.DataObject, num_experts: int, num_tokens: int) -> None:
    # Few values, so that most rows hold ties; both zeros, which are equal.
    values = st.sampled_from((-1.0, -0.0, 0.0, 0.5, 1.0, math.inf, -math.inf))
    rows = data.draw(st.lists(st.lists(values, min_size=num_experts, max_size=num_experts), max_size=num_tokens))
    k = data.draw(st.integers(1, num_experts))
    scores_TE = torch.tensor(rows).reshape(len(rows), num_experts)
    ids_TK = topk_ids(scores_TE, k)
    assert ids_TK.tolist() == [by_hand(row, k) for row in rows]
    assert ids_TK.dtype == torch.int64 and ids_TK.is_contiguous() and ids_TK.shape == (len(rows), k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (64, 8), (128, 8), (256, 8), (257, 257), (4097, 3)])
def test_equal_scores_at_sizes_where_sorts_change_their_algorithm(num_experts: int, k: int, dtype: torch.dtype) -> None:
    """Scores of three values: the ids of the largest come first, ascending, then those of the next."""
    generator = torch.Generator().manual_seed(num_experts)
    scores_TE = torch.randint(3, (5, num_experts), generator=generator).to(dtype)
    ids_TK = topk_ids(scores_TE, k)
    assert ids_TK.tolist() == [by_hand(row, k) for row in scores_TE.tolist()]
    assert torch.equal(topk_ids(strided(scores_TE), k), ids_TK)


def test_nan_is_chosen_and_so_seen() -> None:
    assert topk_ids(torch.tensor([[1.0, 2.0, math.nan, math.inf]]), 2).tolist() == [[2, 3]]


def test_values_carry_the_gradient_to_what_was_chosen() -> None:
    scores_TE = torch.tensor([[1.0, 3.0, 3.0, 2.0]], requires_grad=True)
    chosen = topk(scores_TE, 3)
    assert chosen.ids_TK.tolist() == [[1, 2, 3]] and chosen.values_TK.tolist() == [[3.0, 3.0, 2.0]]
    chosen.values_TK.backward(torch.tensor([[1.0, 2.0, 4.0]]))
    assert scores_TE.grad is not None and scores_TE.grad.tolist() == [[0.0, 1.0, 2.0, 4.0]]


@pytest.mark.parametrize(("shape", "k"), [((4,), 1), ((2, 3), 0), ((2, 3), 4), ((2, 2, 2), 1)], ids=str)
def test_sizes_that_do_not_fit(shape: tuple[int, ...], k: int) -> None:
    with pytest.raises(ValueError, match=r"expected scores \(T, E\) and k in \[1, E\], got .* and"):
        topk_ids(torch.zeros(shape), k)
