"""What the coordinator did, as events that Chrome's trace viewer and Perfetto read."""

import os
import threading
import time
from collections import deque
from typing import Any

_KEPT_EVENTS = 20_000


class Trace:
    """The last 20,000 events with wall times; recording costs one append."""

    def __init__(self) -> None:
        self._events: deque[tuple[str, str, float, float, dict[str, Any]]] = deque(maxlen=_KEPT_EVENTS)

    def add(self, name: str, kind: str, started: float, ended: float, **arguments: Any) -> None:
        """An event from `started` to `ended`, both from `now()`."""
        self._events.append((name, kind, started, ended, arguments))

    def as_json(self) -> dict[str, Any]:
        """{"traceEvents": [...]}: complete events, microseconds."""
        process, thread = os.getpid(), threading.get_ident()
        return {
            "traceEvents": [
                {
                    "name": name,
                    "cat": kind,
                    "ph": "X",
                    "ts": started * 1e6,
                    "dur": (ended - started) * 1e6,
                    "pid": process,
                    "tid": thread,
                    "args": arguments,
                }
                for name, kind, started, ended, arguments in self._events
            ]
        }

    def clear(self) -> None:
        """Forget every event."""
        self._events.clear()


def now() -> float:
    """Seconds on the clock of traces."""
    return time.perf_counter()
