"""What a router's configuration refuses, and in which words."""

import re

import pytest

from moe_runtime.nn import AuxLoss, RouterConfig


def config_of(**options: object) -> RouterConfig:
    return RouterConfig(**{"num_experts": 8, "hidden_size": 4, "top_k": 2, **options})


BALANCE = (AuxLoss(kind="batch", coefficient=0.01),)

REFUSED = [
    ({"top_k": 0}, "top_k must be in [1, num_experts=8], got 0"),
    ({"top_k": 9}, "top_k must be in [1, num_experts=8], got 9"),
    ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
    ({"score": "relu"}, "score must be one of 'softmax', 'sigmoid', 'sqrt_softplus'; got 'relu'"),
    ({"softmax_over": "none"}, "softmax_over must be one of 'all', 'chosen'; got 'none'"),
    ({"score": "sigmoid", "softmax_over": "chosen"}, "softmax_over='chosen' needs score='softmax', got 'sigmoid'"),
    ({"selection": "random"}, "selection must be one of 'topk', 'sinkhorn', 'round_robin'; got 'random'"),
    ({"dtype": "bfloat16"}, "dtype must be one of 'float32', 'float64'; got 'bfloat16'"),
    ({"jitter": 1.0}, "jitter must be in [0, 1), got 1.0"),
    ({"jitter": float("nan")}, "jitter must be in [0, 1), got nan"),
    ({"sinkhorn_iterations": 0}, "sinkhorn_iterations must be at least 1, got 0"),
    ({"num_groups": 3, "topk_groups": 2}, "num_groups must divide num_experts=8, got 3"),
    ({"num_groups": 0, "topk_groups": 2}, "num_groups must divide num_experts=8, got 0"),
    ({"num_groups": 4, "topk_groups": 5}, "topk_groups must be in [1, num_groups=4], got 5"),
    ({"num_groups": 4, "top_k": 3}, "1 groups of 2 experts must hold the top_k=3 that a token chooses"),
    ({"num_groups": 8, "topk_groups": 2}, "group_score_topk must be in [1, 1], the experts of a group, got 2"),
    ({"aux_losses": BALANCE * 2}, "aux_losses must hold at most one of each kind, got batch, batch"),
    ({"selection": "sinkhorn", "aux_losses": BALANCE}, "balances by itself and takes no auxiliary loss 'batch'"),
    (
        {"selection": "sinkhorn", "expert_bias": True},
        "selection='sinkhorn' balances by itself and takes no expert_bias",
    ),
    (
        {"selection": "round_robin", "num_groups": 2},
        "selection='round_robin' balances by itself and takes no num_groups",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config_of(**options)


@pytest.mark.parametrize(
    "options", [{"norm_topk_prob": True}, {"softmax_over": "chosen"}, {"score": "sigmoid", "norm_topk_prob": True}]
)
def test_one_normalized_choice_without_a_balancing_loss_cannot_train(options: dict[str, object]) -> None:
    """The weight of a single choice is then 1, its derivative 0, and the router stays as it was initialized."""
    message = "gives every token the weight 1 and the router no gradient"
    for losses in ((), (AuxLoss(kind="z", coefficient=1.0),), (AuxLoss(kind="batch", coefficient=0.0),)):
        with pytest.raises(ValueError, match=message):
            config_of(top_k=1, aux_losses=losses, **options)
    config_of(top_k=1, aux_losses=BALANCE, **options)
    config_of(top_k=2, **options)
    config_of(top_k=1, num_experts=1, **options)
    config_of(top_k=1, selection="round_robin", **options)


@pytest.mark.parametrize("coefficient", [-0.1, float("inf"), float("nan")])
def test_coefficients_out_of_range(coefficient: float) -> None:
    with pytest.raises(ValueError, match=f"coefficient must be finite and at least 0, got {coefficient}"):
        AuxLoss(kind="z", coefficient=coefficient)


def test_kinds_of_losses() -> None:
    with pytest.raises(ValueError, match="must be one of 'batch', 'sequence', 'global_batch', 'z'; got 'aux'"):
        AuxLoss(kind="aux", coefficient=1.0)


def test_a_frozen_value() -> None:
    config = config_of(aux_losses=BALANCE)
    assert config == config_of(aux_losses=BALANCE) and hash(config) == hash(config_of(aux_losses=BALANCE))
    with pytest.raises(AttributeError):
        config.top_k = 2
