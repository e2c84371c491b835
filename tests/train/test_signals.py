"""Signals: the first asks, a repeat is the same request, a later one or the end of the grace period is the end."""

import os
import signal
import subprocess
import sys
import time

import pytest

from moe_runtime.train.signals import SAME_REQUEST_SECONDS, StopSignals

# The main thread is blocked in C, as in a collective that nobody else enters: no Python handler can run.
BLOCKED = """
import ctypes
from moe_runtime.train.signals import StopSignals
with StopSignals(grace_seconds={grace}):
    print("ready", flush=True)
    while True:
        ctypes.CDLL(None).pause()
"""


def _start(grace: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED.format(grace=grace)],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def _wait_until(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_is_a_request_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignals(grace_seconds=60) as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        _wait_until(lambda: signals.received is number)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        assert signals.received is number
    assert signal.getsignal(number) is before


def test_a_second_signal_ends_a_blocked_process_at_once() -> None:
    process = _start(grace=60)
    process.send_signal(signal.SIGUSR1)
    time.sleep(SAME_REQUEST_SECONDS + 0.3)
    assert process.poll() is None
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=20)
    assert time.monotonic() - started < 5
    assert process.returncode == 128 + signal.SIGUSR1
    assert printed == "moe_runtime: SIGTERM after SIGUSR1: ended without another checkpoint\n"


def test_the_end_of_the_grace_period_ends_a_blocked_process() -> None:
    process = _start(grace=0.5)
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert printed == (
        "moe_runtime: not done 0.5 seconds after SIGTERM, the grace period: ended without another checkpoint\n"
    )
