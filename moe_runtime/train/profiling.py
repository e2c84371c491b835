"""torch.profiler traces of chosen steps, one file a rank, and a memory snapshot when a GPU runs out of memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from moe_runtime.core.log import get_logger
from moe_runtime.train.config import ProfileConfig

_LOGGER = get_logger(__name__)


@contextmanager
def profiled(config: ProfileConfig, run_dir: Path, rank: int) -> Iterator[Callable[[], None]]:
    """Yields what to call after each step. Traces go to profile/rank<r>_trace.json.gz of the run folder."""
    with _memory_snapshot(config, run_dir, rank):
        if not config.enabled:
            yield lambda: None
            return
        folder = run_dir / "profile"
        folder.mkdir(exist_ok=True)
        path = folder / f"rank{rank}_trace.json.gz"

        def write(finished: profile) -> None:
            finished.export_chrome_trace(str(path))
            _LOGGER.info(
                "profile of steps %d to %d: %s", config.start_step, config.start_step + config.num_steps - 1, path
            )

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # One warm-up step before the first that is recorded, where there is one.
        warmup = 1 if config.start_step > 1 else 0
        steps = schedule(wait=config.start_step - 1 - warmup, warmup=warmup, active=config.num_steps, repeat=1)
        with profile(activities=activities, schedule=steps, on_trace_ready=write) as running:
            yield running.step


@contextmanager
def _memory_snapshot(config: ProfileConfig, run_dir: Path, rank: int) -> Iterator[None]:
    if not (config.memory_snapshot and torch.cuda.is_available()):
        yield
        return
    torch.cuda.memory._record_memory_history()
    try:
        yield
    except torch.OutOfMemoryError:
        path = run_dir / f"rank{rank}_out_of_memory.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        _LOGGER.warning("out of memory; what held it: %s (open it at pytorch.org/memory_viz)", path)
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
