"""Launches of the train command on hosts of a cluster, with planted faults, and what happens to hosts meanwhile."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train_runs import arguments, child_environment

from moe_runtime.testing.launchers import RANK_VARIABLES, Torchrun
from moe_runtime.testing.netns import Cluster, Host, make_cluster, popen, running

SCRIPT = Path(__file__).with_name("faulty.py")
ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 6.0
WAIT_SECONDS = 200.0

OVERRIDES = (
    "parallel.expert=2",
    "parallel.data=fsdp2",
    "parallel.timeout_seconds=30",
    f"watchdog.seconds={DEADLINE_SECONDS}",
    f"watchdog.save_seconds={DEADLINE_SECONDS}",
    "train.steps=10",
    "train.checkpoint_every=3",
    "train.validate_every=5",
    "checkpoint.keep=0",
)
# Hosts notice each other's death in seconds, and a rendezvous does not wait for latecomers.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=4,join_timeout=120,read_timeout=20,last_call_timeout="


@dataclass(kw_only=True)
class Faults:
    """A launch under way."""

    cluster: Cluster
    config: Path
    folder: Path
    faults: Sequence[dict[str, Any]]
    torchrun: Torchrun
    overrides: Sequence[str] = OVERRIDES
    launchers: dict[str, "subprocess.Popen[str]"] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def start(self, host: Host) -> None:
        """torchrun on one host; its output goes to a file beside the run."""
        words = self.torchrun.command(
            self.cluster, host, [str(SCRIPT), *arguments(self.config, self.run_dir, self.overrides)]
        )
        variables = {
            **child_environment(),
            "FAULTS": json.dumps(self.faults),
            **RANK_VARIABLES,
            "PYTHONPATH": str(ROOT),
        }
        with (self.folder / f"{host.name}.log").open("a") as log:
            self.launchers[host.name] = popen(
                host, words, variables=variables, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def wait_for(self, path: Path) -> None:
        """Until a planted fault has made its file."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not path.exists():
            assert time.monotonic() < deadline, f"no {path.name}\n{self.printed()}"
            assert any(launcher.poll() is None for launcher in self.launchers.values()), self.printed()
            time.sleep(0.005)

    def finish(self) -> dict[str, int]:
        """The exit code of every launcher."""
        deadline = time.monotonic() + WAIT_SECONDS
        for name, launcher in self.launchers.items():
            try:
                launcher.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{name} did not end\n{self.printed()}") from None
        return {name: launcher.returncode for name, launcher in self.launchers.items()}

    def printed(self) -> str:
        logs = sorted(self.folder.glob("host*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text()[-6000:]}" for path in logs)

    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.run_dir / "reports").glob("*.json"))]

    def resumed_steps(self) -> list[int]:
        """Steps after which a start went on, in order; a start from nothing says none."""
        lines = "".join(path.read_text() for path in sorted(self.folder.glob("host*.log"))).splitlines()
        return [int(line.split("resumed after step ")[1].split()[0]) for line in lines if "resumed after step" in line]


@contextmanager
def launched(
    config: Path, folder: Path, faults: Sequence[dict[str, Any]], *, nodes: str = "2", max_restarts: int = 1
) -> Iterator[Faults]:
    """Two hosts of one rank each, training with these faults."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, fault in enumerate(faults):
        fault.setdefault("once", str(folder / f"fault-{index}"))
    with running(make_cluster(2)) as cluster:
        torchrun = Torchrun(
            ranks=1,
            nodes=nodes,
            job=cluster.name,
            max_restarts=max_restarts,
            rendezvous=f"{RENDEZVOUS}{15 if ':' in nodes else 1}",
        )
        faulty = Faults(cluster=cluster, config=config, folder=folder, faults=faults, torchrun=torchrun)
        for host in cluster.hosts:
            faulty.start(host)
        yield faulty
    for launcher in faulty.launchers.values():  # the cluster has ended those that were left
        launcher.wait(timeout=WAIT_SECONDS)


def kill_launcher(faulty: Faults, host: Host) -> None:
    """SIGKILL torchrun alone; its rank lives on until it finds itself alone."""
    os.kill(faulty.launchers[host.name].pid, signal.SIGKILL)
    faulty.launchers[host.name].wait(timeout=WAIT_SECONDS)
