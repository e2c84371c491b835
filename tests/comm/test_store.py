"""The store that rank 0 serves where no agent does: on one address only, and deaf to strangers."""

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moe_runtime.comm.bootstrap import Launch, _listen
from moe_runtime.core.errors import ConfigError

RANK = """
import sys
import torch
import torch.distributed as dist
from moe_runtime.comm.bootstrap import Launch, init_process_group, shutdown
rank, port = int(sys.argv[1]), int(sys.argv[2])
launch = Launch(rank=rank, world_size=2, local_rank=rank, local_world_size=2, master_port=port)
init_process_group(launch, device_type="cpu", timeout_seconds=60)
for turn in range(3):
    if rank == 0:
        print("turn", flush=True)
        sys.stdin.readline()
    value = torch.ones(3)
    dist.all_reduce(value)
    dist.distributed_c10d._get_default_store().set(f"turn{turn}/{rank}", "here")
    print(value.tolist(), flush=True)
shutdown()
"""
GARBAGE = [b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"\xff" * 70_000]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _listening(port: int) -> set[str]:
    """Addresses, as /proc writes them, on which `port` is open."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {fields[1].split(":")[0] for fields in lines if fields[1].endswith(f":{port:04X}") and fields[3] == "0A"}


def test_garbage_from_a_stranger_leaves_the_run_unharmed() -> None:
    port = _free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    main = ranks[0]
    assert main.stdout is not None and main.stdin is not None
    strangers = []
    for garbage in GARBAGE:
        while (line := main.stdout.readline()) != "turn\n":
            assert line, "rank 0 ended"
        assert _listening(port) == {"0100007F"}
        stranger = socket.create_connection(("127.0.0.1", port))
        stranger.settimeout(10)
        with contextlib.suppress(OSError):  # hung up on while still talking
            stranger.sendall(garbage)
        strangers.append(stranger)
        main.stdin.write("\n")
        main.stdin.flush()
    for process in ranks:
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert printed.splitlines()[-1] == "[2.0, 2.0, 2.0]"
    for stranger in strangers:
        stranger.close()


def test_a_name_of_the_loopback_is_not_for_other_hosts(caplog: pytest.LogCaptureFixture) -> None:
    launch = Launch(world_size=2, local_world_size=1, master_addr="localhost", master_port=_free_port())
    with _listen(launch):
        assert _listening(launch.master_port) & {"00000000", "0" * 32}
    assert "localhost is no address of this host that others can reach" in caplog.text


def test_an_address_of_another_host_is_said(caplog: pytest.LogCaptureFixture) -> None:
    launch = Launch(world_size=2, local_world_size=2, master_addr="192.0.2.1", master_port=_free_port())
    with _listen(launch):
        assert "192.0.2.1 is no address of this host" in caplog.text


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"MASTER_ADDR:MASTER_PORT = 127\.0\.0\.1:{port}: .*in use"):
            _listen(Launch(world_size=2, local_world_size=2, master_port=port))
