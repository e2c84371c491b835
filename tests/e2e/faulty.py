"""The command line with faults planted: FAULTS holds a list of them as JSON, each of which happens once.

rank, step     where; rank -1 is any
where          a phase, or "exchange": right after rows were sent on their way
action         "kill" or "stop" this process, "mark" (go on; the harness sees the file), "skip" an exchange, "sizes"
seconds        after that place was reached
once           a file that is made when it happens
"""

import json
import os
import signal
import sys
import threading

import torch

from moe_runtime.cli import main
from moe_runtime.comm.all_to_all import Exchange
from moe_runtime.nn import RoutedExperts
from moe_runtime.train.watching import Watch

FAULTS = json.loads(os.environ["FAULTS"])
RANK = int(os.environ["RANK"])
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
steps = [0]


def claim(fault: dict) -> bool:
    try:
        os.close(os.open(fault["once"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def due(where: str) -> list[dict]:
    """Faults that happen here and now."""
    here = [f for f in FAULTS if f["where"] == where and f["step"] == steps[0] and f["rank"] in (RANK, -1)]
    return [fault for fault in here if claim(fault)]


def act(where: str) -> None:
    for fault in due(where):
        if fault["action"] in SIGNALS:
            number, seconds = SIGNALS[fault["action"]], fault.get("seconds", 0.0)
            if seconds:
                threading.Timer(seconds, os.kill, [os.getpid(), number]).start()
            else:
                os.kill(os.getpid(), number)


def begin(self, phase, step, before=Watch.begin):
    steps[0] = step
    before(self, phase, step)
    act(phase)


def launch(self, rows, *, reverse, before=Exchange.launch):
    if due("sizes"):
        object.__setattr__(self, "receive_rows", (self.receive_rows[0] + 1, *self.receive_rows[1:]))
    received = before(self, rows, reverse=reverse)
    act("exchange")
    return received


def forward(self, x_TD, *args, before=RoutedExperts.forward, **options):
    if due("skip"):
        return torch.zeros_like(x_TD)
    return before(self, x_TD, *args, **options)


Watch.begin, Exchange.launch, RoutedExperts.forward = begin, launch, forward

if __name__ == "__main__":
    sys.exit(main())
