"""How the command line ends when something is wrong: one sentence on standard error, once in a whole launch."""

import sys
import time

from moe_runtime.cli.final_error import end_agent, write_final_error
from moe_runtime.comm.bootstrap import likely_rank
from moe_runtime.core.env import environment

FAILED, USAGE, INTERRUPTED = 1, 2, 130
WAIT_SECONDS = 5.0


def fail(sentence: str, *, code: int, shared: bool = True, final: bool = False) -> int:
    """Print `sentence` as one line on rank 0 and return `code`; other ranks return it after a wait.

    `final`, and every USAGE error: no restart can help, and none is tried.
    `shared=False` is for errors that may concern this rank alone (a full disk of one host): a rank other than 0 that is
    still there after the wait says its own.
    """
    rank = likely_rank(environment())
    line = " ".join(sentence.splitlines())
    final = final or code == USAGE
    if final:
        write_final_error(line)
    if rank == 0:
        print(f"moe_runtime: {line}", file=sys.stderr, flush=True)
        if final:
            end_agent()
        return code
    # Launchers stop every rank when the first one ends with an error. Rank 0 may be slower than this one: leaving now
    # could have it killed before it has printed. When it is done, the launcher ends this wait.
    time.sleep(WAIT_SECONDS)
    if not shared:
        print(f"moe_runtime: rank {rank}: {line}", file=sys.stderr, flush=True)
    if final:
        end_agent()
    return code
