"""The program of docs/megatron.md in a rank's process."""

import contextlib
import io
from typing import Any

import torch.distributed as dist
from mcore_world import forget


def run(program: str) -> str:
    """What it prints; the pool's process group takes the place of its own."""
    forget()
    made, ended = dist.init_process_group, dist.destroy_process_group
    nothing: Any = lambda *_: None  # noqa: E731
    dist.init_process_group = dist.destroy_process_group = nothing
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(program, "docs/megatron.md", "exec"), {"__name__": "__main__"})
    finally:
        dist.init_process_group, dist.destroy_process_group = made, ended
    return printed.getvalue()
