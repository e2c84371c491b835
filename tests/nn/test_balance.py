"""Counts, the auxiliary loss and the step of selection biases: known values, and sums over microbatches."""

# T tokens   E experts   K top-k   L layers

import pytest
import torch
from torch import Tensor

from moe_runtime.nn import LoadMeter, load_balancing_loss, step_selection_biases
from moe_runtime.nn.balance import expert_counts

CPU = torch.device("cpu")


def certain(ids: list[int], num_experts: int) -> Tensor:
    """Logits whose softmax is one-hot to fp32."""
    return torch.nn.functional.one_hot(torch.tensor(ids), num_experts) * 200.0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_counts_leave_dropped_slots_out(dtype: torch.dtype) -> None:
    ids_TK = torch.tensor([[0, -1], [1, 0], [-1, -1]], dtype=dtype)
    counts_E = expert_counts(ids_TK, 3)
    assert counts_E.tolist() == [2, 1, 0] and counts_E.dtype == torch.int64


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
def test_counts_of_nothing(shape: tuple[int, int]) -> None:
    assert expert_counts(torch.zeros(shape, dtype=torch.int64), 4).tolist() == [0, 0, 0, 0]


def test_counts_of_strided_ids() -> None:
    ids_TK = torch.tensor([[0, 1, 2], [2, 2, -1]]).t()
    assert expert_counts(ids_TK, 3).tolist() == [1, 1, 3]


def test_counts_sum_to_all_slots() -> None:
    ids_TK = torch.randint(0, 5, (8, 2))
    assert int(expert_counts(ids_TK, 5).sum()) == 16


@pytest.mark.parametrize("ids", [[[2]], [[0], [7]]], ids=["the first past the end", "far past the end"])
def test_an_id_that_no_expert_has_is_not_counted_away(ids: list[list[int]]) -> None:
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        expert_counts(torch.tensor(ids), 2)


def test_meter_adds_microbatches_and_starts_over() -> None:
    """Two microbatches with counts [6, 2] and [1, 7]: one step sees [7, 9], not [6, 2] and then [1, 7]."""
    meter = LoadMeter(1, 2, CPU)
    meter.add([torch.tensor([0] * 6 + [1] * 2)[:, None]])
    assert meter.global_counts().tolist() == [[6, 2]]
    meter.add([torch.tensor([[0] + [1] * 7])])
    assert meter.global_counts().tolist() == [[7, 9]]
    bias_E = torch.zeros(2)
    step_selection_biases([bias_E], meter.global_counts(), 0.5)
    assert bias_E.tolist() == [0.5, -0.5]
    meter.global_counts().zero_()
    assert meter.global_counts().tolist() == [[7, 9]], "a copy"
    meter.start_step()
    assert meter.global_counts().tolist() == [[0, 0]]


def test_meter_keeps_layers_apart() -> None:
    meter = LoadMeter(2, 3, CPU)
    meter.add([torch.tensor([[0, 1]]), torch.tensor([[2, -1]])])
    assert meter.global_counts().tolist() == [[1, 1, 0], [0, 0, 1]]
    for ids in ([torch.tensor([[0]])], [torch.tensor([[0]])] * 3):
        with pytest.raises(ValueError, match=rf"expected the expert ids of 2 layers, got {len(ids)}"):
            meter.add(ids)
    assert meter.global_counts().tolist() == [[1, 1, 0], [0, 0, 1]], "a refused call counts nothing"


def test_meter_adds_counts() -> None:
    meter = LoadMeter(2, 3, CPU)
    for _ in range(2):
        meter.add_counts([torch.tensor([1, 2, 0]), torch.tensor([0, 0, 3])])
    assert meter.global_counts().tolist() == [[2, 4, 0], [0, 0, 6]]
    for counts in ([torch.zeros(3)], [torch.zeros(2), torch.zeros(3)]):
        with pytest.raises(ValueError, match=r"expected counts of 2 layers of shape \(3,\), got"):
            meter.add_counts(counts)


def test_loss_is_summed_over_layers_each_with_its_own_shares() -> None:
    """2 layers, each sending all tokens to one expert of its own: 2 a layer. Concatenated they would look balanced."""
    logits = [certain([0, 0, 0], 2), certain([1, 1, 1], 2)]
    counts_LE = torch.tensor([[3, 0], [0, 3]])
    for layer in range(2):
        loss = load_balancing_loss(logits[layer : layer + 1], counts_LE[layer : layer + 1], 3)
        assert loss.item() == pytest.approx(2.0)
    assert load_balancing_loss(logits, counts_LE, 3).item() == pytest.approx(4.0)


def test_concatenated_layers_are_one_loss_on_request() -> None:
    """The same two layers over all their tokens together: f = P = [.5, .5], so 1.0, which looks balanced."""
    logits, counts_LE = [certain([0, 0, 0], 2), certain([1, 1, 1], 2)], torch.tensor([[3, 0], [0, 3]])
    loss = load_balancing_loss(logits, counts_LE, 3, layers="concatenated")
    assert loss.item() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="layers must be 'separate' or 'concatenated', got 'both'"):
        load_balancing_loss(logits, counts_LE, 3, layers="both")


def test_concatenated_loss_and_gradient_against_the_definition() -> None:
    """E * sum over e and k of (share of tokens whose k-th choice is e) * P_e, over K: the same f, counted by choice."""
    generator = torch.Generator().manual_seed(3)
    logits = [torch.randn(5, 4, generator=generator).requires_grad_() for _ in range(3)]
    counts_LE = torch.stack([expert_counts(logits_TE.topk(2).indices, 4) for logits_TE in logits])
    load_balancing_loss(logits, counts_LE, 5, layers="concatenated").backward()
    exact = [logits_TE.detach().double().requires_grad_() for logits_TE in logits]
    everything = torch.cat(exact)
    chosen = torch.nn.functional.one_hot(everything.topk(2).indices, 4).double()
    loss = 4 * (chosen.mean(0) * everything.softmax(-1).mean(0)).sum() / 2
    loss.backward()
    for got, expected in zip(logits, exact, strict=True):
        assert got.grad is not None and expected.grad is not None
        torch.testing.assert_close(got.grad.double(), expected.grad, rtol=1e-5, atol=1e-8)


def test_loss_takes_the_softmax_once() -> None:
    """p = [.9, .1] and all tokens on expert 0: 1.8; a second softmax would give 1.37995."""
    logits_TE = torch.tensor([[0.9, 0.1]]).log().expand(5, 2)
    assert load_balancing_loss([logits_TE], torch.tensor([[5, 0]]), 5).item() == pytest.approx(1.8, rel=1e-6)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_balanced_loss_is_one_for_any_number_of_choices(top_k: int) -> None:
    assert load_balancing_loss([torch.zeros(6, 4)], torch.full((1, 4), 6 * top_k), 6).item() == pytest.approx(1.0)


def test_loss_of_bfloat16_logits_is_computed_in_fp32() -> None:
    logits_TE = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    counts_LE = expert_counts(logits_TE.float().topk(2).indices, 8)[None]
    loss = load_balancing_loss([logits_TE], counts_LE, 64)
    expected = load_balancing_loss([logits_TE.double()], counts_LE, 64)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("parts", [[4], [1, 1, 1, 1], [2, 2], [3, 1], [0, 4]], ids=str)
def test_parts_of_microbatches_add_up(parts: list[int]) -> None:
    """The same tokens in any number of microbatches: the same loss and the same gradient."""
    logits_TE = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    counts_LE = expert_counts(logits_TE.topk(2).indices, 3)[None]
    total = torch.zeros(())
    for piece_TE in logits_TE.split(parts):
        total = total + load_balancing_loss([piece_TE], counts_LE, 4)
    total.backward()
    share_E = counts_LE[0].double() / counts_LE.sum()
    exact_TE = logits_TE.detach().double().requires_grad_()
    expected = 3 * (share_E * exact_TE.softmax(-1).mean(0)).sum()
    expected.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert logits_TE.grad is not None and exact_TE.grad is not None
    torch.testing.assert_close(logits_TE.grad, exact_TE.grad.float(), rtol=1e-5, atol=1e-7)


def test_repeated_microbatches_weigh_nothing_more() -> None:
    """4 equal microbatches at once or one by one: the same gradient of the weights that made the logits."""
    gradients = []
    for repeats in (1, 4):
        weight_ED = torch.eye(3, 2).requires_grad_()
        x_TD = torch.tensor([[1.0, 0.5], [0.25, -1.0]])
        counts_LE = 4 * expert_counts((x_TD @ weight_ED.detach().T).topk(1).indices, 3)[None]
        for _ in range(repeats):
            x = x_TD if repeats == 4 else x_TD.repeat(4, 1)
            load_balancing_loss([x @ weight_ED.T], counts_LE, 8).backward()
        gradients.append(weight_ED.grad)
    torch.testing.assert_close(*gradients)


def test_loss_without_tokens_or_counts_is_finite() -> None:
    empty = torch.zeros(0, 3, requires_grad=True)
    loss = load_balancing_loss([empty], torch.tensor([[2, 1, 1]]), 4)
    loss.backward()
    assert loss.item() == 0.0 and empty.grad is not None
    assert load_balancing_loss([torch.zeros(2, 3)], torch.zeros(1, 3, dtype=torch.int64), 2).item() == 0.0


def test_loss_with_a_wrong_number_of_layers() -> None:
    with pytest.raises(ValueError, match="expected logits of 2 layers, as many as counts, got 1"):
        load_balancing_loss([torch.zeros(2, 3)], torch.zeros(2, 3, dtype=torch.int64), 2)


def test_biases_move_toward_balance() -> None:
    bias_E = torch.tensor([0.5, 0.5, 0.5, 0.5])
    step_selection_biases([bias_E], torch.tensor([[10, 2, 6, 6]]), 0.125)
    assert bias_E.tolist() == [0.375, 0.625, 0.5, 0.5]


def test_biases_of_layers_are_apart_and_take_no_gradient() -> None:
    biases = [torch.zeros(2, requires_grad=True), torch.zeros(2)]
    step_selection_biases(biases, torch.tensor([[3, 1], [0, 4]]), 1.0)
    assert [bias_E.tolist() for bias_E in biases] == [[-1.0, 1.0], [1.0, -1.0]]


@pytest.mark.parametrize(("count", "sign"), [(40_840, 1.0), (41_080, -1.0), (40_960, 0.0), (40_959, 1.0)])
def test_signs_of_large_counts_are_exact(count: int, sign: float) -> None:
    """Mean 40,960. In bfloat16, where the spacing is 256 there, 40,840 is read as the mean or on its wrong side."""
    others = [40_960 * 64 - count - 40_960 * 62, *[40_960] * 62]
    bias_E = torch.zeros(64)
    step_selection_biases([bias_E], torch.tensor([[count, *others]]), 1e-3)
    assert bias_E[0].item() == pytest.approx(sign * 1e-3)
    assert bias_E[2:].tolist() == [0.0] * 62


def test_signs_of_counts_past_fp64_integers() -> None:
    bias_E = torch.zeros(2)
    step_selection_biases([bias_E], torch.tensor([[2**55 + 1, 2**55 - 1]]), 1.0)
    assert bias_E.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("counts", "got"),
    [
        (torch.zeros(1, 2), r"torch\.float32 of shape \(1, 2\)"),
        (torch.zeros(1, 2, dtype=torch.int32), r"torch\.int32 of shape \(1, 2\)"),
        (torch.zeros(2, 2, dtype=torch.int64), r"torch\.int64 of shape \(2, 2\)"),
    ],
    ids=["float", "int32", "too many layers"],
)
def test_counts_that_do_not_fit(counts: Tensor, got: str) -> None:
    with pytest.raises(ValueError, match=rf"expected int64 counts of 1 layers, got {got}"):
        step_selection_biases([torch.zeros(2)], counts, 0.1)
