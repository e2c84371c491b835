"""The hostile inputs are hostile: a poison that does not reach the memory would make every test that uses it blind."""

import pytest
import torch

from moe_runtime.testing import RAGGED, nan_filled_memory, strided, with_nan_tail


def test_ragged_covers_every_place_of_an_empty_expert_and_of_a_sole_owner() -> None:
    splits = list(RAGGED.values())
    assert {len(rows) for rows in splits} == {4}
    assert any(rows[0] == 0 and sum(rows) for rows in splits)
    assert any(0 in rows[1:-1] and rows[0] and rows[-1] for rows in splits)
    assert any(rows[-1] == 0 and sum(rows) for rows in splits)
    assert {rows.index(max(rows)) for rows in splits if rows.count(0) == 3} >= {0, 1, 3}
    assert (0, 0, 0, 0) in splits


def test_memory_is_filled_inside_only() -> None:
    x_RD, w_EDF = torch.ones(6, 8), torch.ones(2, 8, 4)
    before = torch.are_deterministic_algorithms_enabled()
    with nan_filled_memory():
        assert torch.empty(3, 5).isnan().all()
        assert torch.empty_like(x_RD).isnan().all()
        assert x_RD.new_empty(4, dtype=torch.bfloat16).isnan().all()
        # What the product does not write: allocated inside torch, not by a call that could be replaced from Python.
        y_RF = torch.nn.functional.grouped_mm(x_RD, w_EDF, offs=torch.tensor([1, 3], dtype=torch.int32))
        assert y_RF[3:].isnan().all() and not y_RF[:3].isnan().any()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_memory_mode_is_restored_after_an_error() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(ZeroDivisionError), nan_filled_memory():
            raise ZeroDivisionError
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_tail_rows_are_nan_and_the_rest_is_kept() -> None:
    rows = torch.randn(3, 2)
    poisoned = with_nan_tail(rows, 4)
    assert torch.equal(poisoned[:3], rows) and poisoned[3:].isnan().all() and len(poisoned) == 7
    assert with_nan_tail(torch.ones(2), 1).isnan().tolist() == [False, False, True]


def test_strided_keeps_values_and_is_not_contiguous() -> None:
    rows = torch.randn(3, 4)
    assert torch.equal(strided(rows), rows) and not strided(rows).is_contiguous()
    assert torch.equal(strided(rows[:, 0]), rows[:, 0]) and not strided(rows[:, 0]).is_contiguous()
