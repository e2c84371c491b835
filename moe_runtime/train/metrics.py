"""What a run says about itself: metrics.jsonl, expert_load.bin, TensorBoard, W&B, one log line a step, a progress bar.

Every file lives in the run folder and is written by rank 0 only. A resumed run drops what was recorded after its
checkpoint, so each step stands in each file once. Measuring is the loop's business, drawing the report's.

metrics.jsonl holds one JSON object a step. JSON has no NaN or infinity, so such values are written as the strings
"NaN", "Infinity" and "-Infinity": every line stays valid JSON, and `float(value)` reads numbers and strings alike.

expert_load.bin holds one record a step of 1 + L x E little-endian int64: the step, then the tokens each expert of each
MoE layer received from the whole batch. expert_load.json gives L and E.
"""

# L MoE layers   E experts of a layer, over all ranks

import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self, TextIO

import numpy as np

from moe_runtime.core.errors import CheckpointError
from moe_runtime.core.log import get_logger
from moe_runtime.train.rows import drop_rows_after, json_number, replace_file

METRICS_FILE = "metrics.jsonl"
LOAD_FILE = "expert_load.bin"
LOAD_HEADER_FILE = "expert_load.json"
LOAD_DTYPE = np.dtype("<i8")

_GIB = 2**30
_logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One step's row. A None is left out of every output.

    `loss` is nats a token over the global batch, `memory_bytes` the peak of this step (the device's, or the process's
    on the CPU), `expert_load_max_over_mean` the largest such ratio of any layer, `mfu` a fraction of the peak.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    step_seconds: float
    memory_bytes: int
    expert_load_max_over_mean: float
    val_loss: float | None = None
    aux_loss: float | None = None
    mfu: float | None = None

    def as_row(self) -> dict[str, float | int]:
        """The measured values by name, in the order of the fields."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class MetricsWriter:
    """Writes each step's metrics wherever they are asked for; on other ranks than the main one it does nothing.

    `resumed_step` is the step of the checkpoint a resumed run continues from: rows of later steps are dropped. None
    means a new run. `wandb_run` is what `open_wandb` returned. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        is_main: bool,
        total_steps: int,
        tensorboard: bool = False,
        wandb_run: Any = None,
        resumed_step: int | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._is_main = is_main
        self._wandb_run = wandb_run
        self._load_file: BinaryIO | None = None
        self._resumed_step = resumed_step
        self._cleanup = ExitStack()
        if not is_main:
            return
        metrics_path = run_dir / METRICS_FILE
        if resumed_step is not None and metrics_path.exists():
            drop_rows_after(metrics_path, resumed_step)
        mode = "w" if resumed_step is None else "a"
        self._metrics_file: TextIO = self._cleanup.enter_context(metrics_path.open(mode, encoding="utf-8"))
        self._tensorboard = _open_tensorboard(run_dir, resumed_step) if tensorboard else None
        if self._tensorboard is not None:
            self._cleanup.callback(self._tensorboard.close)
        if wandb_run is not None:
            self._cleanup.callback(wandb_run.finish)
        self._show_line = _open_progress(self._cleanup, total_steps, resumed_step or 0)

    def write(self, metrics: StepMetrics, *, line: bool = True) -> None:
        """Record one step everywhere, flushed; `line=False` leaves out the log line, not the row."""
        if not self._is_main:
            return
        row = metrics.as_row()
        self._metrics_file.write(json.dumps({name: json_number(value) for name, value in row.items()}) + "\n")
        self._metrics_file.flush()
        values = {name: value for name, value in row.items() if name != "step"}
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, metrics.step)
            self._tensorboard.flush()
        if self._wandb_run is not None:
            self._wandb_run.log(values, step=metrics.step)
        self._show_line(metrics, line)

    def append_load(self, step: int, load_LE: np.ndarray) -> None:
        """Append one step's expert load: [L, E] integers, tokens that each expert of each layer received."""
        if not self._is_main:
            return
        if load_LE.ndim != 2 or not np.issubdtype(load_LE.dtype, np.integer):
            raise ValueError(
                f"expert load must be integers of shape [layers, experts], got {load_LE.dtype}{load_LE.shape}"
            )
        if self._load_file is None:
            opened = _open_load_file(self._run_dir, load_LE.shape, self._resumed_step)
            self._load_file = self._cleanup.enter_context(opened)
            self._load_shape = load_LE.shape
        if load_LE.shape != self._load_shape:
            raise ValueError(f"expert load must have shape {self._load_shape} in every step, got {load_LE.shape}")
        record = np.concatenate(([step], load_LE.reshape(-1))).astype(LOAD_DTYPE)
        self._load_file.write(record.tobytes())
        self._load_file.flush()

    def close(self) -> None:
        """Close every file and the progress bar; a second call does nothing."""
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def format_line(metrics: StepMetrics) -> str:
    """'step 12  loss 6.1234  grad_norm 1.23  lr 3.0e-04  tokens/s 4,321  memory 0.52 GiB  load 1.84'."""
    parts = [
        f"step {metrics.step}",
        f"loss {metrics.loss:.4f}",
        f"grad_norm {metrics.grad_norm:.2f}",
        f"lr {metrics.lr:.1e}",
        f"tokens/s {metrics.tokens_per_second:,.0f}",
        f"memory {metrics.memory_bytes / _GIB:.2f} GiB",
        f"load {metrics.expert_load_max_over_mean:.2f}",
    ]
    if metrics.mfu is not None:
        parts.append(f"mfu {metrics.mfu:.1%}")
    if metrics.aux_loss is not None:
        parts.append(f"aux_loss {metrics.aux_loss:.4f}")
    if metrics.val_loss is not None:
        parts.append(f"val_loss {metrics.val_loss:.4f}")
    return "  ".join(parts)


def max_over_mean(load_LE: np.ndarray) -> float:
    """The largest max/mean of any layer's expert load: 1 is balance, E one expert owning all; 1 where no token came."""
    mean_L = load_LE.mean(axis=1)
    ratio_L = np.divide(load_LE.max(axis=1), mean_L, out=np.ones_like(mean_L), where=mean_L > 0)
    return float(ratio_L.max(initial=1.0))


def open_wandb(run_dir: Path, *, project: str, config: Mapping[str, object]) -> Any:
    """Start, or after a resume continue, the W&B run of this run folder; call it on the main rank only."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("log.wandb = true needs the wandb package: pip install wandb") from error
    id_file = run_dir / "wandb_id"
    run_id = id_file.read_text() if id_file.exists() else None
    run = wandb.init(
        project=project, name=run_dir.name, dir=str(run_dir), config=dict(config), id=run_id, resume="allow"
    )
    id_file.write_text(run.id)
    return run


# ---- files ----


def _open_load_file(run_dir: Path, shape: tuple[int, ...], resumed_step: int | None) -> BinaryIO:
    """The load file, ready to append to: new with its header, or cut back to the records of steps <= `resumed_step`."""
    header_path, path = run_dir / LOAD_HEADER_FILE, run_dir / LOAD_FILE
    layers, experts = shape
    if resumed_step is None or not header_path.exists():
        header = {"layers": layers, "experts": experts, "dtype": "int64", "record": "step, load[layers, experts]"}
        replace_file(header_path, (json.dumps(header) + "\n").encode())
        return path.open("wb")
    header = json.loads(header_path.read_text(encoding="utf-8"))
    if (header["layers"], header["experts"]) != shape:
        raise CheckpointError(
            f"{header_path} was written for {header['layers']} layers of {header['experts']} experts, "
            f"got a model with {layers} layers of {experts}"
        )
    file = path.open("r+b" if path.exists() else "w+b")
    record_bytes = (1 + layers * experts) * LOAD_DTYPE.itemsize
    num_records = path.stat().st_size // record_bytes  # a kill can leave part of a record at the end
    steps = (_step_of_record(file, index, record_bytes) for index in reversed(range(num_records)))
    num_dropped = sum(1 for _ in itertools.takewhile(lambda step: step > resumed_step, steps))
    file.truncate((num_records - num_dropped) * record_bytes)
    file.seek(0, os.SEEK_END)
    return file


def _step_of_record(file: BinaryIO, index: int, record_bytes: int) -> int:
    file.seek(index * record_bytes)
    return int.from_bytes(file.read(LOAD_DTYPE.itemsize), "little", signed=True)


# ---- displays ----


def _open_tensorboard(run_dir: Path, resumed_step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("log.tensorboard = true needs: pip install 'moe-runtime[train]'") from error
    purge_step = None if resumed_step is None else resumed_step + 1
    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)


def _open_progress(cleanup: ExitStack, total_steps: int, first_step: int) -> Callable[[StepMetrics, bool], None]:
    """How steps are shown: log lines, with a progress bar under them where standard error is a terminal."""

    def log_line(metrics: StepMetrics, line: bool) -> None:
        if line:
            _logger.info(format_line(metrics))

    if not sys.stderr.isatty():
        return log_line
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return log_line
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, left:"),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True))
    task = progress.add_task("training", total=total_steps, completed=first_step)
    cleanup.enter_context(progress)
    # A record written past the bar would tear it; the bar's console prints above itself.
    cleanup.enter_context(_RecordsAbove(progress.console.print))

    def line_above_bar(metrics: StepMetrics, line: bool) -> None:
        log_line(metrics, line)
        progress.update(task, completed=metrics.step)

    return line_above_bar


class _RecordsAbove(logging.Handler):
    """While entered, the package's log records go through `show`, and to no other handler."""

    def __init__(self, show: Callable[..., None]) -> None:
        super().__init__()
        self._show = show
        self._package_logger = logging.getLogger("moe_runtime")

    def emit(self, record: logging.LogRecord) -> None:
        self._show(self.format(record), highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._propagated = self._package_logger.propagate
        self._package_logger.propagate = False
        self._package_logger.addHandler(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._package_logger.removeHandler(self)
        self._package_logger.propagate = self._propagated
