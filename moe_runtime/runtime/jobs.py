"""A weight gradient not yet computed: what it is known by, what it holds, and the backward it came from."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class Backward:
    """One `backward()` under way; `completed` once it has returned without an exception."""

    graph_task: int
    completed: bool = False


@dataclass(eq=False)
class Job:
    """compute() -> the weight gradient of `key`; `num_bytes` of activations live until it has run.

    `ready` marks, on a GPU, the point in the stream after which the operands hold their values.
    """

    key: JobKey
    compute: Callable[[], Tensor]
    operands: tuple[Tensor, ...]
    backward: Backward
    ready: torch.cuda.Event | None = None
    sequence: int = field(default_factory=itertools.count().__next__)

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
