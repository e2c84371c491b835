"""An exclusive file lock between the processes of a host, with a time-out that counts from the holder's last progress.

The kernel drops the lock of a process that ends, however it ends, so only a holder that lives and stands still can
make others wait: they give up with a sentence that names the file.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moe_runtime.core.errors import ConfigError
from moe_runtime.core.log import get_logger

POLL_SECONDS = 0.1

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A lock that this process holds."""

    descriptor: int

    def beat(self) -> None:
        """Tell the processes that wait that work goes on: their time-out starts anew."""
        os.utime(self.descriptor)


@contextmanager
def exclusive(path: Path, *, timeout_seconds: float) -> Iterator[HeldLock]:
    """Hold `path` locked. ConfigError after `timeout_seconds` in which its holder showed no progress.

    The file is created (owner only), never followed as a link, and stays: removing it would race with a waiter.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _acquire(descriptor, path, timeout_seconds)
        yield HeldLock(descriptor)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, timeout_seconds: float) -> None:
    last_beat, since = None, time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            beat = os.fstat(descriptor).st_mtime_ns
        if last_beat is None:
            logger.info("waiting for the process that holds %s", path)
        if beat != last_beat:
            last_beat, since = beat, time.monotonic()
        elif time.monotonic() - since > timeout_seconds:
            raise ConfigError(
                f"expected the process that holds the lock file {path} to finish the token cache, "
                f"got no progress from it in {timeout_seconds:g} s; end that process and run again"
            )
        time.sleep(POLL_SECONDS)
