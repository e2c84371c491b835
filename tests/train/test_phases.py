"""Phases: time by the clock and time computed, one at a time, and an observer that hears of each end."""

import time

import pytest

from moe_runtime.train.phases import PHASES, Phase, Phases, PhaseSeconds


class Heard:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Phase, int]] = []

    def begin(self, phase: Phase, step: int) -> None:
        self.calls.append(("begin", phase, step))

    def end(self, phase: Phase, step: int) -> None:
        self.calls.append(("end", phase, step))


def test_waiting_counts_by_the_clock_only() -> None:
    phases = Phases()
    for _ in range(2):
        with phases("data"):
            time.sleep(0.05)
    spent = phases.take()
    assert set(spent) == set(PHASES)
    assert spent["data"].wall >= 0.1 and spent["data"].busy < 0.05
    assert spent["forward"] == PhaseSeconds()
    assert phases.take()["data"] == PhaseSeconds()


def test_computing_counts_as_busy() -> None:
    phases = Phases()
    with phases("backward"):
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
    assert phases.take()["backward"].busy >= 0.05


def test_the_observer_hears_the_end_of_a_phase_that_failed() -> None:
    heard = Heard()
    phases = Phases(heard)
    phases.start_step(7)
    with pytest.raises(KeyError), phases("save"):
        raise KeyError
    with phases("validate"):
        pass
    assert heard.calls == [("begin", "save", 7), ("end", "save", 7), ("begin", "validate", 7), ("end", "validate", 7)]


def test_a_phase_inside_of_another_is_refused() -> None:
    phases = Phases()
    refused = pytest.raises(RuntimeError, match="'optimizer' began inside of 'backward'")
    with refused, phases("backward"), phases("optimizer"):
        pass
    with phases("optimizer"):
        pass
