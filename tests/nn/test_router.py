"""The router: known values, gradients in float64, ties, the bias that must stay fp32, scores that vanish."""

# T tokens   D model width   E experts   K top-k

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moe_runtime as mr
from moe_runtime.nn import AuxLoss, BatchScope, LoadMeter, RoutingChoice, step_selection_biases
from moe_runtime.nn.balance import expert_counts
from moe_runtime.testing import assert_close_per_expert, strided

# Against float64: the worst measured of values is 3.2e-7, of gradients (computed in fp32, rounded once to the dtype)
# 1.8e-7 and 1.9e-3.
TOLERANCE = 1e-6
GRADIENT_TOLERANCE = {torch.float32: 6e-7, torch.bfloat16: 6e-3}
DEFINITIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: z.softmax(-1),
    "sigmoid": lambda z: z.sigmoid(),
    "sqrt_softplus": lambda z: (1 + z.exp()).log().sqrt(),
}
NAN = float("nan")


def router(width: int, num_experts: int, top_k: int, *, dtype: torch.dtype | None = None, **options: Any) -> mr.Router:
    torch.manual_seed(0)
    if "config_dtype" in options:
        options["dtype"] = options.pop("config_dtype")
    config = mr.RouterConfig(num_experts=num_experts, hidden_size=width, top_k=top_k, **options)
    return mr.Router(config, dtype=dtype)


def identity(num_experts: int, top_k: int, **options: Any) -> mr.Router:
    """A router whose logits are its input."""
    module = router(num_experts, num_experts, top_k, **options)
    with torch.no_grad():
        module.weight.copy_(torch.eye(num_experts))
    return module


def logits_of(*shares: float) -> Tensor:
    return torch.tensor([shares]).log().requires_grad_()


@pytest.mark.parametrize(
    ("options", "gates", "gradient"),
    [
        ({"norm_topk_prob": True}, [4 / 7, 3 / 7], [12 / 49, -12 / 49, 0.0, 0.0]),
        ({}, [0.4, 0.3], [0.24, -0.12, -0.08, -0.04]),
        ({"scaling_factor": 2.5}, [1.0, 0.75], [0.6, -0.3, -0.2, -0.1]),
        ({"norm_topk_prob": True, "scaling_factor": 2.5}, [10 / 7, 7.5 / 7], [30 / 49, -30 / 49, 0.0, 0.0]),
    ],
    ids=["normalized", "plain", "scaled", "normalized and scaled"],
)
def test_known_weights_and_their_gradient(options: dict[str, Any], gates: list[float], gradient: list[float]) -> None:
    """Logits ln [4, 3, 2, 1], so that probabilities are [.4, .3, .2, .1]; the factor is applied once."""
    x_TD = logits_of(4, 3, 2, 1)
    logits_TE, gates_TK, ids_TK = identity(4, 2, **options)(x_TD)
    torch.testing.assert_close(logits_TE, x_TD)
    assert ids_TK.tolist() == [[0, 1]]
    assert gates_TK[0].tolist() == pytest.approx(gates, abs=1e-6)
    gates_TK[0, 0].backward()
    assert x_TD.grad is not None and x_TD.grad[0].tolist() == pytest.approx(gradient, abs=1e-6)


def test_one_choice_has_a_gradient_unless_it_is_normalized() -> None:
    """Softmax over all: .66524 and [.22270, -.16280, -.05989]. Over the one chosen: 1, and no gradient at all."""
    x_TD = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    _, gates_TK, _ = identity(3, 1)(x_TD)
    gates_TK.sum().backward()
    assert gates_TK.item() == pytest.approx(0.66524, abs=1e-5)
    assert x_TD.grad is not None and x_TD.grad[0].tolist() == pytest.approx([0.22270, -0.16280, -0.05989], abs=1e-5)


def test_sigmoid_scores_are_independent() -> None:
    x_TD = torch.tensor([[0.0, 2.0, -1.0, 1.0]], requires_grad=True)
    _, gates_TK, ids_TK = identity(4, 2, score="sigmoid")(x_TD)
    expected = torch.tensor([2.0, 1.0]).sigmoid()
    assert ids_TK.tolist() == [[1, 3]]
    torch.testing.assert_close(gates_TK[0], expected)
    gates_TK[0, 0].backward()
    assert x_TD.grad is not None
    torch.testing.assert_close(x_TD.grad[0], torch.tensor([0.0, float(expected[0] * (1 - expected[0])), 0.0, 0.0]))


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_against_float64(num_tokens: int, dtype: torch.dtype, score: str, normalized: bool) -> None:
    module = router(33, 7, 3, dtype=dtype, score=score, norm_topk_prob=normalized, scaling_factor=1.5)
    with torch.no_grad():
        module.weight.mul_(10)
    x_TD = torch.randn(num_tokens, 33, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    logits_TE, gates_TK, ids_TK = module(x_TD)
    dgates_TK = torch.randn(gates_TK.shape, generator=torch.Generator().manual_seed(2))
    gates_TK.backward(dgates_TK)
    assert logits_TE.dtype == gates_TK.dtype == torch.float32 and ids_TK.dtype == torch.int64
    assert logits_TE.shape == (num_tokens, 7) and gates_TK.shape == ids_TK.shape == (num_tokens, 3)

    x64_TD, weight64_ED = (t.detach().double().requires_grad_() for t in (x_TD, module.weight))
    logits64_TE = x64_TD @ weight64_ED.T
    scores_TE = DEFINITIONS[score](logits64_TE)
    chosen = scores_TE.topk(3, dim=-1)
    assert torch.equal(ids_TK, chosen.indices)
    weights_TK = chosen.values / chosen.values.sum(-1, keepdim=True) if normalized else chosen.values
    (weights_TK * 1.5).backward(dgates_TK.double())
    worst = [
        assert_close_per_expert(logits_TE, logits64_TE, TOLERANCE, name="logits"),
        assert_close_per_expert(gates_TK, weights_TK * 1.5, TOLERANCE, name="gates"),
    ]
    for got, exact in ((x_TD.grad, x64_TD.grad), (module.weight.grad, weight64_ED.grad)):
        assert got is not None and got.dtype == dtype and exact is not None
        # As one vector: an expert that was not chosen may get a gradient of nothing but rounding.
        got, exact = got.flatten(), exact.flatten()
        everything = torch.tensor([len(got)])
        worst.append(assert_close_per_expert(got, exact, GRADIENT_TOLERANCE[dtype], ends=everything, name="gradient"))
    print(f"measured {dtype} {max(worst[:2]):.2e} {max(worst[2:]):.2e}")


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_experts", [4, 17, 64, 256])
def test_equal_scores_go_to_the_lowest_id(num_experts: int, score: str) -> None:
    module = router(8, num_experts, 3, score=score)
    with torch.no_grad():
        module.weight.fill_(0.5)
    _, gates_TK, ids_TK = module(torch.randn(50, 8))
    assert torch.equal(ids_TK, torch.tensor([[0, 1, 2]]).expand(50, 3))
    assert torch.equal(gates_TK[:, 0], gates_TK[:, 2])
    with torch.no_grad():
        module.weight[3].fill_(0.75)
    assert module(torch.ones(1, 8))[2].tolist() == [[3, 0, 1]]


def test_scores_are_told_apart_in_fp32() -> None:
    """Probabilities [.2499, .2501, .25, .25]: expert 1. In bfloat16 all four are .25 and the lowest id would win."""
    shares = torch.tensor([[0.2499, 0.2501, 0.25, 0.25]])
    assert shares.bfloat16().unique().numel() == 1
    assert identity(4, 1)(shares.log())[2].tolist() == [[1]]
    # The same with bfloat16 inputs and weights: sums of 256 and 257 ones, which bfloat16 cannot tell from each other.
    module = router(512, 2, 1, dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.zero_()
        module.weight[0, :256], module.weight[1, :257] = 1.0, 1.0
    logits_TE, _, ids_TK = module(torch.ones(1, 512, dtype=torch.bfloat16))
    assert logits_TE.tolist() == [[256.0, 257.0]] and ids_TK.tolist() == [[1]]


def test_bias_selects_and_weights_come_from_the_scores() -> None:
    module = identity(4, 2, expert_bias=True, norm_topk_prob=True)
    assert module.expert_bias is not None
    module.expert_bias.copy_(torch.tensor([-1.0, 0.0, 0.0, 1.0]))
    x_TD = logits_of(4, 3, 2, 1)
    _, gates_TK, ids_TK = module(x_TD)
    assert ids_TK.tolist() == [[3, 1]]
    assert gates_TK[0].tolist() == pytest.approx([0.1 / 0.4, 0.3 / 0.4])
    gates_TK[0, 0].backward()
    assert x_TD.grad is not None and x_TD.grad[0].tolist() == pytest.approx([0.0, -0.1875, 0.0, 0.1875], abs=1e-6)
    assert not module.expert_bias.requires_grad


def hundred_steps(module: mr.Router) -> Tensor:
    """Adds 1e-3 to each bias a hundred times, starting from 1."""
    assert module.expert_bias is not None
    module.expert_bias.fill_(1.0)
    for _ in range(100):
        module.expert_bias += 1e-3
    return module.expert_bias


CASTS = {
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "to dtype": lambda m: m.to(torch.bfloat16),
    "to device and dtype": lambda m: m.to("cpu", torch.bfloat16),
    "of a model": lambda m: nn.Sequential(nn.Linear(2, 2), m).to(torch.bfloat16)[1],
    "deepcopy": lambda m: copy.deepcopy(m.bfloat16()),
    "load of bfloat16": lambda m: _loaded(m, assign=False),
    "load of bfloat16 by assignment": lambda m: _loaded(m, assign=True),
}


def _loaded(module: mr.Router, assign: bool) -> mr.Router:
    module.load_state_dict({name: value.bfloat16() for name, value in module.state_dict().items()}, assign=assign)
    return module


@pytest.mark.parametrize("way", CASTS)
def test_the_bias_stays_fp32(way: str) -> None:
    """100 steps of 1e-3 from 1 reach 1.1; in bfloat16, whose step at 1 is 2^-7, they stay at 1."""
    module = router(8, 4, 2, expert_bias=True)
    assert module.expert_bias is not None
    module.expert_bias.copy_(torch.tensor([0.5, -0.25, 1.0, 0.0]))
    cast = CASTS[way](module)
    assert cast.expert_bias.dtype == torch.float32 and cast.expert_bias.tolist() == [0.5, -0.25, 1.0, 0.0]
    assert dict(cast.named_buffers())["expert_bias"] is cast.expert_bias
    assert hundred_steps(cast).tolist() == pytest.approx([1.1] * 4, abs=1e-5)


def test_the_bias_of_a_model_on_meta_is_zero_and_fp32_once_real() -> None:
    config = mr.RouterConfig(num_experts=4, hidden_size=8, top_k=2, expert_bias=True)
    for device in ("meta", None):
        module = mr.Router(config, dtype=torch.bfloat16, device=device)
        if device:
            module.to_empty(device="cpu")
        assert module.expert_bias is not None
        assert module.expert_bias.dtype == torch.float32 and module.expert_bias.tolist() == [0.0] * 4
        module.reset_parameters()
        assert module.weight.dtype == torch.bfloat16 and module.weight.isfinite().all()


def test_the_bias_is_fp32_whatever_the_default_dtype() -> None:
    """Models are built under a default dtype of bfloat16 when their checkpoint says so."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = router(8, 4, 2, expert_bias=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert module.weight.dtype == torch.bfloat16
    assert hundred_steps(module).dtype == torch.float32
    assert hundred_steps(module).tolist() == pytest.approx([1.1] * 4, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_stay_fp32_under_autocast(dtype: torch.dtype) -> None:
    module, x_TD = router(32, 7, 3, dtype=dtype), torch.randn(5, 32).to(dtype)
    expected = module(x_TD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = module(x_TD)
    assert got[0].dtype == got[1].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_bias_that_has_values_survives_to_empty() -> None:
    module = router(8, 4, 2, expert_bias=True)
    assert module.expert_bias is not None
    module.expert_bias.fill_(0.5)
    module.to_empty(device="cpu")
    assert module.expert_bias.tolist() == [0.5] * 4


def test_state_dict_holds_the_bias() -> None:
    source, target = router(8, 4, 2, expert_bias=True), router(8, 4, 2, expert_bias=True)
    step_selection_biases([source.expert_bias], torch.tensor([[4, 0, 1, 3]]), 0.25)
    target.load_state_dict(source.state_dict())
    assert target.expert_bias is not None and target.expert_bias.tolist() == [-0.25, 0.25, 0.25, -0.25]
    assert set(router(8, 4, 2).state_dict()) == {"weight"}


def test_first_values() -> None:
    module = router(64, 32, 2)
    assert module.weight.shape == (32, 64) and module.weight.requires_grad
    values = module.weight.detach()
    assert 0.018 < float(values.std()) < 0.022 and abs(float(values.mean())) < 0.002


def test_leading_dims_are_flattened_and_strides_do_not_matter() -> None:
    module, x = router(8, 4, 2), torch.randn(2, 3, 8)
    flat = module(x.reshape(6, 8))
    for got in (module(x), module(strided(x))):
        assert all(torch.equal(a, b) for a, b in zip(got, flat, strict=True))


def test_all_experts_may_be_chosen() -> None:
    _, gates_TK, ids_TK = identity(3, 3)(logits_of(1, 3, 2))
    assert ids_TK.tolist() == [[1, 2, 0]] and gates_TK.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("value", [0.0, 100.0, -100.0, -200.0, 1e4, -1e4])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_extreme_logits_give_finite_weights_and_gradients(score: str, value: float) -> None:
    """Sigmoids far below zero are 0 in fp32; dividing by their sum must not make NaN of a whole batch."""
    x_TD = torch.full((2, 4), value, requires_grad=True)
    _, gates_TK, _ = identity(4, 2, score=score, norm_topk_prob=True)(x_TD)
    gates_TK.square().sum().backward()
    assert gates_TK.isfinite().all() and x_TD.grad is not None and x_TD.grad.isfinite().all()


def test_float64_tells_apart_what_float32_does_not() -> None:
    """Logits 1 and 1 + 2^-30: the second wins in fp64, a tie goes to the first in fp32."""
    for dtype, expected in (("float32", 0), ("float64", 1)):
        module = router(2, 2, 1, dtype=torch.float64, config_dtype=dtype)
        with torch.no_grad():
            module.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 2.0**-30]]))
        logits_TE, gates_TK, ids_TK = module(torch.ones(1, 2, dtype=torch.float64))
        assert ids_TK.item() == expected and logits_TE.dtype == getattr(torch, dtype)
        assert gates_TK.dtype == torch.float32


def test_the_linear_bias_is_a_parameter_of_the_logits() -> None:
    """gpt-oss: logits with a trained bias, top-k, then the softmax of the chosen."""
    module = identity(4, 2, linear_bias=True, softmax_over="chosen")
    assert module.bias is not None and module.bias.tolist() == [0.0] * 4
    with torch.no_grad():
        module.bias.copy_(torch.tensor([0.0, 0.0, 2.0, 1.0]))
    logits_TE, gates_TK, ids_TK = module(torch.zeros(1, 4))
    gates_TK[0, 0].backward()
    assert logits_TE.tolist() == [[0.0, 0.0, 2.0, 1.0]] and ids_TK.tolist() == [[2, 3]]
    p = torch.tensor([2.0, 1.0]).softmax(0)
    torch.testing.assert_close(gates_TK[0], p)
    assert module.bias.grad is not None
    torch.testing.assert_close(module.bias.grad, torch.tensor([0.0, 0.0, float(p[0] * p[1]), float(-p[0] * p[1])]))
    assert set(module.state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("options", [{}, {"norm_topk_prob": True}, {"score": "sigmoid"}, {"num_groups": 2}], ids=str)
def test_nan_disturbs_no_other_token_and_no_index(options: dict[str, Any]) -> None:
    module, x_TD = router(8, 4, 2, **options), torch.randn(5, 8)
    expected = module(x_TD)
    poisoned_TD = x_TD.clone()
    poisoned_TD[2] = NAN
    _, gates_TK, ids_TK = module(poisoned_TD)
    others = [0, 1, 3, 4]
    assert torch.equal(gates_TK[others], expected[1][others]) and torch.equal(ids_TK[others], expected[2][others])
    assert gates_TK[2].isnan().all(), "seen, not hidden"
    assert len(set(ids_TK[2].tolist())) == 2 and all(0 <= e < 4 for e in ids_TK[2].tolist())


@pytest.mark.parametrize("selection", ["topk", "sinkhorn", "round_robin"])
def test_padding_is_routed_nowhere(selection: str) -> None:
    module, x_TD = router(8, 4, 2, selection=selection, jitter=0.1), torch.randn(6, 8)
    padding_T = torch.tensor([False, True, False, False, True, False])
    poisoned_TD = torch.where(padding_T[:, None], NAN, x_TD).requires_grad_()
    logits_TE, gates_TK, ids_TK = module(poisoned_TD, padding_T=padding_T, jitter_seed=3)
    assert torch.equal(ids_TK < 0, padding_T[:, None].expand(6, 2))
    assert not gates_TK[padding_T].any() and logits_TE.isfinite().all()
    (gates_TK.square().sum() + logits_TE.sum()).backward()
    assert poisoned_TD.grad is not None and poisoned_TD.grad.isfinite().all() and not poisoned_TD.grad[padding_T].any()
    assert module.weight.grad is not None and module.weight.grad.isfinite().all() and module.weight.grad.any()
    other = module(torch.where(padding_T[:, None], 7.0, x_TD), padding_T=padding_T, jitter_seed=3)
    assert torch.equal(other[1], gates_TK) and torch.equal(other[2], ids_TK)


@pytest.mark.parametrize("padding", [torch.zeros(5, dtype=torch.bool), torch.zeros(6)], ids=["length", "dtype"])
def test_padding_that_does_not_fit(padding: Tensor) -> None:
    with pytest.raises(ValueError, match=r"padding must be bool \(6,\), one a token; got torch\.\w+ \([56],\)"):
        router(8, 4, 2)(torch.zeros(6, 8), padding_T=padding)


def test_forced_balance_spreads_and_still_trains() -> None:
    module = router(8, 4, 2, selection="round_robin")
    with torch.no_grad():
        module.weight[0] += 100.0
    for mode in (True, False):
        _, gates_TK, ids_TK = module.train(mode)(torch.rand(6, 8))
        assert expert_counts(ids_TK, 4).tolist() == [3, 3, 3, 3]
    gates_TK.square().sum().backward()
    assert module.weight.grad is not None


def test_sinkhorn_balances_in_training_only() -> None:
    module = identity(2, 1, selection="sinkhorn")
    x_TD = torch.stack([torch.arange(1.0, 9.0), torch.zeros(8)], dim=1)
    _, gates_TK, ids_TK = module(x_TD)
    assert ids_TK[:, 0].tolist() == [1] * 4 + [0] * 4
    torch.testing.assert_close(gates_TK, x_TD.softmax(1).gather(1, ids_TK), msg="weights are of the scores")
    assert module.eval()(x_TD)[2][:, 0].tolist() == [0] * 8


def test_jitter_is_bounded_seeded_and_off_in_evaluation() -> None:
    module, ones_TD = identity(4, 1, jitter=0.125), torch.ones(500, 4)
    noise_TE = module(ones_TD, jitter_seed=1)[0].detach()
    assert 0.875 <= float(noise_TE.min()) < 0.88 and 1.12 < float(noise_TE.max()) <= 1.125
    assert noise_TE.unique().numel() > 1900, "each element has its own"
    assert abs(float(noise_TE.mean()) - 1) < 0.01
    state = torch.get_rng_state()
    assert torch.equal(module(ones_TD, jitter_seed=1)[0], noise_TE)
    assert not torch.equal(module(ones_TD, jitter_seed=2)[0], noise_TE)
    assert torch.equal(torch.get_rng_state(), state), "a seed leaves torch's own generator alone"
    assert torch.equal(module.eval()(ones_TD)[0], ones_TD)


@pytest.mark.parametrize(("seed", "preserved"), [(5, True), (5, False), (None, True)])
def test_jitter_under_recomputation(seed: int | None, preserved: bool) -> None:
    """The recomputed forward chooses the same ids, or the number of rows of an expert changes under autograd's feet."""
    module = router(16, 8, 2, jitter=0.3)
    x_TD, results, seen = torch.randn(64, 16), [], []

    def block(x_TD: Tensor) -> Tensor:
        logits_TE, gates_TK, ids_TK = module(x_TD, jitter_seed=seed)
        seen.append(ids_TK)
        rows_RD = x_TD[(ids_TK == 3).any(1)]  # as many rows as tokens chose expert 3
        return (gates_TK.square().sum() + logits_TE.sin().sum()) * rows_RD.square().sum()

    for recompute in (False, True):
        module.zero_grad()
        torch.manual_seed(11)
        x = x_TD.clone().requires_grad_()
        loss = checkpoint(block, x, use_reentrant=False, preserve_rng_state=preserved) if recompute else block(x)
        loss.backward()
        results.append([loss.detach(), x.grad, module.weight.grad])
    assert len(seen) == 3 and torch.equal(seen[0], seen[1]) and torch.equal(seen[1], seen[2])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_replay_follows_ids_and_makes_weights_anew() -> None:
    module, x_TD = router(8, 4, 2, norm_topk_prob=True), torch.randn(6, 8)
    _, gates_TK, ids_TK = module(x_TD)
    _, again_TK, same_TK = module(x_TD, replay=RoutingChoice(ids_TK))
    assert torch.equal(again_TK, gates_TK) and torch.equal(same_TK, ids_TK)
    again_TK.square().sum().backward()
    assert module.weight.grad is not None and module.weight.grad.any()
    other_TK = torch.tensor([[3, 2]] * 5 + [[-1, 1]])
    logits_TE, gates_TK, followed_TK = module(x_TD, replay=RoutingChoice(other_TK))
    assert torch.equal(followed_TK, other_TK) and gates_TK[5, 0] == 0
    shares_TK = logits_TE.softmax(1).gather(1, other_TK[:5])
    torch.testing.assert_close(gates_TK[:5], shares_TK / shares_TK.sum(1, keepdim=True))


def test_replay_of_recorded_weights_takes_them_as_they_are() -> None:
    module, x_TD = router(8, 4, 2), torch.randn(6, 8)
    _, gates_TK, ids_TK = module(x_TD)
    with torch.no_grad():
        module.weight.normal_()
    _, replayed_TK, _ = module(x_TD, replay=RoutingChoice(ids_TK, gates_TK.detach()))
    assert torch.equal(replayed_TK, gates_TK) and not replayed_TK.requires_grad


@pytest.mark.parametrize(
    "choice",
    [
        RoutingChoice(torch.zeros(5, 2, dtype=torch.int64)),
        RoutingChoice(torch.zeros(6, 2, dtype=torch.int32)),
        RoutingChoice(torch.zeros(6, 2, dtype=torch.int64), torch.zeros(6, 1)),
    ],
    ids=["tokens", "dtype", "gates"],
)
def test_replay_that_does_not_fit(choice: RoutingChoice) -> None:
    with pytest.raises(ValueError, match=r"routing to replay must have int64 ids and gates of shape \(6, 2\), got"):
        router(8, 4, 2)(torch.zeros(6, 8), replay=choice)


def test_losses_of_a_router_alone() -> None:
    losses = (AuxLoss(kind="batch", coefficient=0.1), AuxLoss(kind="sequence", coefficient=0.2))
    module = router(8, 4, 2, aux_losses=losses)
    logits_TE, _, ids_TK = module(torch.randn(2, 3, 8))
    whole = module.losses(logits_TE, ids_TK, num_sequences=2)
    assert whole.batch is not None and whole.sequence is not None and whole.z is None
    assert whole.total.item() == pytest.approx(0.1 * whole.batch.item() + 0.2 * whole.sequence.item(), rel=1e-6)
    half = module.losses(logits_TE, ids_TK, num_sequences=2, scope=BatchScope(num_tokens=12, num_sequences=4))
    assert half.total.item() == pytest.approx(whole.total.item() / 2, rel=1e-6)


def test_one_bias_step_of_two_microbatches_under_recomputation() -> None:
    """8 tokens of 2 choices are 16 counts, recomputed or not; [6, 2] and then [1, 7] are one step of [7, 9]."""
    module, meter = identity(2, 1, expert_bias=True), LoadMeter(1, 2, torch.device("cpu"))
    assert module.expert_bias is not None
    for first in (6, 1):
        x_TD = torch.tensor([[1.0, 0.0]] * first + [[0.0, 1.0]] * (8 - first)).requires_grad_()
        _, gates_TK, ids_TK = checkpoint(module, x_TD, use_reentrant=False)
        meter.add([ids_TK])
        gates_TK.sum().backward()
    assert meter.global_counts().tolist() == [[7, 9]]
    step_selection_biases([module.expert_bias], meter.global_counts(), 0.5)
    assert module.expert_bias.tolist() == [0.5, -0.5]


def test_hundred_repeats_give_the_same_bits() -> None:
    module = router(16, 8, 3, num_groups=4, topk_groups=2, score="sigmoid", norm_topk_prob=True, expert_bias=True)
    x_TD, first = torch.randn(33, 16), None
    for _ in range(100):
        module.zero_grad()
        outputs = module(x_TD)
        (outputs[0].square().sum() + outputs[1].square().sum()).backward()
        got = [*(t.detach() for t in outputs), module.weight.grad]
        first = first or got
        assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True))


@pytest.mark.parametrize("shape", [(4, 16), (8, 4), (12,), (2, 8, 3)], ids=str)
def test_tokens_of_a_wrong_width(shape: tuple[int, ...]) -> None:
    """(4, 16) would be 8 tokens of width 8 when only the number of elements counts."""
    with pytest.raises(ValueError, match=r"8.*got"):
        router(8, 4, 2)(torch.zeros(shape))


@pytest.mark.parametrize("top_k", [0, -1, 5])
def test_top_k_out_of_range(top_k: int) -> None:
    with pytest.raises(ValueError, match=rf"top_k must be in \[1, num_experts=4\], got {top_k}"):
        mr.RouterConfig(num_experts=4, hidden_size=8, top_k=top_k)


def test_config_is_a_frozen_value_that_checks_itself() -> None:
    with pytest.raises(ValueError, match="score must be one of 'softmax', 'sigmoid', 'sqrt_softplus'; got 'relu'"):
        mr.RouterConfig(num_experts=4, hidden_size=8, top_k=1, score="relu")
    config = mr.RouterConfig(num_experts=4, hidden_size=8, top_k=1)
    with pytest.raises(AttributeError):
        config.top_k = 2
    with pytest.raises(TypeError):
        mr.RouterConfig(4, 8, 1)


@pytest.mark.parametrize("hidden_size", [0, -8])
def test_config_width_below_one(hidden_size: int) -> None:
    with pytest.raises(ValueError, match=rf"hidden_size must be at least 1, got {hidden_size}"):
        mr.RouterConfig(num_experts=4, hidden_size=hidden_size, top_k=1)
