"""From a launcher's environment to a process group: torchrun, Open MPI, MPICH / Intel MPI, Slurm, or none.

`launch_from_env` is a pure function of the variables, so that every launcher can be tested without one. It refuses
contradictions instead of picking a side: a process that believes a wrong rank hangs everybody. `init_process_group`
is the only function here that touches torch, which is imported when it is called.
"""

import datetime
import errno
import ipaddress
import re
import socket
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from moe_runtime.core.errors import ConfigError
from moe_runtime.core.log import get_logger

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_LOGGER = get_logger(__name__)

Launcher = Literal["torchrun", "openmpi", "mpich", "slurm", "none"]

DEFAULT_PORT = 29500
_POLL_SECONDS = 0.01
# Connections that may wait at once: every rank of a large run comes in the same second.
_BACKLOG = 2048
# Slurm numbers its batch, interactive and other non-srun steps from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """This process among its peers. `local_world_size` 0 and `master_addr` empty: the launcher did not say.

    `agent_store`: torchrun's agent already serves the rendezvous store that the ranks connect to. `job`: torchrun's run
    id, the same in every restart, empty where none was given; `restart_count` counts restarts after a failure.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: Launcher = "none"
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT
    agent_store: bool = False
    job: str = ""
    restart_count: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes shared files."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class _Names:
    """The variables in which one launcher states a process's place."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


_NAMES: dict[Launcher, _Names] = {
    "torchrun": _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": _Names(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    "mpich": _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "slurm": _Names("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def launch_from_env(env: Mapping[str, str]) -> Launch:
    """This process's place among its peers, read from a launcher's variables; one process where there is none.

    torchrun's agent outranks everything around it (it may itself be started by srun or mpirun, one on each host), and
    MPI's launcher outranks Slurm, whose srun it uses to start its daemons. RANK and WORLD_SIZE set by hand must agree
    with the launcher that is there. Contradictions raise ConfigError with both values.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        return _read(env, "torchrun")
    found: list[Launcher] = [name for name in ("openmpi", "mpich") if _is_set(env, name)]
    if not found and _in_slurm_step(env):
        found = ["slurm"]
    if _is_set(env, "torchrun"):
        found.append("torchrun")
    if not found:
        return Launch()
    launches = [_read(env, launcher) for launcher in found]
    for other, launcher in zip(launches[1:], found[1:], strict=True):
        _check_agree(launches[0], found[0], other, launcher, env)
    return launches[0]


def likely_rank(env: Mapping[str, str]) -> int:
    """The rank this process most likely has, never an error: who speaks when `launch_from_env` refuses its input."""
    order: list[Launcher] = ["openmpi", "mpich", *(["slurm"] if _in_slurm_step(env) else []), "torchrun"]
    if "TORCHELASTIC_RUN_ID" in env:
        order = ["torchrun"]
    values = [env.get(_NAMES[launcher].rank, "") for launcher in order]
    return next((int(value) for value in values if value.isascii() and value.isdecimal()), 0)


def check_unique(ranks: Sequence[int], world_size: int) -> None:
    """Refuse a launch whose processes do not hold the ranks 0 .. world_size - 1, each once."""
    duplicates = sorted(rank for rank, count in Counter(ranks).items() if count > 1)
    if duplicates:
        raise ConfigError(
            f"every process needs a rank of its own in [0, {world_size}), got duplicate ranks {duplicates} in "
            f"{list(ranks)}; a local rank used as the global one looks like this"
        )
    if sorted(ranks) != list(range(world_size)):
        missing = sorted(set(range(world_size)) - set(ranks))
        raise ConfigError(f"expected ranks 0 to {world_size - 1}, got {list(ranks)}; missing {missing}")


def device_index(launch: Launch, device_count: int) -> int:
    """The accelerator of this process on its host: its local rank, or 0 where the launcher shows it a single one."""
    if device_count == 1:
        return 0
    if launch.local_rank >= device_count:
        raise ConfigError(
            f"rank {launch.rank} needs device {launch.local_rank} of its host, which has {device_count}; "
            "start at most one process for each device"
        )
    return launch.local_rank


def init_process_group(launch: Launch, *, device_type: str, timeout_seconds: float) -> None:
    """Create torch's default process group: gloo on the CPU, and NCCL for CUDA tensors beside it on CUDA.

    A world of one uses a store in memory and opens no port. Every wait ends after `timeout_seconds`. On CUDA the
    process's device becomes the current one.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    arguments: dict[str, Any] = {"timeout": datetime.timedelta(seconds=timeout_seconds)}
    if device_type == "cuda":
        device = torch.device("cuda", device_index(launch, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        arguments.update(backend="cpu:gloo,cuda:nccl", device_id=device)
    elif device_type == "cpu":
        arguments.update(backend="gloo")
    else:
        raise ConfigError(f"device type must be 'cpu' or 'cuda', got '{device_type}'")
    if launch.world_size == 1:
        arguments.update(store=HashStore(), rank=0, world_size=1)
    elif not launch.master_addr:
        raise ConfigError(
            f"MASTER_ADDR must name rank 0's host for {launch.world_size} ranks on several hosts, got nothing"
        )
    elif launch.agent_store:
        limit = arguments["timeout"]
        store = dist.TCPStore(launch.master_addr, launch.master_port, is_master=False, timeout=limit)
        prefix = fresh_prefix(store, launch, timeout_seconds=timeout_seconds)
        arguments.update(store=dist.PrefixStore(prefix, store), rank=launch.rank, world_size=launch.world_size)
    else:
        server = _listen(launch).detach() if launch.is_main else None
        store = dist.TCPStore(
            launch.master_addr,
            launch.master_port,
            launch.world_size,
            launch.is_main,
            timeout=arguments["timeout"],
            master_listen_fd=server,
        )
        arguments.update(store=store, rank=launch.rank, world_size=launch.world_size)
    dist.init_process_group(**arguments)


def fresh_prefix(store: "dist.Store", launch: Launch, *, timeout_seconds: float) -> str:
    """A name for the keys of this start alone, the same on all of its ranks.

    torchrun's agent keeps its store through restarts, and old keys with it: addresses of processes that are gone, among
    others. Nothing that a rank is told differs from one start to the next on all hosts alike. So each rank makes up a
    word, and rank 0 answers to each word with the name until every rank has said that it got it.
    """
    word, deadline = uuid.uuid4().hex, time.monotonic() + timeout_seconds
    store.set(f"word/{launch.rank}", word)
    if launch.rank:
        name = store.get(f"name/{word}").decode()
        store.add(f"got/{name}", 1)
        return name
    words: dict[int, str] = {}
    while store.add(f"got/{word}", 0) < launch.world_size - 1:
        for rank in range(1, launch.world_size):
            key = f"word/{rank}"
            said = store.get(key).decode() if store.check([key]) else ""
            if said and said != words.get(rank):
                words[rank] = said
                store.set(f"name/{said}", word)
        if time.monotonic() > deadline:
            missing = [rank for rank in range(1, launch.world_size) if rank not in words]
            raise TimeoutError(f"ranks {missing or 'of an earlier start'} did not come within {timeout_seconds:g} s")
        time.sleep(_POLL_SECONDS)
    return word


def local_device(launch: Launch) -> "torch.device":
    """The device this process trains on: its CUDA device where there is one, else the CPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", device_index(launch, torch.cuda.device_count()))


def shutdown() -> None:
    """Destroy the default process group if there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _listen(launch: Launch) -> socket.socket:
    """Rank 0's end of the store that we make: it asks nobody for a password, so it listens where it was said to only.

    A name that means this host's loopback here (as many hosts resolve their own) is of no use to other hosts; then, and
    where the name is no address of this host, it listens on every interface and says so.
    """
    address, port = launch.master_addr, launch.master_port
    several_hosts = launch.local_world_size != launch.world_size
    try:
        for family, _, _, _, where in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
            if several_hosts and ipaddress.ip_address(where[0]).is_loopback:
                continue
            try:
                return socket.create_server(where[:2], family=family, backlog=_BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
        _LOGGER.warning("%s is no address of this host that others can reach: port %d is open on all", address, port)
        return socket.create_server(("", port), backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"rank 0 cannot listen on MASTER_ADDR:MASTER_PORT = {address}:{port}: {error}") from error


# ---- reading ----


def _is_set(env: Mapping[str, str], launcher: Launcher) -> bool:
    names = _NAMES[launcher]
    return names.rank in env or names.world_size in env


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process; the shell of sbatch or salloc has SLURM_PROCID too, and is one process."""
    step = env.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in env and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _read(env: Mapping[str, str], launcher: Launcher) -> Launch:
    names = _NAMES[launcher]
    rank, world_size = _pair(env, names.rank, _slurm_size_name(env) if launcher == "slurm" else names.world_size)
    local_rank = _integer(env, names.local_rank) if names.local_rank in env else None
    local_world_size = _local_world_size(env, launcher)
    if local_rank is None:
        # One process a host is what launchers that know no local rank start (a pod, an ssh loop).
        local_rank, local_world_size = 0, local_world_size or 1
    if local_world_size and local_rank >= local_world_size:
        raise ConfigError(
            f"{names.local_rank} must be below the number of processes on its host, {local_world_size}, "
            f"got {local_rank}"
        )
    address = env.get("MASTER_ADDR") or _default_address(env, launcher, local_world_size == world_size)
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        launcher=launcher,
        master_addr=address,
        master_port=_port(env, launcher),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and launcher == "torchrun",
        job=_job(env) if launcher == "torchrun" else "",
        restart_count=_integer(env, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in env else 0,
    )


def _job(env: Mapping[str, str]) -> str:
    """torchrun's run id; it says "none" where it was given none."""
    job = env.get("TORCHELASTIC_RUN_ID", "")
    return "" if job == "none" else job


def _pair(env: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    """(rank, world size), both present, both integers, rank inside."""
    for present, missing in ((rank_name, size_name), (size_name, rank_name)):
        if present in env and missing not in env:
            raise ConfigError(
                f"expected both {rank_name} and {size_name}, got {present}={env[present]} without {missing}"
            )
    rank, world_size = _integer(env, rank_name), _integer(env, size_name)
    if rank >= world_size:
        raise ConfigError(f"{rank_name} must be below {size_name}, got {rank_name}={rank} and {size_name}={world_size}")
    return rank, world_size


def _integer(env: Mapping[str, str], name: str) -> int:
    text = env[name].strip()
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{name} must be a non-negative integer, got '{env[name]}'")
    return int(text)


def _slurm_size_name(env: Mapping[str, str]) -> str:
    """The step's own task count where Slurm gives it: SLURM_NTASKS may be the whole allocation's."""
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"


def _local_world_size(env: Mapping[str, str], launcher: Launcher) -> int:
    """Processes on this host, 0 where the launcher does not say."""
    name = _NAMES[launcher].local_world_size
    if name not in env:
        return 0
    if launcher != "slurm":
        return _integer(env, name)
    # Slurm writes runs of equal hosts, "4(x2),3"; only an equal split says something about this host.
    match = re.fullmatch(r"(\d+)(?:\(x\d+\))?", env[name])
    return int(match[1]) if match else 0


def _default_address(env: Mapping[str, str], launcher: Launcher, is_one_host: bool) -> str:
    """Rank 0's host where it can be known: this host, or the first one of Slurm's list."""
    if is_one_host:
        return "127.0.0.1"
    if launcher == "slurm":
        return _first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "")
    return ""


def _first_host(hosts: str) -> str:
    """'gpu[03-07,12],login' -> 'gpu03': the first name of a Slurm host list."""
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", hosts)
    return "".join(part or "" for part in match.groups()) if match else ""


def _port(env: Mapping[str, str], launcher: Launcher) -> int:
    """MASTER_PORT, else one fixed by the Slurm step or MPI job, so that two jobs on a host rarely meet."""
    if "MASTER_PORT" in env:
        port = _integer(env, "MASTER_PORT")
        if not 0 < port < 65536:
            raise ConfigError(f"MASTER_PORT must be in [1, 65535], got {port}")
        return port
    job = {
        "slurm": f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}",
        "openmpi": env.get("PMIX_NAMESPACE", ""),
    }.get(launcher, "")
    return DEFAULT_PORT + zlib.crc32(job.encode()) % 1000 if job else DEFAULT_PORT


def _check_agree(
    first: Launch, launcher: Launcher, other: Launch, other_launcher: Launcher, env: Mapping[str, str]
) -> None:
    """Refuse two sets of variables that put this process in two places."""
    names, other_names = _NAMES[launcher], _NAMES[other_launcher]
    for field in ("rank", "world_size", "local_rank"):
        name, other_name = getattr(names, field), getattr(other_names, field)
        if field == "local_rank" and (name not in env or other_name not in env):
            continue
        if getattr(first, field) != getattr(other, field):
            raise ConfigError(
                f"{other_name}={getattr(other, field)} contradicts {name}={getattr(first, field)}; "
                f"unset the variables of the launcher that did not start this process"
            )
