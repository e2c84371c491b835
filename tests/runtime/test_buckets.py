"""GradientBuckets on one rank: what is scaled and when; across ranks see tests/distributed."""

from typing import Any

import pytest
import torch
from torch import nn

from moe_runtime.runtime import GradientBuckets


def build(scale: float = 0.25, **options: Any) -> tuple[list[nn.Parameter], GradientBuckets]:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    options = {"should_reduce": lambda: True, **options}
    return parameters, GradientBuckets(parameters, group=None, scale=scale, **options)


def test_gradients_are_scaled_when_backward_returns_however_many_there_were():
    parameters, _ = build()
    for expected in (0.25, 0.5, 0.75):
        (parameters[0].sum() + parameters[1].sum()).backward()
        assert [p.grad.tolist() for p in parameters] == [[expected] * 3, [expected] * 2]


def test_what_was_accumulated_without_reducing_is_scaled_as_well():
    reduces = [False]
    parameters, _ = build(should_reduce=lambda: reduces[0])
    for last in (False, True):
        reduces[0] = last
        (parameters[0].sum() + parameters[1].sum()).backward()
    assert parameters[0].grad.tolist() == [0.5] * 3


def test_a_parameter_without_gradient_takes_part_with_zeros():
    parameters, _ = build()
    parameters[0].sum().backward()
    assert parameters[1].grad.tolist() == [0.0, 0.0]


def test_a_backward_that_raised_does_not_stop_the_next_from_reducing():
    finished = []
    parameters, buckets = build()
    finish = buckets._finish
    buckets._finish = lambda: (finished.append(1), finish())[1]
    handle = parameters[0].register_hook(raise_planted)  # the other one's gradient has come in by then
    with pytest.raises(ArithmeticError):
        (parameters[0].sum() + parameters[1].sum()).backward()
    handle.remove()
    assert finished == []
    for p in parameters:
        p.grad = None
    (parameters[0].sum() + parameters[1].sum()).backward()
    assert finished == [1]
    assert [p.grad.tolist() for p in parameters] == [[0.25] * 3, [0.25] * 2]


def raise_planted(gradient: torch.Tensor) -> None:
    raise ArithmeticError("planted")


def test_buckets_that_are_told_when_install_nothing():
    parameters, buckets = build(on_gradient=False)
    (parameters[0].sum() + parameters[1].sum()).backward()
    assert parameters[0].grad.tolist() == [1.0] * 3
    assert buckets.scaled(parameters[0].grad).tolist() == [0.25] * 3
    buckets.reduce()
    assert parameters[0].grad.tolist() == [1.0] * 3, "the mean over one replica"


def test_dtypes_do_not_share_a_bucket():
    parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    GradientBuckets(parameters, group=None, scale=1.0, should_reduce=lambda: True)
    sum(p.float().sum() for p in parameters).backward()
    assert [p.grad.dtype for p in parameters] == [p.dtype for p in parameters]
