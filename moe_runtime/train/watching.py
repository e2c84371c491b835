"""The watchdog of a run, and what hears of its phases besides."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import nn

from moe_runtime.comm.watchdog import Deadlines, Watchdog, attach
from moe_runtime.nn import watch_exchanges
from moe_runtime.train.config import Config
from moe_runtime.train.phases import PHASES, Phase, PhaseObserver

REPORTS = "reports"
_LONG_PHASES: tuple[Phase, ...] = ("save", "validate")


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Hands each phase of this rank to the watchdog and to another observer, where there are such."""

    watchdog: Watchdog | None = None
    observer: PhaseObserver | None = None

    def begin(self, phase: Phase, step: int) -> None:
        """`phase` of `step` starts."""
        for listener in filter(None, (self.watchdog, self.observer)):
            listener.begin(phase, step)

    def end(self, phase: Phase, step: int) -> None:
        """It is over."""
        for listener in filter(None, (self.observer, self.watchdog)):
            listener.end(phase, step)

    def name_layers(self, model: nn.Module) -> None:
        """Exchanges of `model` are named by their layers in reports from now on."""
        watch_exchanges(model, self.watchdog)


@contextmanager
def watched(config: Config, folder: Path, observer: PhaseObserver | None) -> Iterator[Watch]:
    """Watch this rank while the body runs, if there are ranks and the configuration does not refuse it."""
    if not (config.watchdog.enabled and dist.is_initialized()):
        yield Watch(observer=observer)
        return
    with attach(_deadlines(config), folder / REPORTS) as watchdog:
        yield Watch(watchdog=watchdog, observer=observer)


def _deadlines(config: Config) -> Deadlines:
    timeout = config.parallel.timeout_seconds
    step, save = config.watchdog.step_deadline(timeout), config.watchdog.save_deadline(timeout)
    return Deadlines(collective=step, phases={phase: save if phase in _LONG_PHASES else step for phase in PHASES})
