"""Several hosts on one machine: network namespaces, each with an address and a host name, on one switch.

    with running(make_cluster(2)) as cluster:
        process = popen(cluster.hosts[0], ["python", "-m", "moe_runtime", "doctor"])
        cut(cluster, cluster.hosts[1])

A cluster is a value; what it stands for lives in the kernel. The switch is a bridge in a namespace of its own, so the
machine's own network is left as it is. Needs Linux, root and iproute2. A cluster whose owner died without cleaning up
is removed, with its processes, when the next one starts.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_runtime.core.env import environment
from moe_runtime.core.errors import UnsupportedError

PREFIX = "moe-runtime-"
INTERFACE = "eth0"
MAX_HOSTS = 200

_LOCKS = Path("/run/moe_runtime")
# `ip netns exec` shows a process the files of its namespace's folder here in place of those in /etc.
_FILES = Path("/etc/netns")
_COMMAND_SECONDS, _END_SECONDS = 20.0, 10.0
# A host name of its own, then the command in the same process: whoever signals the one signals the other.
_AS_HOST = 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"'


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One host: `port` is the switch's end of its link."""

    name: str
    namespace: str
    address: str
    port: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Hosts on one switch. `name` is unlike that of any other cluster of this machine."""

    name: str
    switch: str
    hosts: tuple[Host, ...]


def make_cluster(num_hosts: int) -> Cluster:
    """A cluster of hosts host0, host1, ... with addresses 10.77.0.1, 10.77.0.2, ...; nothing is created yet."""
    if not 1 <= num_hosts <= MAX_HOSTS:
        raise ValueError(f"a cluster has 1 to {MAX_HOSTS} hosts, got {num_hosts}")
    name = f"{PREFIX}{os.getpid()}-{time.monotonic_ns()}"
    hosts = tuple(
        Host(name=f"host{index}", namespace=f"{name}-{index}", address=f"10.77.0.{index + 1}", port=f"port{index}")
        for index in range(num_hosts)
    )
    return Cluster(name=name, switch=f"{name}-switch", hosts=hosts)


def missing_requirement() -> str | None:
    """Why this machine can have no cluster, in a sentence; None if it can."""
    if sys.platform != "linux":
        return f"a cluster of network namespaces needs Linux, got {sys.platform}"
    if os.geteuid() != 0:
        return f"a cluster of network namespaces needs root, got user {os.geteuid()}"
    absent = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if absent:
        return f"a cluster of network namespaces needs the commands ip (iproute2) and unshare, got no {absent[0]}"
    return None


@contextmanager
def running(cluster: Cluster) -> Iterator[Cluster]:
    """Create the cluster, and remove it at the end with every process in it.

    Raises UnsupportedError, with a sentence, where the machine cannot have one.
    """
    if (sentence := missing_requirement()) is not None:
        raise UnsupportedError(sentence)
    _LOCKS.mkdir(exist_ok=True)
    remove_orphans()
    with (_LOCKS / cluster.name).open("w") as lock:
        # The kernel releases it when this process ends, however it ends: that is how an orphan is known.
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _up(cluster)
            yield cluster
        finally:
            _down(cluster.name)
            (_LOCKS / cluster.name).unlink()


def remove_orphans() -> list[str]:
    """Remove clusters whose owner is gone; their names."""
    removed = []
    for path in sorted(_LOCKS.glob(f"{PREFIX}*")):
        try:
            lock = path.open("r+")
        except FileNotFoundError:  # another process cleans up too
            continue
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            _down(path.name)
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def popen(
    host: Host, command: Sequence[str], *, variables: Mapping[str, str] | None = None, **options: Any
) -> "subprocess.Popen[str]":
    """Start `command` on the host, in a session of its own; `variables` are added to this process's environment."""
    words = ["ip", "netns", "exec", host.namespace, "unshare", "--uts", "sh", "-c", _AS_HOST, host.name, *command]
    env = {**environment(), **(variables or {})}
    return subprocess.Popen(words, env=env, text=True, start_new_session=True, **options)


def pids(host: Host) -> list[int]:
    """The processes on the host."""
    return [int(word) for word in _ip("netns", "pids", host.namespace).split()]


def send_signal(host: Host, number: int) -> None:
    """Signal every process of the host."""
    for pid in pids(host):
        _kill(pid, number)


def cut(cluster: Cluster, host: Host) -> None:
    """Unplug the host's link. Connections stay open at both ends and hear nothing."""
    _ip("-n", cluster.switch, "link", "set", host.port, "down")


def mend(cluster: Cluster, host: Host) -> None:
    """Plug the host's link in again; packets that were lost are sent again."""
    _ip("-n", cluster.switch, "link", "set", host.port, "up")


def drop(cluster: Cluster, host: Host) -> None:
    """The host loses power: its link and all its processes are gone at once, and nobody is told."""
    cut(cluster, host)
    _end_processes(host.namespace)


def restore(cluster: Cluster, host: Host) -> None:
    """A dropped host is up again, with nothing running on it."""
    mend(cluster, host)


def _up(cluster: Cluster) -> None:
    names = "".join(f"{host.address} {host.name}\n" for host in cluster.hosts)
    _ip("netns", "add", cluster.switch)
    _ip("-n", cluster.switch, "link", "add", "switch", "type", "bridge")
    _ip("-n", cluster.switch, "link", "set", "switch", "up")
    for host in cluster.hosts:
        folder = _FILES / host.namespace
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        _ip("netns", "add", host.namespace)
        peer = ("peer", "name", INTERFACE, "netns", host.namespace)
        _ip("-n", cluster.switch, "link", "add", host.port, "type", "veth", *peer)
        _ip("-n", cluster.switch, "link", "set", host.port, "master", "switch", "up")
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            _ip("-n", host.namespace, "link", "set", interface, "up")


def _down(name: str) -> None:
    """Remove whatever exists of the cluster, half of one too."""
    spaces = [line.split()[0] for line in _ip("netns", "list").splitlines() if line.startswith(f"{name}-")]
    for namespace in spaces:
        _end_processes(namespace)
    for namespace in spaces:
        _ip("netns", "delete", namespace)
    for folder in _FILES.glob(f"{name}-*"):
        shutil.rmtree(folder)


def _end_processes(namespace: str) -> None:
    """SIGKILL until none is left: one that is being forked is not in the first list."""
    deadline = time.monotonic() + _END_SECONDS
    while found := _ip("netns", "pids", namespace).split():
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {found} of {namespace} survived SIGKILL for {_END_SECONDS:.0f} s")
        for pid in found:
            _kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it ended since it was listed
        return


def _ip(*words: str) -> str:
    try:
        done = subprocess.run(
            ["ip", *words],
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.CalledProcessError as error:
        raise UnsupportedError(f"'ip {' '.join(words)}' failed: {error.stderr.strip()}") from error
    return done.stdout
