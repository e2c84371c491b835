"""Which rank holds the others up: every rank's seconds in each phase, gathered every so many steps.

A rank that is slow waits least: the clock shows the same seconds on all of them, and the time that its thread computed,
or that it spent in a phase without collectives ("data"), shows which one it is.
"""

# W ranks   Q phases

from pathlib import Path
from statistics import median_low

import torch
import torch.distributed as dist

from moe_runtime.core.log import get_logger
from moe_runtime.train.phases import PHASES, Phase, PhaseSeconds
from moe_runtime.train.rows import RowsFile

FILE = "phases.jsonl"
# A rank is called slow in a phase that took it so many times the median, and so large a share of the time.
SLOW_RATIO, SLOW_SHARE = 1.5, 0.05

_LOGGER = get_logger(__name__)


class SlowRanks:
    """Rows of phases.jsonl: {"step", "steps", "seconds": {phase: [of each rank]}, "busy_seconds": the same}."""

    def __init__(self, folder: Path, *, is_main: bool, resumed_step: int | None) -> None:
        self._rows = RowsFile(folder / FILE, is_main=is_main, resumed_step=resumed_step)
        self._is_main = is_main

    def record(self, step: int, steps: int, spent: dict[Phase, PhaseSeconds]) -> None:
        """Gather what each rank spent in the `steps` steps up to `step`, write it, say who was slow. A collective."""
        own_Q = torch.tensor([*(spent[phase].wall for phase in PHASES), *(spent[phase].busy for phase in PHASES)])
        every_WQ = [own_Q]
        if dist.is_initialized():
            every_WQ = [torch.empty_like(own_Q) for _ in range(dist.get_world_size())]
            dist.all_gather(every_WQ, own_Q)
        if not self._is_main:
            return
        columns = torch.stack(every_WQ).T.double().tolist()
        seconds = dict(zip(PHASES, columns[: len(PHASES)], strict=True))
        busy_seconds = dict(zip(PHASES, columns[len(PHASES) :], strict=True))
        self._rows.append(
            {
                "step": step,
                "steps": steps,
                "seconds": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
                "busy_seconds": {name: [round(value, 4) for value in values] for name, values in busy_seconds.items()},
            }
        )
        for sentence in slow(seconds, busy_seconds):
            _LOGGER.warning("steps %d to %d: %s", step - steps + 1, step, sentence)


def slow(seconds: dict[Phase, list[float]], busy_seconds: dict[Phase, list[float]]) -> list[str]:
    """One sentence a phase in which one rank spent far more time than the median, given by phase and rank."""
    total = max(sum(values[rank] for values in seconds.values()) for rank in range(len(seconds["data"])))
    sentences = []
    for phase in PHASES:
        values = seconds[phase] if phase == "data" else busy_seconds[phase]
        worst, middle = max(values), median_low(values)
        if len(values) > 1 and worst > SLOW_RATIO * middle and worst - middle > SLOW_SHARE * total:
            sentences.append(
                f"rank {values.index(worst)} spent {worst:.2f} s in {phase!r}, the median rank {middle:.2f} s"
            )
    return sentences
