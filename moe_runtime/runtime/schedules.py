"""When a weight gradient is computed. Public autograd only: a Function that hands its product over, and a late node.

inline    in its place, beside the data gradient
late      by a node on the weight that stands early in forward, so that it runs late in the same backward
deferred  after backward, when the coordinator flushes
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from moe_runtime.runtime.jobs import Job, JobKey
from moe_runtime.runtime.main_grad import MainGrad, Product

Schedule = Literal["inline", "late", "deferred"]


def check_schedule(schedule: str) -> None:
    """ValueError unless the schedule is known."""
    if schedule not in get_args(Schedule):
        raise ValueError(f"schedule must be one of {', '.join(get_args(Schedule))}; got {schedule!r}")


class JobOwner(Protocol):
    """What a slot needs of its coordinator."""

    schedule: Schedule

    def accept(self, key: JobKey, compute: Callable[[], Tensor | None], operands: tuple[Tensor, ...]) -> Job:
        """Take a job over."""
        ...

    def run(self, job: Job) -> Tensor | None:
        """Compute a job's gradient, once; None if it went elsewhere."""
        ...


class WgradSlot:
    """Where one autograd node hands in its weight gradient: made with the node, used once in its backward.

    coordinator  says when it is computed; None: at once
    main_grad    where it goes in place of `.grad`
    """

    def __init__(self, coordinator: JobOwner | None, key: JobKey, main_grad: MainGrad | None = None) -> None:
        self.coordinator, self.key, self.main_grad = coordinator, key, main_grad
        self.jobs: list[Job] = []

    def submit(self, product: Product, operands: tuple[Tensor, ...], weight: Tensor) -> Tensor | None:
        """Take over a weight gradient; what autograd gets in its place now: a placeholder if late, None if deferred."""
        compute = product if self.main_grad is None else partial(self.main_grad.add, product)
        if self.coordinator is None:
            return compute()
        job = self.coordinator.accept(self.key, compute, operands)
        if self.coordinator.schedule == "late":
            # Jobs of an earlier backward through the same graph are here only if it failed before the late node ran.
            self.jobs = [*(earlier for earlier in self.jobs if earlier.backward is job.backward), job]
            # No memory: the late node replaces it by the real gradient.
            return operands[0].new_zeros((), dtype=weight.dtype).expand(weight.shape)
        return None


def late_node(weight: Tensor, slot: WgradSlot) -> Tensor:
    """The weight itself; in backward, this node computes what was handed to `slot` and returns it as the gradient.

    Nodes run in backward in reverse order of their making: place it before everything its gradient may wait for.
    """
    return _LateWgrad.apply(weight, slot)


class _LateWgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, slot: WgradSlot) -> Tensor:
        ctx.slot = slot
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, placeholder: Tensor) -> tuple[Tensor | None, None]:
        slot: WgradSlot = ctx.slot
        if not slot.jobs or slot.coordinator is None:
            raise RuntimeError(f"no weight gradient was handed in for {slot.key}: its backward ran without the layer's")
        total: Tensor | None = None
        jobs, slot.jobs = slot.jobs, []
        for job in jobs:
            gradient = slot.coordinator.run(job)
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return total, None
