"""A weight gradient not yet computed: what it is known by, what it holds, and the backward it came from."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_NO_BACKWARD = -1


class JobKey(NamedTuple):
    """Which gradient: fixed when the autograd node is made, in the original forward."""

    module: str
    parameter: str
    microbatch: int
    call: int

    @property
    def target(self) -> tuple[str, str]:
        """The parameter it belongs to."""
        return self.module, self.parameter

    def __str__(self) -> str:
        name = f"{self.module}.{self.parameter}" if self.module else self.parameter
        return f"{name} (microbatch {self.microbatch}, call {self.call})"


class Backward:
    """The `backward()` this thread is in; `completed` once it has ended without an exception."""

    def __init__(self) -> None:
        self.graph_task = graph_task()
        self.completed = False

        def complete() -> None:
            self.completed = True

        # Called when this backward has ended well. One that raises drops its callbacks, and with them the only strong
        # reference: that tells a failed backward from one that another, nested one has interrupted.
        self._callback = weakref.ref(complete)
        torch.autograd.Variable._execution_engine.queue_callback(complete)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def failed(self) -> bool:
        """Whether it ended by an exception."""
        return not self.completed and self._callback() is None


@dataclass(eq=False)
class Job:
    """compute() -> the weight gradient of `key`, None if it was put in its place; `num_bytes` live until it has run.

    `ready` marks, on a GPU, the point in the stream after which the operands hold their values.
    """

    key: JobKey
    compute: Callable[[], Tensor | None]
    operands: tuple[Tensor, ...]
    backward: Backward
    ready: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the operands it keeps alive."""
        return sum(operand.numel() * operand.element_size() for operand in self.operands)


def graph_task() -> int:
    """The id of the backward that this thread is in, or -1."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether this thread runs a backward: a forward here is a recomputation."""
    return graph_task() != _NO_BACKWARD
