"""The watchdog of a run, and what hears of its phases besides."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import nn

from moe_runtime.comm.layout import ParallelLayout
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
    timeout_seconds: float = 0.0

    def begin(self, phase: Phase, step: int) -> None:
        """`phase` of `step` starts."""
        for listener in filter(None, (self.watchdog, self.observer)):
            listener.begin(phase, step)

    def end(self, phase: Phase, step: int) -> None:
        """It is over."""
        for listener in filter(None, (self.observer, self.watchdog)):
            listener.end(phase, step)

    def name_layers(self, model: nn.Module, layout: ParallelLayout) -> None:
        """Exchanges of `model` are named by their layers in reports from now on."""
        if self.watchdog is None or layout.expert_group is None:
            return
        group = None
        if layout.expert == layout.world and dist.get_backend(layout.expert_group) == "gloo":
            # A mesh over all ranks takes the default group, where FSDP2 and DDP are too. In a group of its own an
            # exchange can meet another one only, never a gather of weights, whose size would abort the process.
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_seconds))
            assert isinstance(group, dist.ProcessGroup)
        watch_exchanges(model, self.watchdog, group=group)


@contextmanager
def watched(config: Config, folder: Path, observer: PhaseObserver | None) -> Iterator[Watch]:
    """Watch this rank while the body runs, if there are ranks and the configuration does not refuse it."""
    if not (config.watchdog.enabled and dist.is_initialized()):
        yield Watch(observer=observer)
        return
    with attach(_deadlines(config), folder / REPORTS) as watchdog:
        yield Watch(watchdog=watchdog, observer=observer, timeout_seconds=config.parallel.timeout_seconds)


def _deadlines(config: Config) -> Deadlines:
    timeout = config.parallel.timeout_seconds
    step, save = config.watchdog.step_deadline(timeout), config.watchdog.save_deadline(timeout)
    return Deadlines(collective=step, phases={phase: save if phase in _LONG_PHASES else step for phase in PHASES})
