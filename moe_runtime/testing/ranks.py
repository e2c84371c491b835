"""A pool of gloo ranks for tests: processes that stay, so that many cases share one start-up and one process group.

    with RankPool(2) as pool:
        results = pool.run(function, argument)      # function(argument) on every rank; results[r] is rank r's

A case that raises on any rank raises here with that rank's traceback; one that hangs is ended after a deadline and
says which ranks had not answered. Either way the pool is stopped, and started anew by the next case.
"""

import importlib.util
import multiprocessing as mp
import multiprocessing.process
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Self

_CONNECT_SECONDS = 120.0
# Every mesh that a case makes leaves threads of gloo behind, which wake a hundred times a second.
_RUNS_BEFORE_RESTART = 40


class RankError(AssertionError):
    """A case failed on some rank; the message holds the traceback from there."""


class RankPool:
    """`world_size` processes in one gloo process group, each with one thread."""

    def __init__(self, world_size: int, *, timeout_seconds: float = 120.0) -> None:
        self.world_size, self.timeout_seconds = world_size, timeout_seconds
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._runs = 0

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on every rank at once; it must be a module-level function, its results picklable."""
        if self._runs == _RUNS_BEFORE_RESTART:
            self.stop()
        if not self._processes:
            self._start()
        self._runs += 1
        for pipe in self._pipes:
            pipe.send((function.__code__.co_filename, function.__qualname__, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + self.timeout_seconds
        while len(answers) < self.world_size and time.monotonic() < deadline:
            for rank, pipe in enumerate(self._pipes):
                if rank not in answers and pipe.poll(0.005):
                    answers[rank] = _receive(pipe)
            if any(not succeeded for succeeded, _ in answers.values()):
                # The others may wait for the failed rank for ever; what they say in a moment is kept, no more.
                deadline = min(deadline, time.monotonic() + 2.0)
        failed = {rank: text for rank, (succeeded, text) in answers.items() if not succeeded}
        missing = [rank for rank in range(self.world_size) if rank not in answers]
        if failed or missing:
            self.stop()
            details = "".join(f"\n--- rank {rank} ---\n{text}" for rank, text in sorted(failed.items()))
            silent = f"; no answer from ranks {missing} within the deadline" if missing else ""
            raise RankError(f"{function.__qualname__} failed on ranks {sorted(failed)}{silent}{details}")
        return [answers[rank][1] for rank in range(self.world_size)]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world_size, f"{self._folder.name}/store"), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        """End every rank; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._runs = [], [], 0
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return False, "the process ended"


def _serve(pipe: Connection, rank: int, world_size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_CONNECT_SECONDS),
    )
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            filename, name, args = pipe.recv()
        except EOFError:
            return
        try:
            if filename not in modules:
                modules[filename] = _load(filename)
            result = getattr(modules[filename], name)(*args)
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            raise
        pipe.send((True, result))


def _load(filename: str) -> ModuleType:
    """The module of a file that is on no import path, as test files are."""
    name = f"ranks_{Path(filename).stem}"
    spec = importlib.util.spec_from_file_location(name, filename)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
