"""The lock excludes, times out by name, waits while the holder shows progress, and outlives nobody."""

import threading
import time

import pytest

from moe_runtime.core.errors import ConfigError
from moe_runtime.train.data.lock import exclusive


def test_waiter_times_out_with_the_file_name(tmp_path):
    path = tmp_path / "x.lock"
    with (
        exclusive(path, timeout_seconds=1),
        pytest.raises(ConfigError, match=rf"lock file {path} .*no progress from it in 0\.2 s"),
        exclusive(path, timeout_seconds=0.2),
    ):
        pytest.fail("the lock was given twice")


def test_waiter_waits_longer_than_its_time_out_while_the_holder_beats(tmp_path):
    path, held, events = tmp_path / "x.lock", threading.Event(), []

    def hold() -> None:
        with exclusive(path, timeout_seconds=1) as lock:
            held.set()
            for _ in range(20):
                time.sleep(0.1)
                lock.beat()
            events.append("released")

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    with exclusive(path, timeout_seconds=1):
        events.append("acquired")
    holder.join()
    assert events == ["released", "acquired"]


def test_lock_is_free_after_an_error_and_private(tmp_path):
    path = tmp_path / "x.lock"
    with pytest.raises(KeyError), exclusive(path, timeout_seconds=0):
        raise KeyError
    with exclusive(path, timeout_seconds=0):
        assert path.stat().st_mode & 0o777 == 0o600


def test_planted_link_is_not_followed(tmp_path):
    (tmp_path / "x.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"), exclusive(tmp_path / "x.lock", timeout_seconds=0):
        pytest.fail("followed")
    assert not (tmp_path / "victim").exists()
