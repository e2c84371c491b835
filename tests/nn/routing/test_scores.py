"""Scores, groups and weights against definitions in Python floats."""

# T tokens   E experts   K top-k

import math

import pytest
import torch
from torch import Tensor

from moe_runtime.nn import RouterConfig
from moe_runtime.nn.routing.scores import choose, keep_best_groups, probabilities_of, round_robin, scores_of, weigh


def config_of(**options: object) -> RouterConfig:
    return RouterConfig(**{"num_experts": 4, "hidden_size": 4, "top_k": 2, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value", [-700.0, -150.0, -88.0, -40.001, -39.999, -3.0, 0.0, 2.5, 39.0, 41.0, 700.0])
def test_the_root_of_softplus(value: float, dtype: torch.dtype) -> None:
    """sqrt(log(1 + e^z)) and its derivative sigmoid(z) / (2 sqrt(log(1 + e^z))), where e^z is 0 in fp32 too."""
    z_TE = torch.tensor([[value]], dtype=dtype, requires_grad=True)
    score_TE = scores_of(z_TE, "sqrt_softplus")
    score_TE.sum().backward()
    softplus = max(value, 0.0) + math.log1p(math.exp(-abs(value)))
    sigmoid = 1 / (1 + math.exp(-value)) if value > -700 else math.exp(value)
    root, tolerance = math.sqrt(softplus), 1e-6 if dtype == torch.float32 else 1e-13
    tiny = torch.finfo(dtype).tiny
    assert score_TE.item() == pytest.approx(root, rel=tolerance, abs=tiny)
    assert z_TE.grad is not None and z_TE.grad.item() == pytest.approx(sigmoid / (2 * root), rel=tolerance, abs=tiny)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_probabilities_add_up_to_one(score: str) -> None:
    logits_TE = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * 4
    scores_TE, probability_TE = scores_of(logits_TE, score), probabilities_of(logits_TE, score)
    torch.testing.assert_close(probability_TE.sum(1), torch.ones(5))
    torch.testing.assert_close(probability_TE * scores_TE.sum(1, keepdim=True), scores_TE)


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_probabilities_of_scores_that_vanish_are_finite(score: str) -> None:
    logits_TE = torch.full((2, 3), -1e4, requires_grad=True)
    probabilities_of(logits_TE, score).sum().backward()
    assert logits_TE.grad is not None and logits_TE.grad.isfinite().all()


def chosen(scores: list[float], bias: list[float], **options: object) -> list[int]:
    config = config_of(score="sigmoid", num_experts=len(scores), **options)
    scores_TE = torch.tensor([scores])
    return choose(config, scores_TE, scores_TE, torch.tensor(bias))[0].tolist()


def test_a_masked_group_is_out_of_reach() -> None:
    """Biased scores [.9, -.4 | .3, -.05]: group sums .5 and .25, so experts 0 and 1. A mask of 0 would take 0 and 2."""
    scores, bias = [0.9, 0.1, 0.3, 0.2], [0.0, -0.5, 0.0, -0.25]
    options = {"num_groups": 2, "topk_groups": 1, "top_k": 2}
    assert chosen(scores, bias, **options) == [0, 1]
    masked_TE = keep_best_groups(torch.tensor([scores]) + torch.tensor(bias), 2, 1, 2)
    assert masked_TE[0, 2:].tolist() == [-math.inf] * 2
    scores_TE = torch.tensor([scores])
    gates_TK = weigh(config_of(score="sigmoid", **options), scores_TE, scores_TE, torch.tensor([[0, 1]]))
    assert gates_TK[0].tolist() == pytest.approx([0.9, 0.1])


def test_groups_by_their_best_or_by_a_sum() -> None:
    """[.9, 0 | .6, .5]: the best of a group prefers the first, the sum of two the second."""
    for count, expected in ((1, [0, 1]), (2, [2, 3])):
        options = {"num_groups": 2, "topk_groups": 1, "group_score_topk": count}
        assert chosen([0.9, 0.0, 0.6, 0.5], [0.0] * 4, top_k=2, **options) == expected


def test_equal_groups_go_to_the_lowest() -> None:
    options = {"num_groups": 4, "topk_groups": 2, "top_k": 4}
    assert chosen([0.5] * 8, [0.0] * 8, **options) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_groups_against_a_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores_TE, bias_E = torch.rand(9, 12, generator=generator), torch.randn(12, generator=generator)
    config = config_of(
        score="sigmoid", num_experts=12, top_k=5, num_groups=4, topk_groups=2, expert_bias=True, group_score_topk=2
    )
    for scores_E, ids in zip(scores_TE, choose(config, scores_TE, scores_TE, bias_E).tolist(), strict=True):
        biased = (scores_E + bias_E).tolist()
        sums = [sum(sorted(biased[g * 3 : g * 3 + 3])[-2:]) for g in range(4)]
        groups = sorted(range(4), key=lambda g: (-sums[g], g))[:2]
        reachable = [e for e in range(12) if e // 3 in groups]
        assert ids == sorted(reachable, key=lambda e: (-biased[e], e))[:5]


def test_softmax_before_or_after_choosing() -> None:
    """After: softmax([ln 4, ln 3]) = [4/7, 3/7], the same as before and normalized."""
    logits_TE = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).log()
    scores_TE, ids_TK = scores_of(logits_TE, "softmax"), torch.tensor([[0, 1]])
    for options, expected in (
        ({"softmax_over": "chosen"}, [4 / 7, 3 / 7]),
        ({"softmax_over": "chosen", "scaling_factor": 2.5}, [10 / 7, 7.5 / 7]),
        ({"norm_topk_prob": True}, [4 / 7, 3 / 7]),
        ({}, [0.4, 0.3]),
    ):
        assert weigh(config_of(**options), logits_TE, scores_TE, ids_TK)[0].tolist() == pytest.approx(expected)


def test_softmax_over_the_chosen_orders_what_softmax_over_all_makes_equal() -> None:
    """e^-300 is 0 in fp32, twice; the logits differ."""
    logits_TE = torch.tensor([[0.0, -400.0, -300.0]])
    scores_TE = scores_of(logits_TE, "softmax")
    options = {"num_experts": 3, "hidden_size": 4, "top_k": 2}
    assert choose(RouterConfig(**options), logits_TE, scores_TE, None).tolist() == [[0, 1]]
    assert choose(RouterConfig(**options, softmax_over="chosen"), logits_TE, scores_TE, None).tolist() == [[0, 2]]


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(0, 2, 4), (5, 2, 4), (7, 3, 5), (4, 4, 4), (3, 1, 1)])
def test_experts_in_turn(tokens: int, top_k: int, experts: int) -> None:
    ids_TK: Tensor = round_robin(tokens, top_k, experts, torch.device("cpu"))
    counts = [int((ids_TK == e).sum()) for e in range(experts)]
    assert ids_TK.shape == (tokens, top_k) and max(counts) - min(counts) <= 1 and sum(counts) == tokens * top_k
    assert all(len(set(row)) == top_k for row in ids_TK.tolist())
