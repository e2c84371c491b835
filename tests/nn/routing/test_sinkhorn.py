"""The balanced assignment: its sums, its choice, and what must not disturb it."""

# T tokens   E experts

import pytest
import torch

from moe_runtime.functional.topk import topk
from moe_runtime.nn.balance import expert_counts
from moe_runtime.nn.routing.sinkhorn import sinkhorn


def logits(tokens: int, experts: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens)) * scale


def test_rows_and_columns_have_equal_sums() -> None:
    assigned_TE = sinkhorn(logits(24, 6, 2.0).double(), 200).softmax(1) / 24
    torch.testing.assert_close(assigned_TE.sum(0), torch.full((6,), 1 / 6, dtype=torch.float64))


def test_against_the_iteration_without_logarithms() -> None:
    z_TE = logits(7, 4).double()
    cost_TE, row_T, column_E = z_TE.exp(), torch.ones(7, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    for _ in range(5):
        row_T = 1 / (cost_TE * column_E).sum(1) / 7
        column_E = 1 / (cost_TE * row_T[:, None]).sum(0) / 4
    expected_TE = (cost_TE * column_E).log()
    got_TE = sinkhorn(z_TE, 5)
    torch.testing.assert_close(got_TE - got_TE[:, :1], expected_TE - expected_TE[:, :1])


def test_a_popular_expert_is_left_to_those_that_want_it_most() -> None:
    """All tokens prefer expert 0, each by another margin; balanced, half of them keep it."""
    z_TE = torch.stack([torch.arange(1.0, 9.0), torch.zeros(8)], dim=1)
    assert topk(z_TE, 1).ids_TK[:, 0].tolist() == [0] * 8
    ids_TK = topk(sinkhorn(z_TE, 50), 1).ids_TK
    assert ids_TK[:, 0].tolist() == [1] * 4 + [0] * 4


def test_large_logits_do_not_overflow() -> None:
    assert sinkhorn(logits(6, 3, 1e4), 20).isfinite().all()


def test_rows_that_are_left_out_change_nothing() -> None:
    z_TE = logits(6, 3)
    keep_T = torch.tensor([True, True, False, True, False, True])
    noisy_TE = torch.where(keep_T[:, None], z_TE, 1e3)
    assert torch.equal(sinkhorn(z_TE, 9, keep_T)[keep_T], sinkhorn(noisy_TE, 9, keep_T)[keep_T])
    torch.testing.assert_close(sinkhorn(z_TE, 9, keep_T)[keep_T], sinkhorn(z_TE[keep_T], 9))


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    assert sinkhorn(logits(tokens, 3), 3).shape == (tokens, 3)


def test_loads_are_nearer_to_balance_than_those_of_the_logits() -> None:
    z_TE = logits(64, 8) + torch.linspace(0, 3, 8)
    before, after = (expert_counts(topk(t, 2).ids_TK, 8) for t in (z_TE, sinkhorn(z_TE, 20)))
    assert int(before.max()) > 40 and int(after.max()) <= 24
