"""The comparison sees one wrong expert, one wrong block and one misplaced NaN that a whole-tensor norm would hide."""

import pytest
import torch
from torch import Tensor

from moe_runtime.testing import assert_close_per_expert

NAN = float("nan")


def weights() -> Tensor:
    return torch.ones(4, 5, 40)


def test_equal_tensors_measure_zero() -> None:
    assert assert_close_per_expert(weights(), weights(), 0.0) == 0.0


def test_returns_the_largest_ratio_of_any_region() -> None:
    got = weights()
    got[2, :, 16:32] += 0.01  # 1 % of the block, 0.63 % of the expert, 0.32 % of the whole
    assert assert_close_per_expert(got, weights(), 0.011) == pytest.approx(0.01, rel=1e-5)


def test_one_block_of_one_expert_is_enough_to_fail() -> None:
    got = weights()
    got[3, 0, 32:] += 0.02
    whole = float((got - weights()).norm() / weights().norm())
    assert whole < 0.003
    with pytest.raises(
        AssertionError, match=r"w: relative error 0\.00894 in expert 3, columns 32\.\.39, at most 0\.003"
    ):
        assert_close_per_expert(got, weights(), 0.003, name="w")


def test_one_expert_is_enough_to_fail() -> None:
    expected = weights()
    expected[1] *= 1e-3  # a small expert, wholly wrong, beside large ones
    got = expected.clone()
    got[1] = 0.0
    with pytest.raises(AssertionError, match=r"relative error 1 in expert 1"):
        assert_close_per_expert(got, expected, 0.01)


def test_lists_the_worst_coordinates_first() -> None:
    got = weights()
    got[1, 2, 3], got[0, 4, 39] = 9.0, 3.0
    with pytest.raises(AssertionError) as failure:
        assert_close_per_expert(got, weights(), 0.01)
    lines = str(failure.value).splitlines()
    assert lines[1:3] == ["  at (1, 2, 3): expected 1, got 9", "  at (0, 4, 39): expected 1, got 3"]


def test_zeros_must_be_exact() -> None:
    expected = weights()
    expected[2] = 0.0
    assert assert_close_per_expert(expected.clone(), expected, 0.0) == 0.0
    got = expected.clone()
    got[2, 0, 0] = 1e-30
    with pytest.raises(AssertionError, match=r"relative error inf in expert 2"):
        assert_close_per_expert(got, expected, 0.5)


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_must_be_in_both(bad: float) -> None:
    got, expected = weights(), weights()
    got[0, 0, 1] = bad
    with pytest.raises(AssertionError, match=r"(?s)not finite in one of the two only.*at \(0, 0, 1\)"):
        assert_close_per_expert(got, expected, 1.0)
    with pytest.raises(AssertionError, match="not finite"):
        assert_close_per_expert(expected, got, 1.0)
    expected[0, 0, 1] = bad
    assert assert_close_per_expert(got, expected, 0.0) == 0.0


def test_rows_are_grouped_by_ends() -> None:
    ends = torch.tensor([3, 3, 5], dtype=torch.int32)
    expected = torch.ones(7, 8)
    expected[5:] = 0.0
    got = expected.clone()
    got[4] += 0.5
    with pytest.raises(AssertionError, match=r"in expert 2"):
        assert_close_per_expert(got, expected, 0.3, ends=ends)
    got[4] = 1.0
    got[6, 0] = 1e-20
    with pytest.raises(AssertionError, match=r"in tail"):
        assert_close_per_expert(got, expected, 0.3, ends=ends)


def test_shapes_must_agree_and_sizes_may_be_zero() -> None:
    with pytest.raises(AssertionError, match=r"expected shape \(2, 3\), got \(3, 2\)"):
        assert_close_per_expert(torch.zeros(3, 2), torch.zeros(2, 3), 1.0)
    assert assert_close_per_expert(torch.zeros(0, 3), torch.zeros(0, 3), 0.0) == 0.0
    assert assert_close_per_expert(torch.tensor(2.0), torch.tensor(1.0), 1.0) == 1.0
