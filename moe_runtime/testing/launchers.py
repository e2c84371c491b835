"""The launchers that real hosts have, started on the hosts of a `netns` cluster.

torchrun runs on every host and its agents meet over the switch. mpiexec (MPICH's) has no ssh to go through: told to
launch by hand, it prints what belongs on each host, and that is run there.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_runtime.core.errors import UnsupportedError
from moe_runtime.testing.netns import INTERFACE, Cluster, Host, popen

RENDEZVOUS_PORT = 29400
MASTER_PORT = 29500
_MANUAL_LINE, _MANUAL_END = "HYDRA_LAUNCH: ", "HYDRA_LAUNCH_END"
# One thread a rank, and torchrun's agents keep their store to themselves, as in launch/. gloo is told the interface,
# so that it need not trust the host's name.
RANK_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Torchrun:
    """How torchrun is started on each host; `nodes` is its --nnodes ("2", or "1:2" for a run that may shrink)."""

    ranks: int
    nodes: str
    job: str
    max_restarts: int = 0
    rendezvous: str = ""

    def command(self, cluster: Cluster, host: Host, program: Sequence[str]) -> list[str]:
        """torchrun's words on `host`; the first host serves the store."""
        first = cluster.hosts[0]
        options = {
            "--nnodes": self.nodes,
            "--nproc-per-node": self.ranks,
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": f"{first.address}:{RENDEZVOUS_PORT}",
            "--rdzv-id": self.job,
            "--rdzv-conf": ",".join(filter(None, [f"is_host={int(host is first)}", self.rendezvous])),
            "--local-addr": host.address,
            "--max-restarts": self.max_restarts,
        }
        words = [f"{name}={value}" for name, value in options.items()]
        return [sys.executable, "-m", "torch.distributed.run", *words, *program]


def start_torchrun(
    cluster: Cluster, host: Host, torchrun: Torchrun, program: Sequence[str], **options: Any
) -> "subprocess.Popen[str]":
    """torchrun on one host, for `program`: "-m module words" or "script words"."""
    return popen(host, torchrun.command(cluster, host, program), variables=RANK_VARIABLES, **options)


def start_mpiexec(
    cluster: Cluster, ranks: int, program: Sequence[str]
) -> "tuple[subprocess.Popen[str], list[subprocess.Popen[str]]]":
    """mpiexec on the first host with `ranks` processes of `program` on each, and the proxies that hold them.

    What ranks print comes out of the first's `stdout`, which is a pipe. Raises UnsupportedError without an mpiexec of
    MPICH beside this Python.
    """
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not os.access(mpiexec, os.X_OK):
        raise UnsupportedError(f"mpirun over namespaces needs MPICH's launcher, got no {mpiexec}: pip install mpich")
    names = ",".join(host.name for host in cluster.hosts)
    total = ranks * len(cluster.hosts)
    words = [str(mpiexec), "-launcher", "manual", "-hosts", names, "-ppn", str(ranks), "-n", str(total), *program]
    first = cluster.hosts[0]
    variables = {**RANK_VARIABLES, "MASTER_ADDR": first.address, "MASTER_PORT": str(MASTER_PORT)}
    process = popen(first, words, variables=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    proxies = []
    for line in process.stdout:
        if line.startswith(_MANUAL_END):
            return process, proxies
        if not line.startswith(_MANUAL_LINE):
            raise UnsupportedError(f"expected '{_MANUAL_LINE}COMMAND' from {mpiexec}, got '{line.strip()}'")
        host = cluster.hosts[len(proxies)]
        proxies.append(popen(host, shlex.split(line.removeprefix(_MANUAL_LINE)), stdin=subprocess.DEVNULL))
    raise UnsupportedError(f"expected '{_MANUAL_END}' from {mpiexec}, which ended with code {process.wait()}")
