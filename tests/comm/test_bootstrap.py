"""Launchers' variables to ranks, contradictions, and process groups on the CPU."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_runtime.comm.bootstrap import (
    Launch,
    check_unique,
    device_index,
    fresh_prefix,
    init_process_group,
    launch_from_env,
    likely_rank,
    local_device,
    shutdown,
)
from moe_runtime.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}


def place(env: dict[str, str]) -> tuple[str, int, int, int]:
    launch = launch_from_env(env)
    return launch.launcher, launch.rank, launch.world_size, launch.local_rank


def ompi(rank: int, size: int, local_rank: int) -> dict[str, str]:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    return dict(zip(names, map(str, (rank, size, local_rank)), strict=True))


def by_hand(rank: object, size: object) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size)}


ELASTIC = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1", **by_hand(5, 8)}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ("none", 0, 1, 0)),
        ({"HOME": "/", "LOCAL_RANK": "3"}, ("none", 0, 1, 0)),
        (by_hand(2, 4), ("torchrun", 2, 4, 0)),
        ({**by_hand(2, 4), "LOCAL_RANK": "2"}, ("torchrun", 2, 4, 2)),
        (ELASTIC, ("torchrun", 5, 8, 1)),
        (ompi(3, 4, 1), ("openmpi", 3, 4, 1)),
        ({**ompi(3, 4, 1), **by_hand(3, 4)}, ("openmpi", 3, 4, 1)),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, ("mpich", 1, 4, 1)),
        (SLURM, ("slurm", 5, 8, 1)),
        # The step is smaller than the allocation.
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "6"}, ("slurm", 5, 6, 1)),
        # sbatch's and salloc's own shells are one process.
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, ("none", 0, 1, 0)),
        ({**SLURM, "SLURM_STEP_ID": "4294967290"}, ("none", 0, 1, 0)),
        # The inner launcher counts: srun started one torchrun agent, or one MPI daemon, on each host.
        ({**SLURM, **ELASTIC, "SLURM_PROCID": "0"}, ("torchrun", 5, 8, 1)),
        ({**ompi(1, 2, 0), **ELASTIC}, ("torchrun", 5, 8, 1)),
        ({**SLURM, **ompi(3, 4, 1)}, ("openmpi", 3, 4, 1)),
    ],
)
def test_every_launcher_is_read(env: dict[str, str], expected: tuple[str, int, int, int]):
    assert place(env) == expected
    assert likely_rank(env) == expected[1]


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({**ompi(3, 4, 1), **by_hand(0, 4)}, "RANK=0 contradicts OMPI_COMM_WORLD_RANK=3"),
        ({**ompi(3, 4, 1), **by_hand(3, 8)}, "WORLD_SIZE=8 contradicts OMPI_COMM_WORLD_SIZE=4"),
        (
            {**ompi(3, 4, 1), **by_hand(3, 4), "LOCAL_RANK": "3"},
            "LOCAL_RANK=3 contradicts OMPI_COMM_WORLD_LOCAL_RANK=1",
        ),
        ({**SLURM, **by_hand(0, 8)}, "RANK=0 contradicts SLURM_PROCID=5"),
        ({**ompi(3, 4, 1), "PMI_RANK": "2", "PMI_SIZE": "4"}, "PMI_RANK=2 contradicts OMPI_COMM_WORLD_RANK=3"),
        ({"RANK": "1"}, "expected both RANK and WORLD_SIZE, got RANK=1 without WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "expected both RANK and WORLD_SIZE, got WORLD_SIZE=2 without RANK"),
        ({"PMI_SIZE": "2"}, "expected both PMI_RANK and PMI_SIZE, got PMI_SIZE=2 without PMI_RANK"),
        (by_hand(4, 4), "RANK must be below WORLD_SIZE, got RANK=4 and WORLD_SIZE=4"),
        (by_hand(0, 0), "RANK must be below WORLD_SIZE, got RANK=0 and WORLD_SIZE=0"),
        (by_hand("one", 4), "RANK must be a non-negative integer, got 'one'"),
        (by_hand(-1, 4), "RANK must be a non-negative integer, got '-1'"),
        (by_hand("", 4), "RANK must be a non-negative integer, got ''"),
        (by_hand("²", 4), "RANK must be a non-negative integer, got '²'"),
        (
            {**ELASTIC, "LOCAL_WORLD_SIZE": "1"},
            "LOCAL_RANK must be below the number of processes on its host, 1, got 1",
        ),
        ({**by_hand(0, 1), "MASTER_PORT": "70000"}, "MASTER_PORT must be in [1, 65535], got 70000"),
        ({**by_hand(0, 1), "MASTER_PORT": "tcp"}, "MASTER_PORT must be a non-negative integer, got 'tcp'"),
    ],
)
def test_contradictions_are_refused_with_both_values(env: dict[str, str], sentence: str):
    with pytest.raises(ConfigError) as caught:
        launch_from_env(env)
    assert str(caught.value).startswith(sentence)


def test_the_likely_rank_never_raises():
    assert likely_rank({**ompi(3, 4, 1), **by_hand(0, 4)}) == 3
    assert likely_rank({"RANK": "x"}) == 0
    assert likely_rank({**ELASTIC, "OMPI_COMM_WORLD_RANK": "0"}) == 5


@pytest.mark.parametrize(
    ("env", "address"),
    [
        ({}, "127.0.0.1"),
        ({**ompi(1, 2, 1), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "127.0.0.1"),
        ({**ompi(1, 2, 0), "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, ""),
        ({**ompi(1, 2, 0), "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "head"}, "head"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[03-04]"}, "gpu03"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_STEP_NODELIST": "gpu03"}, "127.0.0.1"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "5,3", "SLURM_JOB_NODELIST": "a1,a2"}, "a1"),
        ({**SLURM, "SLURM_JOB_NODELIST": "r[1,3]-ib,x"}, "r1-ib"),
    ],
)
def test_where_rank_zero_is(env: dict[str, str], address: str):
    assert launch_from_env(env).master_addr == address


def test_two_slurm_jobs_use_different_ports():
    ports = {launch_from_env({**SLURM, "SLURM_JOB_ID": str(job)}).master_port for job in range(20)}
    assert len(ports) > 15 and all(29500 <= port < 30500 for port in ports)
    assert launch_from_env({**SLURM, "MASTER_PORT": "1234"}).master_port == 1234


def test_local_ranks_used_as_ranks_are_found():
    check_unique([2, 0, 1], 3)
    with pytest.raises(ConfigError, match=r"got duplicate ranks \[0, 1\] in \[0, 1, 0, 1\]"):
        check_unique([0, 1, 0, 1], 4)
    with pytest.raises(ConfigError, match=r"expected ranks 0 to 3, got \[0, 1, 3\]; missing \[2\]"):
        check_unique([0, 1, 3], 4)


def test_devices():
    third = Launch(rank=3, world_size=4, local_rank=3)
    assert device_index(third, 4) == 3
    assert device_index(third, 1) == 0  # the launcher shows each process its own
    with pytest.raises(ConfigError, match="rank 3 needs device 3 of its host, which has 2"):
        device_index(third, 2)
    if not torch.cuda.is_available():
        assert local_device(third) == torch.device("cpu")


def test_a_world_of_one_needs_no_address_and_no_port():
    init_process_group(Launch(master_addr="", master_port=1), device_type="cpu", timeout_seconds=30)
    try:
        total = torch.ones(2)
        dist.all_reduce(total)
        assert dist.get_world_size() == 1 and total.tolist() == [1.0, 1.0]
    finally:
        shutdown()
    assert not dist.is_initialized()
    shutdown()  # nothing left: no error


@pytest.mark.parametrize(
    ("launch", "device_type", "sentence"),
    [
        (Launch(world_size=2, master_addr=""), "cpu", "MASTER_ADDR must name rank 0's host for 2 ranks"),
        (Launch(), "tpu", "device type must be 'cpu' or 'cuda', got 'tpu'"),
    ],
)
def test_process_groups_that_cannot_be(launch: Launch, device_type: str, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        init_process_group(launch, device_type=device_type, timeout_seconds=1)
    assert not dist.is_initialized()


RANK_PROGRAM = """
import torch, torch.distributed as dist
from moe_runtime.comm.bootstrap import check_unique, init_process_group, launch_from_env, shutdown
from moe_runtime.core.env import environment
launch = launch_from_env(environment())
init_process_group(launch, device_type="cpu", timeout_seconds=60)
ranks = [None] * launch.world_size
dist.all_gather_object(ranks, launch.rank)
check_unique(ranks, launch.world_size)
print(launch.launcher, ranks)
shutdown()
"""


def test_two_mpi_ranks_meet_without_a_warning():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(2):
        variables = {**ompi(rank, 2, rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": str(port)}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-W", "error", "-c", RANK_PROGRAM],
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in processes:
        out, err = process.communicate(timeout=90)
        assert (process.returncode, out, err) == (0, "openmpi [0, 1]\n", "")


def test_each_start_has_keys_of_its_own_in_a_store_that_outlives_it() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))

    def start(slow: int, rank: int) -> str:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=30))
        time.sleep(0.3 if rank == slow else 0.0)
        return fresh_prefix(store, Launch(rank=rank, world_size=3), timeout_seconds=30)

    names = []
    for slow in (0, 1, 2):  # words of the start before are there while a rank is late
        with ThreadPoolExecutor(3) as pool:
            found = set(pool.map(start, [slow] * 3, range(3)))
        assert len(found) == 1
        names += found
    assert len(set(names)) == 3


def test_a_rank_that_does_not_start_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not come within 0.2 s"):
        fresh_prefix(dist.HashStore(), Launch(rank=0, world_size=2), timeout_seconds=0.2)
