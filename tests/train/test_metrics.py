"""The run folder's records: rows, expert load, resuming, the line, the terminal, TensorBoard and W&B."""

import io
import json
import logging
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_runtime.core.errors import CheckpointError
from moe_runtime.train.metrics import MetricsWriter, StepMetrics, format_line, max_over_mean, open_wandb

ROW = {"loss": 6.1234, "grad_norm": 1.234, "lr": 3e-4, "tokens_per_second": 4321.4, "step_seconds": 0.5}


def metrics(step: int, **changes: Any) -> StepMetrics:
    values = {**ROW, "memory_bytes": 558345748, "expert_load_max_over_mean": 1.84, **changes}
    return StepMetrics(step=step, **values)


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def loads(folder: Path, width: int) -> np.ndarray:
    return np.fromfile(folder / "expert_load.bin", dtype="<i8").reshape(-1, width)


def run(folder: Path, steps: range, *, resumed_step: int | None = None, shape: tuple[int, int] = (2, 3)) -> None:
    with MetricsWriter(folder, is_main=True, total_steps=10, resumed_step=resumed_step) as writer:
        for step in steps:
            writer.write(metrics(step, loss=float(step)))
            writer.append_load(step, np.arange(math.prod(shape)).reshape(shape) + step)


def test_one_valid_row_a_step_with_the_promised_keys(tmp_path: Path):
    with MetricsWriter(tmp_path, is_main=True, total_steps=3) as writer:
        writer.write(metrics(1))
        assert len(rows(tmp_path)) == 1  # flushed: a run that dies keeps what it had
        writer.write(metrics(2, val_loss=5.0, aux_loss=0.1, mfu=0.4), line=False)
    first, second = rows(tmp_path)
    assert list(first) == ["step", *ROW, "memory_bytes", "expert_load_max_over_mean"]
    assert first["loss"] == 6.1234 and first["memory_bytes"] == 558345748
    assert {"val_loss", "aux_loss", "mfu"} == second.keys() - first.keys()


def test_what_is_not_finite_is_kept_as_text_that_float_reads(tmp_path: Path):
    with MetricsWriter(tmp_path, is_main=True, total_steps=3) as writer:
        writer.write(metrics(1, loss=math.nan, grad_norm=math.inf, lr=-math.inf))
    (row,) = rows(tmp_path)  # fails on a bare NaN or Infinity
    assert (row["loss"], row["grad_norm"], row["lr"]) == ("NaN", "Infinity", "-Infinity")
    assert math.isnan(float(row["loss"])) and float(row["lr"]) == -math.inf


def test_the_load_file_holds_step_and_counts(tmp_path: Path):
    run(tmp_path, range(1, 3))
    assert json.loads((tmp_path / "expert_load.json").read_text()).items() >= {"layers": 2, "experts": 3}.items()
    assert loads(tmp_path, 7).tolist() == [[1, 1, 2, 3, 4, 5, 6], [2, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize("resumed_step", [1, 3, 5, 9])
def test_a_resumed_run_has_each_step_once(tmp_path: Path, resumed_step: int):
    run(tmp_path, range(1, 6))
    run(tmp_path, range(resumed_step + 1, resumed_step + 3), resumed_step=resumed_step)
    kept = [step for step in range(1, 6) if step <= resumed_step]
    expected = [*kept, resumed_step + 1, resumed_step + 2]
    assert [row["step"] for row in rows(tmp_path)] == expected
    assert loads(tmp_path, 7)[:, 0].tolist() == expected
    assert not list(tmp_path.glob("*.partial"))


def test_a_kill_in_the_middle_of_a_write_is_repaired(tmp_path: Path):
    run(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    with (tmp_path / "expert_load.bin").open("ab") as file:
        file.write(b"\1" * 20)
    run(tmp_path, range(3, 5), resumed_step=2)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    assert loads(tmp_path, 7)[:, 0].tolist() == [1, 2, 3, 4]


def test_a_new_run_starts_both_files_anew(tmp_path: Path):
    run(tmp_path, range(1, 4))
    run(tmp_path, range(1, 3), shape=(1, 4))
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    assert loads(tmp_path, 5)[:, 0].tolist() == [1, 2]


def test_a_resume_into_an_empty_folder_just_goes_on(tmp_path: Path):
    run(tmp_path, range(4, 6), resumed_step=3)
    assert [row["step"] for row in rows(tmp_path)] == loads(tmp_path, 7)[:, 0].tolist() == [4, 5]


def test_loads_of_another_shape_are_refused(tmp_path: Path):
    run(tmp_path, range(1, 3))
    with pytest.raises(CheckpointError, match="written for 2 layers of 3 experts, got a model with 2 layers of 4"):
        run(tmp_path, range(2, 3), resumed_step=1, shape=(2, 4))
    with MetricsWriter(tmp_path, is_main=True, total_steps=3) as writer:
        writer.append_load(1, np.ones((2, 3), dtype=np.int32))
        with pytest.raises(ValueError, match=r"must have shape \(2, 3\) in every step, got \(3, 2\)"):
            writer.append_load(2, np.ones((3, 2), dtype=np.int64))
        with pytest.raises(ValueError, match=r"must be integers of shape \[layers, experts\], got float64\(2, 3\)"):
            writer.append_load(2, np.ones((2, 3)))


def test_other_ranks_write_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    with MetricsWriter(tmp_path, is_main=False, total_steps=3, tensorboard=True) as writer:
        writer.write(metrics(1))
        writer.append_load(1, np.ones((2, 3), dtype=np.int64))
    assert list(tmp_path.iterdir()) == [] and caplog.records == []


def test_the_line():
    line = "step 12  loss 6.1234  grad_norm 1.23  lr 3.0e-04  tokens/s 4,321  memory 0.52 GiB  load 1.84"
    assert format_line(metrics(12)) == line
    more = format_line(metrics(12, mfu=0.4321, aux_loss=0.12344, val_loss=5.0))
    assert more == line + "  mfu 43.2%  aux_loss 0.1234  val_loss 5.0000"


def test_lines_are_logged_when_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    with MetricsWriter(tmp_path, is_main=True, total_steps=3) as writer:
        writer.write(metrics(1))
        writer.write(metrics(2), line=False)
    assert [record.getMessage().split("  ")[0] for record in caplog.records] == ["step 1"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_lines_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    package_logger = logging.getLogger("moe_runtime")
    before = (package_logger.propagate, list(package_logger.handlers), package_logger.level)
    package_logger.setLevel(logging.INFO)
    try:
        with MetricsWriter(tmp_path, is_main=True, total_steps=7) as writer:
            writer.write(metrics(1))
            package_logger.warning("a [bold]word[/bold]")
    finally:
        package_logger.setLevel(before[2])
    shown = terminal.getvalue()
    assert "step 1  loss 6.1234" in shown and "1/7" in shown and "a [bold]word[/bold]" in shown
    assert (package_logger.propagate, package_logger.handlers, package_logger.level) == before


def test_no_bar_without_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with MetricsWriter(tmp_path, is_main=True, total_steps=7) as writer:
        writer.write(metrics(1))
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("load", "ratio"),
    [
        ([[4, 4, 4, 4]], 1.0),
        ([[0, 0, 16, 0], [4, 4, 4, 4]], 4.0),
        ([[0, 0, 0, 0], [1, 1, 1, 3]], 2.0),
        ([[0, 0]], 1.0),
        (np.zeros((0, 4)), 1.0),
    ],
)
def test_max_over_mean(load: Any, ratio: float):
    assert max_over_mean(np.asarray(load, dtype=np.int64)) == ratio


def test_tensorboard_holds_the_scalars_once_after_a_resume(tmp_path: Path):
    for first, resumed_step in ((1, None), (3, 2)):
        with MetricsWriter(
            tmp_path, is_main=True, total_steps=4, tensorboard=True, resumed_step=resumed_step
        ) as writer:
            for step in range(first, first + 3):
                writer.write(metrics(step, loss=float(first * step), val_loss=1.0 if step == 2 else None))
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"loss", "val_loss", "lr", "expert_load_max_over_mean"} <= set(events.Tags()["scalars"])
    assert {event.step: event.value for event in events.Scalars("loss")} == {1: 1.0, 2: 2.0, 3: 9.0, 4: 12.0, 5: 15.0}
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5]


class FakeWandb(ModuleType):
    """wandb with only what is called; it keeps the calls."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[Any] = []

    def init(self, **arguments: Any) -> SimpleNamespace:
        self.calls.append(arguments)
        return SimpleNamespace(
            id=arguments["id"] or "made-up",
            log=lambda values, step: self.calls.append((step, values)),
            finish=lambda: self.calls.append("finished"),
        )


def test_wandb_gets_every_step_and_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    wandb_run = open_wandb(tmp_path, project="p", config={"a": 1})
    with MetricsWriter(tmp_path, is_main=True, total_steps=4, wandb_run=wandb_run) as writer:
        writer.write(metrics(1))
    started, logged, finished = fake.calls
    assert started["id"] is None and started["project"] == "p" and started["config"] == {"a": 1}
    assert logged[0] == 1 and logged[1]["loss"] == 6.1234 and "step" not in logged[1] and finished == "finished"
    open_wandb(tmp_path, project="p", config={})
    assert fake.calls[-1]["id"] == "made-up" and fake.calls[-1]["resume"] == "allow"


def test_missing_wandb_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="needs the wandb package: pip install wandb"):
        open_wandb(tmp_path, project="p", config={})
