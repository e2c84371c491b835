"""One of three watched ranks that exchange rows, in a process of its own: python watched_rank.py CASE RANK FOLDER."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moe_runtime.comm import all_to_all
from moe_runtime.comm.all_to_all import Exchange
from moe_runtime.comm.watch import Site
from moe_runtime.comm.watchdog import Deadlines, Watchdog, attach

WORLD, FAULTY = 3, 2
LAYERS = ("layers.0.mlp", "layers.1.mlp")
DEADLINES = Deadlines(collective=3.0, phases={"forward": 5.0, "backward": 2.0}, grace=4.0, warm_up=1.0)


def exchange(watchdog: Watchdog, layer: int, *, unexpected: int = 0) -> None:
    """Two rows to each rank; `unexpected` more are expected from the first one."""
    group = dist.group.WORLD
    assert group is not None
    receive = (2 + unexpected, 2, 2)
    site = Site(layers=LAYERS, index=layer, watch=watchdog)
    one = Exchange(group=group, send_rows=(2, 2, 2), receive_rows=receive, site=site)
    one.launch(torch.ones(6, 4), reverse=False)
    one.finish()


def train(watchdog: Watchdog, case: str, rank: int) -> None:
    """One healthy step, and one in which the faulty rank does what the case says."""
    for step in (1, 2):
        faulty = step == 2 and rank == FAULTY
        watchdog.begin("forward", step)
        exchange(watchdog, 0)
        if step == 2:
            time.sleep(5 * DEADLINES.interval)  # every rank has said where it is
        if faulty and case == "late":
            time.sleep(60)
        if faulty and case == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if faulty and case == "error":
            raise KeyError("no such batch")
        if faulty and case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if not (faulty and case == "skipped"):
            exchange(watchdog, 1, unexpected={"sizes": 1, "unseen sizes": -1}.get(case, 0) if faulty else 0)
        watchdog.end("forward", step)
        watchdog.begin("backward", step)
        exchange(watchdog, 1)
        if step == 2 and case == "phase":
            time.sleep(60)
        watchdog.end("backward", step)


def main() -> None:
    case, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if case == "unseen sizes":
        all_to_all._compare = lambda *args, **options: None
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{sys.argv[4]}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=30)
    )
    with attach(DEADLINES, folder) as watchdog:
        train(watchdog, case, rank)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
