"""The phases of a run, named here only: how long each took on this rank, and an observer that hears of each.

Outside of these phases a rank waits for nobody.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Phase = Literal["data", "forward", "backward", "optimizer", "validate", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class PhaseObserver(Protocol):
    """Hears of every phase of this rank, in the thread that trains; `step` counts from 1, as metrics do."""

    def begin(self, phase: Phase, step: int) -> None:
        """`phase` of `step` starts."""
        ...

    def end(self, phase: Phase, step: int) -> None:
        """It is over, in whatever way."""
        ...


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Time in one phase: by the clock, and of it the time in which the training thread computed instead of waiting.

    On a GPU the thread only launches, and waits at the end of "optimizer".
    """

    wall: float = 0.0
    busy: float = 0.0


class Phases:
    """Which phase this rank is in. One at a time:

    phases.start_step(12)
    with phases("forward"):
        ...
    """

    def __init__(self, observer: PhaseObserver | None = None) -> None:
        self.step = 0
        self._observer = observer
        self._current: Phase | None = None
        self._spent = dict.fromkeys(PHASES, PhaseSeconds())

    def start_step(self, step: int) -> None:
        """What follows belongs to `step`, counted from 1."""
        self.step = step

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """The body is `phase`; RuntimeError inside of another."""
        if self._current is not None:
            raise RuntimeError(f"phase {phase!r} began inside of {self._current!r}; a rank is in one at a time")
        self._current = phase
        wall, busy = time.perf_counter(), time.thread_time()
        if self._observer is not None:
            self._observer.begin(phase, self.step)
        try:
            yield
        finally:
            self._current = None
            before = self._spent[phase]
            self._spent[phase] = PhaseSeconds(
                wall=before.wall + time.perf_counter() - wall, busy=before.busy + time.thread_time() - busy
            )
            if self._observer is not None:
                self._observer.end(phase, self.step)

    def take(self) -> dict[Phase, PhaseSeconds]:
        """Time in every phase since the last call."""
        spent, self._spent = self._spent, dict.fromkeys(PHASES, PhaseSeconds())
        return spent
