"""python killed_saves.py FOLDER SAVES SEED: each save in a process that is killed at a random byte or file operation.

After each the newest checkpoint is loaded and must hold, to the bit, what was saved last or what was being saved.
Prints JSON: how many were killed, how many of those had already been published, loads that were wrong, folders damaged.
"""

import io
import json
import logging
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_runtime import checkpoint
from moe_runtime.checkpoint import files

OPERATIONS = ("fsync", "rename", "replace", "chmod", "unlink", "rmdir", "mkdir")


class Fuse:
    """Counts bytes written and file operations, and kills the process at the given one of each; -1 never."""

    def __init__(self, byte: int = -1, operation: int = -1) -> None:
        self.num_bytes = self.num_operations = 0
        self._byte, self._operation = byte, operation

    def write(self, raw_write: Callable[[Any], int | None], data: Any) -> int | None:
        view = memoryview(data).cast("B")
        if 0 <= self._byte <= self.num_bytes + len(view):
            raw_write(view[: self._byte - self.num_bytes])
            os.kill(os.getpid(), signal.SIGKILL)
        self.num_bytes += len(view)
        return raw_write(view)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.num_operations == self._operation:
                os.kill(os.getpid(), signal.SIGKILL)
            self.num_operations += 1
            return function(*args, **kwargs)

        return counted

    def install(self) -> None:
        fuse, opened = self, io.open

        class Counted(io.FileIO):
            def write(self, data: Any) -> int | None:
                return fuse.write(super().write, data)

        def open_counted(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if "w" not in mode:
                return opened(file, mode, *args, **options)
            buffered = io.BufferedWriter(Counted(file, "w"))
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")

        io.open = open_counted
        for name in OPERATIONS:
            setattr(os, name, self.before(getattr(os, name)))


def trainee(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that hold `value`, and nothing else that is not 0."""
    model = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for tensor in state(model, optimizer):
            tensor.fill_(value)
    return model, optimizer


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [*model.parameters(), *(value for held in optimizer.state.values() for value in held.values())]


def save(root: Path, step: int, value: float, fuse: Fuse, asynchronous: bool) -> None:
    model, optimizer = trainee(value)
    fuse.install()
    if asynchronous:
        saver = checkpoint.AsyncSaver(timeout_seconds=60)
        saver.save(root, step, model, optimizer, {"value": value}, keep=3)
        with torch.no_grad():
            for tensor in state(model, optimizer):
                tensor.fill_(-1.0)  # what training does meanwhile is not what was saved
        saver.wait()
    else:
        checkpoint.save(root, step, model, optimizer, {"value": value}, keep=3)


def in_child(function: Callable[[], None]) -> int:
    """The exit status of `function` in a process of its own."""
    child = os.fork()
    if not child:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def loaded(root: Path) -> float | None:
    """The one value of all tensors of the newest checkpoint, None where it is not one value or not the facts'."""
    model, optimizer = trainee(-2.0)
    _, facts = checkpoint.load_latest(root, model, optimizer)
    held = {value for tensor in state(model, optimizer) for value in tensor.unique().tolist()}
    return facts["value"] if held == {facts["value"]} else None


def measure(root: Path, step: int) -> Fuse:
    """The bytes and operations of a save of `step`, which happens."""
    fuse = Fuse()
    before = io.open, *(getattr(os, name) for name in OPERATIONS)
    save(root, step, float(step), fuse, asynchronous=False)
    io.open, *operations = before
    for name, function in zip(OPERATIONS, operations, strict=True):
        setattr(os, name, function)
    return fuse


def main(root: Path, num_saves: int, seed: int) -> dict[str, int]:
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    rng = random.Random(seed)
    for step in (1, 2, 3):
        checkpoint.save(root, step, *trainee(float(step)), {"value": float(step)}, keep=3)
    measured = {again: measure(root, 3 if again else 4) for again in (False, True)}
    found = {"killed": 0, "published": 0, "wrong": 0, "damaged": 0}
    current, step = loaded(root), 4
    for number in range(num_saves):
        again = rng.random() < 0.4  # the same step once more, which replaces a checkpoint
        next_step, value = step + (not again), float(number + 10)
        num_bytes, num_operations = measured[again].num_bytes, measured[again].num_operations
        # Publishing is the last part, where a kill has the most to break.
        first = rng.choice((0, num_operations // 2))
        fuse = (
            Fuse(byte=rng.randrange(num_bytes))
            if number % 3 == 0
            else Fuse(operation=rng.randrange(first, num_operations))
        )
        status = in_child(lambda: save(root, next_step, value, fuse, asynchronous=number % 4 < 2))  # noqa: B023
        found["killed"] += status == signal.SIGKILL
        if status not in (0, signal.SIGKILL):
            raise RuntimeError(f"save {number} ended with status {status}")
        for folder in files.whole(root):
            manifest = files.read_manifest(folder)
            found["damaged"] += bool(files.damage(folder, manifest["files"], manifest["files"]))
        got = loaded(root)
        found["published"] += status == signal.SIGKILL and got == value
        found["wrong"] += got not in (current, value)
        if got == value:
            current, step = value, next_step
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
