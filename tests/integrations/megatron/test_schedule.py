"""Megatron's combined 1F1B order calls our `backward_dw`, between the experts' backward and the exchange's."""

from collections.abc import Callable
from typing import Any

import pytest

Mcore = Callable[..., list[Any]]


# Backward of one microbatch beside forward of the next: the weight gradient hides the next one's exchange, and is done
# before the gradients of its own rows go back.
BESIDE = [
    event
    for first, second in ((0, 1), (1, 0))
    for event in (
        f"layer {second} dgrad",
        f"layer {first} dispatch",
        f"layer {second} dw",
        f"layer {second} dispatch backward",
        f"layer {first} forward",
    )
]
ORDER = [
    *(f"layer {i} {what}" for i in (0, 1) for what in ("dispatch", "forward")),
    *(BESIDE * 2),
    *(f"layer {i} {what}" for i in (1, 0) for what in ("dgrad", "dw", "dispatch backward")),
]


@pytest.mark.parametrize(
    ("coordinator", "layout"),
    [
        (False, {"single_grouped_weight": True}),
        (True, {"single_grouped_weight": True}),
        (False, {"single_grouped_weight": False}),
        (False, {"num_experts": 2}),
    ],
    ids=["own", "shared", "discrete", "one-expert"],
)
def test_gradients_equal_those_of_the_plain_order(coordinator: bool, layout: dict[str, Any], mcore: Mcore):
    for differ, events in mcore(2, "schedule_cases.combined", coordinator, layout):
        assert differ == {}
        assert events == ORDER
