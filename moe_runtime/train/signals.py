"""SIGTERM and SIGUSR1 ask a run to save and stop. A second one, or the end of the grace period, ends the process.

A thread reads the signals: the main one may be blocked in a collective whose other ranks are gone, and Python runs a
handler only when the call returns.
"""

import os
import select
import signal
import sys
import threading
import time
from typing import Any, Self

from moe_runtime.core.log import get_logger

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A launcher passes on what it got, and a batch system may signal both: twice within this time is once.
SAME_REQUEST_SECONDS = 1.0

_LOGGER = get_logger(__name__)


class StopSignals:
    """While entered, in the main thread, the signals are requests.

    grace_seconds  from the first signal to the end of the process, whatever it is doing
    A process ended by a second signal or after the grace period has exit code 128 + the first signal's number.
    """

    def __init__(self, *, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._first: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def received(self) -> signal.Signals | None:
        """The signal that asked this rank to stop, if one did."""
        return self._first

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            _LOGGER.warning("training runs outside of the main thread, so SIGTERM and SIGUSR1 are not handled")
            return self
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous = {number: signal.signal(number, _wake) for number in STOP_SIGNALS}
        self._previous_write = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, args=(read,), name="stop-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._previous:
            return
        signal.set_wakeup_fd(self._previous_write)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
        os.close(self._write)
        self._thread.join()

    def _watch(self, read: int) -> None:
        received_at = 0.0
        while True:
            deadline = received_at + self._grace_seconds if self._first else None
            timeout = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not select.select([read], [], [], timeout)[0]:
                self._end(f"not done {self._grace_seconds:g} seconds after {self._name}, the grace period")
            number = os.read(read, 1)
            if not number:
                os.close(read)
                return
            # Other signals that Python handles arrive here too.
            if number[0] not in STOP_SIGNALS:
                continue
            if self._first is None:
                self._first, received_at = signal.Signals(number[0]), time.monotonic()
            elif time.monotonic() > received_at + SAME_REQUEST_SECONDS:
                self._end(f"{signal.Signals(number[0]).name} after {self._name}")

    @property
    def _name(self) -> str:
        return self._first.name if self._first else ""

    def _end(self, reason: str) -> None:
        print(f"moe_runtime: {reason}: ended without another checkpoint", file=sys.stderr, flush=True)
        os._exit(128 + (self._first or 0))


def _wake(number: int, frame: object) -> None:
    """The byte that the signal wrote has told the thread."""
