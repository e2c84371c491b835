"""Auxiliary losses: known values, gradients against float64, and parts that add up whatever the batch is cut into."""

# T tokens   S sequences   E experts   K top-k

import pytest
import torch
from torch import Tensor

from moe_runtime.nn import AuxLoss, BatchScope, RouterConfig, RouterLosses
from moe_runtime.nn.balance import expert_counts
from moe_runtime.nn.routing import router_losses

KINDS = ("batch", "sequence", "global_batch", "z")
NAN = float("nan")
PROBABILITY = {
    "softmax": lambda z_TE: z_TE.softmax(-1),
    "sigmoid": lambda z_TE: z_TE.sigmoid() / z_TE.sigmoid().sum(-1, keepdim=True),
    "sqrt_softplus": lambda z_TE: (1 + z_TE.exp()).log().sqrt() / (1 + z_TE.exp()).log().sqrt().sum(-1, keepdim=True),
}


def config_of(*kinds: str, experts: int = 4, top_k: int = 2, **options: object) -> RouterConfig:
    losses = tuple(AuxLoss(kind=kind, coefficient=0.5) for kind in kinds)
    return RouterConfig(num_experts=experts, hidden_size=8, top_k=top_k, aux_losses=losses, **options)


def loss_of(kind: str, logits_TE: Tensor, ids_TK: Tensor, **options: object) -> Tensor:
    config = config_of(kind, experts=logits_TE.shape[1], top_k=ids_TK.shape[1])
    options = {"scope": BatchScope(), **options}
    return getattr(router_losses(config, logits_TE, ids_TK, **options), kind)


def random_batch(tokens: int, experts: int = 4, top_k: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    logits_TE = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)) * 2
    return logits_TE.requires_grad_(), logits_TE.topk(top_k).indices


@pytest.mark.parametrize("kind", ["batch", "sequence", "global_batch"])
def test_all_tokens_on_one_expert_of_probability_nine_tenths(kind: str) -> None:
    """1.8; a second softmax would give 1.37995."""
    logits_TE = torch.tensor([[0.9, 0.1]]).log().expand(6, 2)
    ids_TK = torch.zeros(6, 1, dtype=torch.int64)
    assert loss_of(kind, logits_TE, ids_TK, num_sequences=2).item() == pytest.approx(1.8, rel=1e-6)


@pytest.mark.parametrize("kind", ["batch", "sequence", "global_batch"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_balance_is_one(kind: str, top_k: int) -> None:
    ids_TK = (torch.arange(8)[:, None] + torch.arange(top_k)) % 4
    assert loss_of(kind, torch.zeros(8, 4), ids_TK, num_sequences=2).item() == pytest.approx(1.0)


def test_each_layer_has_a_loss_of_its_own() -> None:
    """Layer 0 sends all to expert 0, layer 1 all to expert 1: 2 each, mean 2, though together they look balanced."""
    for expert in (0, 1):
        ids_TK = torch.full((3, 1), expert)
        logits_TE = torch.nn.functional.one_hot(ids_TK[:, 0], 2) * 200.0
        assert loss_of("batch", logits_TE, ids_TK).item() == pytest.approx(2.0)


def test_a_sequence_is_judged_by_itself() -> None:
    """Two sequences, each on one expert: together balanced, apart not."""
    ids_TK = torch.tensor([0, 0, 1, 1])[:, None]
    logits_TE = torch.nn.functional.one_hot(ids_TK[:, 0], 2) * 200.0
    assert loss_of("batch", logits_TE, ids_TK).item() == pytest.approx(1.0)
    assert loss_of("sequence", logits_TE, ids_TK, num_sequences=2).item() == pytest.approx(2.0)
    assert loss_of("sequence", logits_TE, ids_TK, num_sequences=1).item() == pytest.approx(1.0)


def test_z_loss_by_hand() -> None:
    """logsumexp of [0, 0] is ln 2, of [ln 3, 0] ln 4."""
    logits_TE = torch.tensor([[0.0, 0.0], [3.0, 1.0]])
    logits_TE[1].log_()
    expected = (torch.tensor(2.0).log() ** 2 + torch.tensor(4.0).log() ** 2) / 2
    assert loss_of("z", logits_TE, torch.zeros(2, 1, dtype=torch.int64)).item() == pytest.approx(expected.item())


def exact(kind: str, score: str, z_TE: Tensor, ids_TK: Tensor, sequences: int) -> Tensor:
    """The definitions in float64, a loop over sequences and experts."""
    if kind == "z":
        return (z_TE.exp().sum(1).log() ** 2).mean()
    groups = sequences if kind == "sequence" else 1
    total = torch.zeros((), dtype=torch.float64)
    for z, ids in zip(z_TE.chunk(groups), ids_TK.chunk(groups), strict=True):
        probability = PROBABILITY[score](z)
        for e in range(z.shape[1]):
            share = float((ids == e).sum()) / ids.numel()
            total = total + z.shape[1] * share * probability[:, e].mean()
    return total / groups


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("score", PROBABILITY)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind: str, score: str, dtype: str) -> None:
    config = config_of(kind, experts=5, top_k=3, score=score, dtype=dtype)
    z_TE, ids_TK = random_batch(12, 5, 3)
    z_TE = z_TE.detach().to(getattr(torch, dtype)).requires_grad_()
    losses = router_losses(config, z_TE, ids_TK, scope=BatchScope(), num_sequences=3)
    losses.total.backward()
    z64_TE = z_TE.detach().double().requires_grad_()
    expected = exact(kind, score, z64_TE, ids_TK, 3)
    (0.5 * expected).backward()
    part = getattr(losses, kind)
    assert part.dtype == losses.total.dtype == torch.float32
    assert part.item() == pytest.approx(expected.item(), rel=1e-6)
    assert losses.total.item() == pytest.approx(expected.item() / 2, rel=1e-6)
    assert z_TE.grad is not None and z64_TE.grad is not None
    torch.testing.assert_close(z_TE.grad.double(), z64_TE.grad, rtol=1e-5, atol=1e-8)


def test_several_losses_at_once() -> None:
    kinds = dict(zip(KINDS, (0.1, 0.2, 0.3, 0.4), strict=True))
    losses = tuple(AuxLoss(kind=kind, coefficient=coefficient) for kind, coefficient in kinds.items())
    config = RouterConfig(num_experts=4, hidden_size=8, top_k=2, aux_losses=losses)
    logits_TE, ids_TK = random_batch(8)
    got = router_losses(config, logits_TE, ids_TK, scope=BatchScope(), num_sequences=2)
    alone = {kind: loss_of(kind, logits_TE, ids_TK, num_sequences=2) for kind in KINDS}
    for kind in KINDS:
        assert torch.equal(getattr(got, kind), alone[kind])
    assert got.total.item() == pytest.approx(sum(kinds[kind] * alone[kind].item() for kind in KINDS), rel=1e-6)


def test_without_losses() -> None:
    logits_TE, ids_TK = random_batch(3)
    losses = router_losses(config_of(), logits_TE, ids_TK, scope=BatchScope())
    assert losses == RouterLosses(losses.total) and losses.total.item() == 0.0


def accumulated(kind: str, logits_TE: Tensor, ids_TK: Tensor, parts: list[int], sequences: int) -> tuple[float, Tensor]:
    """Loss and gradient of a batch that comes in microbatches of `parts` tokens; f of "global_batch" known ahead."""
    leaf_TE, total = logits_TE.detach().clone().requires_grad_(), 0.0
    everything_E = expert_counts(ids_TK, logits_TE.shape[1])
    length = len(logits_TE) // sequences
    for piece_TE, piece_TK in zip(leaf_TE.split(parts), ids_TK.split(parts), strict=True):
        scope = BatchScope(
            num_tokens=len(logits_TE),
            num_sequences=sequences,
            earlier_counts_E=everything_E - expert_counts(piece_TK, logits_TE.shape[1]),
        )
        part = loss_of(kind, piece_TE, piece_TK, scope=scope, num_sequences=len(piece_TK) // length)
        part.backward()
        total += part.item()
    assert leaf_TE.grad is not None
    return total, leaf_TE.grad


@pytest.mark.parametrize("kind", KINDS)
def test_four_equal_microbatches_are_one_batch(kind: str) -> None:
    """The sum of the parts, not four times it: each part is divided by the tokens of the whole."""
    logits_TE, ids_TK = random_batch(6)
    logits_TE, ids_TK = logits_TE.repeat(4, 1), ids_TK.repeat(4, 1)
    whole, gradient = accumulated(kind, logits_TE, ids_TK, [24], 4)
    for parts in ([6, 6, 6, 6], [12, 12], [6, 18]):
        total, summed = accumulated(kind, logits_TE, ids_TK, parts, 4)
        assert total == pytest.approx(whole, rel=1e-6)
        torch.testing.assert_close(summed, gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", ["sequence", "global_batch", "z"])
@pytest.mark.parametrize("parts", [[8, 4], [4, 4, 4], [4, 8]], ids=str)
def test_different_microbatches_are_one_batch(kind: str, parts: list[int]) -> None:
    """Two sequences in one step of 2, or in 2 steps of 1: the same. "batch" counts in a microbatch: it is left out."""
    logits_TE, ids_TK = random_batch(12)
    whole, gradient = accumulated(kind, logits_TE, ids_TK, [12], 3)
    total, summed = accumulated(kind, logits_TE, ids_TK, parts, 3)
    assert total == pytest.approx(whole, rel=1e-6)
    torch.testing.assert_close(summed, gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_as_if_it_were_not_there(kind: str) -> None:
    """Two sequences of 4, of which the last token is NaN: the loss and the gradient of two sequences of 3."""
    logits_TE, ids_TK = random_batch(6)
    whole = loss_of(kind, logits_TE, ids_TK, num_sequences=2)
    whole.backward()
    padded_TE, padded_TK = torch.full((8, 4), NAN), torch.full((8, 2), -1)
    kept_T = torch.tensor([0, 1, 2, 4, 5, 6])
    padded_TE[kept_T], padded_TK[kept_T] = logits_TE.detach(), ids_TK
    padded_TE.requires_grad_()
    got = loss_of(kind, padded_TE, padded_TK, num_sequences=2)
    got.backward()
    assert got.item() == pytest.approx(whole.item(), rel=1e-6)
    assert padded_TE.grad is not None
    torch.testing.assert_close(padded_TE.grad[kept_T], logits_TE.grad)
    assert padded_TE.grad[[3, 7]].tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 4], ids=["no tokens", "padding only"])
def test_nothing_but_padding_is_zero(kind: str, tokens: int) -> None:
    logits_TE = torch.full((tokens, 3), NAN, requires_grad=True)
    loss = loss_of(kind, logits_TE, torch.full((tokens, 1), -1), num_sequences=1)
    loss.backward()
    assert loss.item() == 0.0 and logits_TE.grad is not None and not logits_TE.grad.any()


def test_counts_of_earlier_microbatches() -> None:
    """Before: 6 slots on expert 0. Now 2 on expert 1, with P = [.25, .75]: f = [.75, .25], L = 2 * .375."""
    logits_TE = torch.tensor([[0.25, 0.75]]).log().expand(2, 2)
    scope = BatchScope(num_tokens=2, earlier_counts_E=torch.tensor([6, 0]))
    loss = loss_of("global_batch", logits_TE, torch.ones(2, 1, dtype=torch.int64), scope=scope)
    assert loss.item() == pytest.approx(0.75)


@pytest.mark.parametrize("num_sequences", [None, 0, 3])
def test_sequences_that_do_not_fit(num_sequences: int | None) -> None:
    logits_TE, ids_TK = random_batch(4)
    with pytest.raises(ValueError, match=rf"sequences that the 4 tokens are, of equal length; got {num_sequences}"):
        loss_of("sequence", logits_TE, ids_TK, num_sequences=num_sequences)


def test_scopes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="num_tokens of the global batch must be given with a group or with earlier"):
        BatchScope(earlier_counts_E=torch.zeros(2))
    for name in ("num_tokens", "num_sequences"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            BatchScope(**{name: 0})
