"""Reading what the trainer wrote, and what a killed trainer left behind."""

import math
from pathlib import Path

import numpy as np
import pytest

from moe_runtime.report.read import read_load, read_metrics
from moe_runtime.train.metrics import MetricsWriter, StepMetrics


def write_run(folder: Path, steps: int, *, layers: int = 2, experts: int = 4) -> None:
    with MetricsWriter(folder, is_main=True, total_steps=steps) as writer:
        for step in range(1, steps + 1):
            writer.append_load(step, np.full((layers, experts), step))
            writer.write(
                StepMetrics(
                    step=step,
                    loss=math.nan if step == 2 else 1.0 / step,
                    grad_norm=1.0,
                    lr=0.1,
                    tokens_per_second=10.0,
                    step_seconds=1.0,
                    memory_bytes=1,
                    expert_load_max_over_mean=1.0,
                    val_loss=5.0 if step == 3 else None,
                )
            )


def test_columns_and_what_was_measured(tmp_path: Path):
    write_run(tmp_path, 4)
    metrics = read_metrics(tmp_path)
    assert metrics.step_S.tolist() == [1, 2, 3, 4]
    steps, losses = metrics.measured("loss")
    assert steps.tolist() == [1, 3, 4] and losses.tolist() == [1.0, 1 / 3, 0.25]
    assert [a.tolist() for a in metrics.measured("val_loss")] == [[3], [5.0]]
    assert [a.tolist() for a in metrics.measured("aux_loss")] == [[], []]


def test_loads(tmp_path: Path):
    write_run(tmp_path, 3)
    load = read_load(tmp_path)
    assert load is not None and load.step_S.tolist() == [1, 2, 3]
    assert load.load_SLE.shape == (3, 2, 4) and (load.load_SLE[2] == 3).all()


def test_a_run_that_is_still_being_written(tmp_path: Path):
    write_run(tmp_path, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4')
    with (tmp_path / "expert_load.bin").open("ab") as file:
        file.write(b"\0" * 9)
    load = read_load(tmp_path)
    assert read_metrics(tmp_path).step_S.tolist() == [1, 2, 3]
    assert load is not None and load.step_S.tolist() == [1, 2, 3]


def test_folders_without_a_run(tmp_path: Path):
    with pytest.raises(ValueError, match=r"expected a run folder with metrics.jsonl, got '.*' without it"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"expected at least one step in .*, got none"):
        read_metrics(tmp_path)
    assert read_load(tmp_path) is None
