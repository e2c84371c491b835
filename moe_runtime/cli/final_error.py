"""Errors that another attempt cannot cure, told to torchrun's agent: it would start the ranks again all the same.

The agent knows a failed rank's error file, shows it and reports it, but restarts whatever the file says (torch 2.11 to
2.13). So the file is written, and where restarts are left the agent is asked to end as it asks its ranks: by SIGTERM.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from moe_runtime.core import env

_AGENTS = (b"torchrun", b"torch.distributed.run", b"torch.distributed.launch")


def write_final_error(reason: str) -> None:
    """Write the agent's error file of this rank, if there is an agent: "reason", and that no restart can help."""
    path = env.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    content = {
        # torchrun prints this once for each rank, and the reason was printed once already.
        "message": "an error that no restart can cure; its sentence is above",
        "reason": reason,
        "timestamp": str(int(time.time())),
        "errorTraits": {"category": "final", "retryability": "False"},
    }
    try:
        Path(path).write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        print(f"moe_runtime: no final-error file: {error}", file=sys.stderr, flush=True)


def end_agent() -> None:
    """Ask the agent that started this process to end, where it would start it again. One rank of a host is enough."""
    if env.get("TORCHELASTIC_RUN_ID") is None or env.get("LOCAL_RANK") != "0":
        return
    allowed, done = env.get("TORCHELASTIC_MAX_RESTARTS", "0"), env.get("TORCHELASTIC_RESTART_COUNT", "0")
    agent = os.getppid()
    if int(allowed or 0) > int(done or 0) and _is_agent(agent):
        os.kill(agent, signal.SIGTERM)


def _is_agent(process: int) -> bool:
    """Whether `process` is torchrun and not something in between, which would die of the signal and stop nothing."""
    path = Path(f"/proc/{process}/cmdline")
    words = path.read_bytes().split(b"\0") if path.exists() else []
    return any(word.endswith(agent) for word in words for agent in _AGENTS)
