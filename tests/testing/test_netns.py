"""Clusters of network namespaces: hosts with names and addresses, faults of links and hosts, nothing left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_runtime.core.errors import UnsupportedError
from moe_runtime.testing import netns
from moe_runtime.testing.netns import Cluster

ROOT = Path(__file__).parents[2]
needs_namespaces = pytest.mark.skipif(netns.missing_requirement() is not None, reason=str(netns.missing_requirement()))

SERVE = """
import socket
server = socket.create_server(("", 7000))
print("up", flush=True)
while True:
    server.accept()[0].send(b"x")
"""
CRASH = """
import os, signal, subprocess
from moe_runtime.testing import netns
made = netns.make_cluster(2)
with netns.running(made):
    nothing = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    print(made.name, netns.popen(made.hosts[1], ["sleep", "100"], **nothing).pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
ASK = "import socket; print(socket.create_connection(('host0', 7000), timeout=2).recv(1).decode())"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with netns.running(netns.make_cluster(2)) as made:
        yield made


def traces(name: str) -> list[str]:
    """What is left of a cluster on this machine."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    files = [str(path) for folder in ("/etc/netns", "/run/moe_runtime") for path in Path(folder).glob(f"{name}*")]
    return [line for line in listed if line.startswith(name)] + files


def said(host: netns.Host, *command: str) -> str:
    process = netns.popen(host, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return process.communicate(timeout=30)[0].strip()


@needs_namespaces
def test_each_host_has_a_name_and_an_address(cluster: Cluster) -> None:
    ask = "import socket; name = socket.gethostname(); print(name, socket.gethostbyname(name))"
    found = [said(host, sys.executable, "-c", ask) for host in cluster.hosts]
    assert found == ["host0 10.77.0.1", "host1 10.77.0.2"]


@needs_namespaces
def test_cut_links_and_dropped_hosts_are_silent_until_mended(cluster: Cluster) -> None:
    first, second = cluster.hosts
    for fault in (netns.cut, netns.drop):
        server = netns.popen(first, [sys.executable, "-c", SERVE], stdout=subprocess.PIPE)
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        assert said(second, sys.executable, "-c", ASK) == "x"
        fault(cluster, first)
        assert "timed out" in said(second, sys.executable, "-c", ASK)
        netns.mend(cluster, first)
        answered = said(second, sys.executable, "-c", ASK)
        assert answered == "x" if fault is netns.cut else "refused" in answered
        netns.send_signal(first, signal.SIGKILL)
        server.wait(timeout=10)
        server.stdout.close()


@needs_namespaces
def test_signals_reach_the_processes_of_one_host(cluster: Cluster) -> None:
    words = ["sh", "-c", "echo up; exec sleep 100"]
    sleepers = [netns.popen(host, words, stdout=subprocess.PIPE) for host in cluster.hosts]
    for sleeper in sleepers:
        assert sleeper.stdout is not None and sleeper.stdout.readline() == "up\n"
    netns.send_signal(cluster.hosts[1], signal.SIGTERM)
    assert sleepers[1].wait(timeout=10) == -signal.SIGTERM
    assert netns.pids(cluster.hosts[0]) == [sleepers[0].pid] and sleepers[0].poll() is None
    netns.send_signal(cluster.hosts[0], signal.SIGKILL)
    for sleeper in sleepers:
        sleeper.communicate(timeout=10)


@needs_namespaces
def test_nothing_is_left_after_the_end_an_error_or_a_crash() -> None:
    ended = netns.make_cluster(2)
    with pytest.raises(KeyError), netns.running(ended):
        sleeper = netns.popen(ended.hosts[0], ["sleep", "100"])
        raise KeyError
    assert traces(ended.name) == [] and sleeper.wait(timeout=10) == -signal.SIGKILL
    done = subprocess.run(
        [sys.executable, "-c", CRASH],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    name, pid = done.stdout.split()
    assert len(traces(name)) >= 6 and Path(f"/proc/{pid}").exists()
    living = netns.make_cluster(1)
    with netns.running(living):
        assert traces(name) == [] and len(traces(living.name)) == 4
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the crashed cluster's process lives on"
        time.sleep(0.02)


def test_what_is_missing_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UnsupportedError, match="needs root, got user 1000"), netns.running(netns.make_cluster(1)):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match="got no ip"), netns.running(netns.make_cluster(1)):
        pass
    for number in (0, 201):
        with pytest.raises(ValueError, match=f"1 to 200 hosts, got {number}"):
            netns.make_cluster(number)
