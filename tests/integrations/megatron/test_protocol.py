"""Every way to train wrongly without an error under Megatron's DDP raises, with the parameter's name."""

from collections.abc import Callable
from typing import Any

import pytest

Mcore = Callable[..., list[Any]]

WEIGHT = "layers.0.experts.linear_fc1.weight"
EARLY = f"RuntimeError: {WEIGHT} gets its gradient after backward, and Megatron's DDP reduces it before: "


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("unmarked", f"{EARLY}it was not marked skip_backward_post_hook when DDP was built"),
        ("marked after the wrap", f"{EARLY}it was not marked skip_backward_post_hook when DDP was built"),
        (
            "DDP's own flag is off",
            f"{EARLY}expected DistributedDataParallelConfig(delay_wgrad_compute=True), got False",
        ),
        ("marked and nobody registers", "RuntimeError: orphan.weight is marked skip_backward_post_hook, and no module"),
        (
            "tied",
            f"RuntimeError: {WEIGHT} belongs to 2 modules that delay its gradient, layers.0.experts.linear_fc1 and ",
        ),
        ("the parent registers too", f"RuntimeError: {WEIGHT} belongs to 2 modules that delay its gradient, layers.0."),
        ("the mark is lost after the wrap", f"RuntimeError: {WEIGHT} has lost its mark skip_backward_post_hook"),
        ("replaced after the wrap", f"RuntimeError: {WEIGHT} was put in place after Megatron's DDP was built"),
        ("data replaced after the wrap", f"RuntimeError: {WEIGHT} is stored outside of the buffer into which"),
        ("allreduce lost", f"RuntimeError: {WEIGHT} carries allreduce=False, expected True"),
        ("a dense parameter changes sides", "RuntimeError: dense.weight has allreduce=False, and had another value"),
        ("wrapped twice", f"RuntimeError: {WEIGHT} needs one reduction hook for each of its 1 parameters, got 2"),
        ("not wrapped", "TypeError: verify expects Megatron's DistributedDataParallel, got Linear"),
        ("nothing", "nothing"),
    ],
)
def test_a_model_that_would_train_wrongly_is_refused(fault: str, sentence: str, mcore: Mcore):
    (got,) = mcore(1, "failure_cases.at_verify", fault)
    assert got.startswith(sentence)


def test_what_is_refused_would_train_wrongly_without_an_error(mcore: Mcore):
    for largest in mcore(2, "failure_cases.unmarked_gradients_are_lost"):
        assert largest["unmarked"] == 0 < largest["marked"]


def test_a_second_report_in_one_iteration_is_refused(mcore: Mcore):
    for got in mcore(2, "failure_cases.two_calls_in_the_last_microbatch"):
        assert got.startswith(
            "RuntimeError: layers.1.experts.linear_fc2.weight would be reported as reduced twice in one iteration"
        )


@pytest.mark.parametrize("fused", [False, True])
def test_a_hook_without_a_gradient_is_refused(fused: bool, mcore: Mcore):
    for got in mcore(2, "failure_cases.gradient_is_cleared_before_the_hook", fused):
        assert got.startswith(
            "RuntimeError: layers.1.experts.linear_fc2.weight would be reduced without a gradient: expected .grad"
        )


def test_stepping_while_gradients_wait_is_refused(mcore: Mcore):
    for got in mcore(2, "failure_cases.step_with_gradients_pending"):
        assert got == (
            "RuntimeError: optimizer step with weight gradients pending: "
            + ", ".join(f"layers.{i}.experts.linear_fc{j}.weight" for i in (0, 1) for j in (1, 2))
            + "; call backward_dw first"
        )


def test_backward_dw_without_a_backward_is_refused(mcore: Mcore):
    (got,) = mcore(1, "failure_cases.backward_dw_without_a_backward")
    assert got.startswith("RuntimeError: backward_dw: no weight gradient of")


def test_a_coordinator_attached_after_the_wrap_is_refused(mcore: Mcore):
    (got,) = mcore(1, "failure_cases.attached_after_the_wrap")
    assert got == "layers.0.experts.linear_fc1 has hooks already: attach first, then register them"
