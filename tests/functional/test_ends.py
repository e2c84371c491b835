"""Splits in every form a user holds them become the same int32 ends, and wrong ones raise before any product runs."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_runtime.functional import ends_from_splits
from moe_runtime.testing import RAGGED

CPU = torch.device("cpu")
FORMS: dict[str, Callable[[Sequence[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "int64": lambda rows: torch.tensor(rows),
    "int32": lambda rows: torch.tensor(rows, dtype=torch.int32),
    "uint8": lambda rows: torch.tensor(rows, dtype=torch.uint8),
    "strided": lambda rows: torch.tensor([rows, rows]).t().contiguous().t()[0],
}


def ends(splits: Any, num_rows: int, num_experts: int = 4) -> Tensor:
    return ends_from_splits(splits, num_experts=num_experts, num_rows=num_rows, device=CPU)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", RAGGED.values(), ids=RAGGED)
def test_every_form_gives_the_same_ends(rows: tuple[int, ...], form: str) -> None:
    ends_E = ends(FORMS[form](rows), sum(rows))
    assert ends_E.tolist() == [sum(rows[: e + 1]) for e in range(4)]
    assert ends_E.dtype == torch.int32 and ends_E.device == CPU and ends_E.is_contiguous()


def test_rows_may_be_left_over() -> None:
    assert ends([2, 0, 1, 0], num_rows=50).tolist() == [2, 2, 3, 3]


def test_ends_of_small_integers_do_not_wrap() -> None:
    assert ends(torch.tensor([200, 200, 100, 255], dtype=torch.uint8), 755).tolist() == [200, 400, 500, 755]
    assert ends(torch.tensor([127, 127, 1, 0], dtype=torch.int8), 255).tolist() == [127, 254, 255, 255]


def test_splits_are_not_kept() -> None:
    splits_E = torch.tensor([1, 2, 3, 4])
    ends_E = ends(splits_E, 10)
    splits_E.zero_()
    assert ends_E.tolist() == [1, 3, 6, 10]


@pytest.mark.parametrize(
    ("splits", "got"),
    [
        ([1, 2, 3], r"\(3,\)"),
        ([1, 2, 3, 4, 0], r"\(5,\)"),
        ([], r"\(0,\)"),
        (torch.ones(2, 2, dtype=torch.int64), r"\(2, 2\)"),
        (torch.tensor(4), r"\(\)"),
    ],
    ids=["too few", "too many", "none", "two-dimensional", "scalar"],
)
def test_wrong_count(splits: Any, got: str) -> None:
    with pytest.raises(ValueError, match=rf"splits must have shape \(4,\), rows per expert; got {got}"):
        ends(splits, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_tensors_that_do_not_hold_integers(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"splits must hold integers, got {dtype}"):
        ends(torch.ones(4).to(dtype), 100)


def test_a_list_that_does_not_hold_integers() -> None:
    with pytest.raises((TypeError, ValueError), match=r"splits must .*got"):
        ends([1.5, 2.0, 0.25, 0.0], 100)


@pytest.mark.parametrize("form", ["list", "int64", "int32"])
@pytest.mark.parametrize("rows", [[5, 5, 0, 1], [4, -1, 0, 0], [-1, 1, 0, 0]], ids=str)
def test_more_rows_than_given_or_fewer_than_none(rows: list[int], form: str) -> None:
    with pytest.raises(ValueError, match=r"splits must be >= 0 and sum to at most the 10 rows given, got \["):
        ends(FORMS[form](rows), 10)
