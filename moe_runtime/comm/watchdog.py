"""A deadline for every phase and every watched collective of a rank; past it, one report a rank, and the process ends.

Two threads besides the one that trains. One says the rank's position to the store of the process group, and reads the
others' once this rank no longer moves. The other looks at the clock: it never talks to anybody, so that a store behind
a cut link cannot hold it up. Whoever fails first says so in the store; the others write their reports too, and all
leave together: a launcher that sees one rank end stops its neighbors at once.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch.distributed as dist

from moe_runtime.comm.black_box import BlackBox
from moe_runtime.comm.incident import Incident, Peers, Position, from_text, write
from moe_runtime.comm.watch import Collective
from moe_runtime.core.errors import CheckpointError, ConfigError, NumericsError, UnsupportedError

# A launcher restarts after any code but 0; this one is told apart from a crash.
EXIT_CODE = 75
_FAILED, _REPORTED = "watchdog/failed", "watchdog/reported"
# These end a run in order, with a sentence of their own.
_SENTENCES = (CheckpointError, ConfigError, NumericsError, UnsupportedError)
# A process whose training thread failed, and that has not ended after this, hangs in its clean-up.
_END_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """Seconds that a collective and each phase may take, and how long a failed rank waits for the others' reports.

    Until the first step of the process is over, while kernels are compiled, all but the grace are `warm_up` times as
    long.
    """

    collective: float
    phases: Mapping[str, float]
    grace: float = 5.0
    warm_up: float = 3.0

    @property
    def interval(self) -> float:
        """Between two looks at the clock."""
        return min(5.0, max(0.05, min(self.collective, *self.phases.values()) / 20))


@dataclass(frozen=True, kw_only=True, slots=True)
class _InFlight:
    collective: Collective
    work: dist.Work
    started: float


class Watchdog:
    """Watches this rank between `__enter__` and `__exit__`: hears of phases and collectives, in the training thread."""

    def __init__(
        self, deadlines: Deadlines, folder: Path, *, rank: int, world_size: int, store: dist.Store | None = None
    ) -> None:
        """Reports go to `folder`. Without a store nothing is known of other ranks."""
        self.deadlines, self.folder, self.rank, self.world_size = deadlines, folder, rank, world_size
        self._peers = _Store(store, rank, world_size) if store is not None and world_size > 1 else None
        self._box = BlackBox(folder / f"rank-{rank}-pid-{os.getpid()}.crash.txt")
        self._position = self._ended = Position()
        self._phase_started, self._first_step = time.monotonic(), 0
        self._in_flight: deque[_InFlight] = deque()
        self._lock, self._failing, self._stop = threading.Lock(), threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._look, name="watchdog", daemon=True)]
        if self._peers is not None:
            self._threads.append(threading.Thread(target=self._beat, name="watchdog heartbeat", daemon=True))

    # ---- what the training thread says ----

    def begin(self, phase: str, step: int) -> None:
        """`phase` of `step` starts."""
        self._first_step = self._first_step or step
        self._phase_started = time.monotonic()
        self._move(replace(self._position, step=step, phase=phase, phases=self._position.phases + 1))

    def end(self, phase: str, step: int) -> None:
        """It is over."""
        self._ended = self._position
        self._move(replace(self._position, phase="", collective=None))

    def launched(self, collective: Collective, work: dist.Work) -> None:
        """`work` is under way."""
        with self._lock:
            while self._in_flight and self._in_flight[0].work.is_completed():
                self._in_flight.popleft()
            self._in_flight.append(_InFlight(collective=collective, work=work, started=time.monotonic()))
        count = self._position.collectives + 1
        self._move(replace(self._position, collective=collective, collectives=count))

    def _move(self, position: Position) -> None:
        self._position = position
        self._box.say(f"rank {self.rank}: {position}")

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *traceback: object) -> None:
        """An unforeseen error is reported, on all ranks, before it goes on to the caller."""
        failed = isinstance(error, Exception) and not isinstance(error, _SENTENCES) and self.world_size > 1
        if failed:
            self._fail(f"{type(error).__name__}: {error}", str(error))
            ender = threading.Timer(_END_SECONDS, os._exit, [EXIT_CODE])
            ender.daemon = True
            ender.start()
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=2 * self.deadlines.interval)
        self._box.close(keep=False)

    # ---- the clock ----

    def _look(self) -> None:
        longest = max(self.deadlines.collective, *self.deadlines.phases.values()) * self.deadlines.warm_up
        while not self._stop.wait(self.deadlines.interval):
            self._box.end_unless_called_again(longest + self.deadlines.grace)
            reason = self._expired() or self._told()
            if reason is not None:
                self._fail(reason)
                self._box.close(keep=False)
                os._exit(EXIT_CODE)

    def _expired(self, share: float = 1.0) -> str | None:
        """What has taken longer than `share` of its deadline, in a sentence; None if nothing has."""
        warm_up = self.deadlines.warm_up if self._position.step <= self._first_step else 1.0
        pending, now = self._oldest(), time.monotonic()
        limit = self.deadlines.collective * warm_up
        if pending is not None and (taken := now - pending.started) > limit * share:
            return f"a collective took {taken:.1f} s, at most {limit:g} s are given: {pending.collective}"
        position, taken = self._position, now - self._phase_started
        limit = self.deadlines.phases.get(position.phase, float("inf")) * warm_up
        if taken > limit * share:
            return f"phase '{position.phase}' of step {position.step} took {taken:.1f} s, at most {limit:g} s are given"
        return None

    def _oldest(self) -> _InFlight | None:
        with self._lock:
            return next((item for item in self._in_flight if not item.work.is_completed()), None)

    def _told(self) -> str | None:
        failed = self._peers.failed if self._peers is not None else None
        return None if failed is None else f"told to end: {failed}"

    # ---- the others ----

    def _beat(self) -> None:
        assert self._peers is not None
        while not self._stop.wait(self.deadlines.interval):
            self._peers.say(self._position)
            if self._expired(share=0.5) is not None:
                self._peers.read()

    def _fail(self, reason: str, error: str = "") -> None:
        """Write the report, once, and wait for the others' within the grace."""
        if not self._failing.acquire(blocking=False):
            # The other thread is at it and will end the process; a training thread that failed waits for that.
            time.sleep(_END_SECONDS)
            return
        pending, now = self._oldest(), time.monotonic()
        # An error has left the phase that it happened in.
        position = self._ended if error and not self._position.phase else self._position
        position = replace(position, collective=pending.collective if pending else position.collective)
        peers = Peers(positions={}, silent={}, sentence="no store was given")
        if self._peers is not None:
            store, quiet = self._peers, 2.5 * self.deadlines.interval
            _within(self.deadlines.grace / 2, lambda: store.ask(f"rank {self.rank}: {reason}", position, quiet))
            peers = store.known(quiet)
        incident = Incident(
            rank=self.rank,
            world_size=self.world_size,
            reason=reason,
            position=position,
            phase_seconds=now - self._phase_started if position.phase else 0.0,
            collective_seconds=now - pending.started if pending else 0.0,
            peers=peers,
            error=error,
        )
        path = write(incident, self.folder)
        print(f"moe_runtime: {incident}; report {path}", file=sys.stderr, flush=True)
        if self._peers is not None:
            store, living = self._peers, self.world_size - len(peers.silent)
            _within(self.deadlines.grace, lambda: store.wait_for_reports(living))


class _Store:
    """Positions of all ranks in a process group's store, through a connection of its own."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        # torch's stubs do not know it.
        self._store: dist.Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._rank, self._ranks = rank, [other for other in range(world_size) if other != rank]
        self._beats = 0
        self._seen: dict[int, tuple[Position, float]] = {}
        self._answered, self._error = time.monotonic(), ""
        self._busy = threading.Lock()
        self.failed: str | None = None

    def say(self, position: Position) -> None:
        """Publish this rank's position, and hear whether a rank failed."""
        with self._busy:
            self._say(position)

    def _say(self, position: Position) -> None:
        if self._error:
            return
        try:
            self._beats += 1
            self._store.set(f"watchdog/{self._rank}", replace(position, beat=self._beats).to_text())
            if self.failed is None and self._store.check([_FAILED]):
                self.failed = self._store.get(_FAILED).decode()
        except RuntimeError as error:  # what torch raises for a store whose host is gone
            self._error = f"the store of the process group does not answer: {error}".splitlines()[0]
            return
        self._answered = time.monotonic()

    def read(self) -> None:
        """Look up all ranks' positions."""
        with self._busy:
            self._read()

    def _read(self) -> None:
        if self._error:
            return
        try:
            keys = {rank: f"watchdog/{rank}" for rank in self._ranks}
            if not self._store.check(list(keys.values())):
                keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
            values = self._store.multi_get(list(keys.values())) if keys else []
        except RuntimeError as error:
            self._error = f"the store of the process group does not answer: {error}".splitlines()[0]
            return
        self._answered = now = time.monotonic()
        for rank, value in zip(keys, values, strict=True):
            position = from_text(value)
            before = self._seen.get(rank)
            moved = before is None or before[0].beat != position.beat
            self._seen[rank] = (position, now if moved or before is None else before[1])

    def ask(self, failure: str, position: Position, quiet: float) -> None:
        """Tell all ranks of the failure, unless one was faster, and find out who still speaks."""
        with self._busy:
            self._say(position)
            if not self._error and self.failed is None:
                self._store.set(_FAILED, failure)
            self._read()
        time.sleep(quiet * 1.2)
        self.read()

    def known(self, quiet: float) -> Peers:
        """What is known now; a rank is silent that has not spoken for `quiet` seconds while others were asked."""
        seen, answered = dict(self._seen), self._answered
        age = time.monotonic() - answered
        sentence = self._error or (f"the store has not answered for {age:.0f} s" if age > 2 * quiet else "")
        return Peers(
            positions={rank: position for rank, (position, _) in seen.items()},
            silent={rank: answered - at for rank, (_, at) in seen.items() if answered - at > quiet},
            sentence=sentence,
        )

    def wait_for_reports(self, living: int) -> None:
        """Count this rank's report and wait for those of `living` ranks."""
        with self._busy:
            if self._error:
                return
            self._store.add(_REPORTED, 1)
            while self._store.add(_REPORTED, 0) < living:
                time.sleep(0.02)


def attach(deadlines: Deadlines, folder: Path) -> Watchdog:
    """The watchdog of this rank of the default process group."""
    store = dist.distributed_c10d._get_default_store()
    return Watchdog(deadlines, folder, rank=dist.get_rank(), world_size=dist.get_world_size(), store=store)


def _within(seconds: float, call: Callable[[], None]) -> None:
    """Run `call` for at most `seconds`: it may wait for somebody who is gone."""
    thread = threading.Thread(target=call, name="watchdog call", daemon=True)
    thread.start()
    thread.join(timeout=seconds)
