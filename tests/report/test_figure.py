"""report.png: it is drawn for every kind of run, and the numbers under its heat maps are right."""

import sys
from pathlib import Path

import numpy as np
import pytest

from moe_runtime.report import write_report
from moe_runtime.report.figure import _imbalance, _over_mean, _running_mean
from moe_runtime.train.metrics import MetricsWriter, StepMetrics

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(folder: Path, losses: list[float], loads: list[np.ndarray]) -> None:
    with MetricsWriter(folder, is_main=True, total_steps=len(losses)) as writer:
        for step, loss in enumerate(losses, start=1):
            writer.write(
                StepMetrics(
                    step=step,
                    loss=loss,
                    grad_norm=10.0**step if step < 9 else float("inf"),
                    lr=1e-3 / step,
                    tokens_per_second=1000.0 + step,
                    step_seconds=0.1,
                    memory_bytes=2**30,
                    expert_load_max_over_mean=1.0,
                    val_loss=loss if step % 3 == 0 else None,
                )
            )
        for step, load in enumerate(loads, start=1):
            writer.append_load(step, load)


def shape_of(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(PNG)
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])


def test_a_whole_run(tmp_path: Path):
    rng = np.random.default_rng(0)
    write_run(tmp_path, [8.0 / step for step in range(1, 61)], [rng.integers(0, 99, (3, 8)) for _ in range(60)])
    path = write_report(tmp_path)
    width, height = shape_of(path)
    assert path == tmp_path / "report.png" and width > 1000 and height > 1000
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("losses", "loads"),
    [
        ([5.0], []),
        ([float("nan")], [np.zeros((1, 1), dtype=np.int64)]),
        ([float("inf"), 2.0, float("nan")] * 20, [np.array([[0, 0, 0, 50]])]),
    ],
    ids=["one_step", "nothing_finite", "one_owner"],
)
def test_runs_with_little_to_show(tmp_path: Path, losses: list[float], loads: list[np.ndarray]):
    write_run(tmp_path, losses, loads)
    shape_of(write_report(tmp_path))


def test_imbalance_by_layer_and_step():
    load_SLE = np.array([[[4, 4, 4, 4], [16, 0, 0, 0]], [[8, 8, 0, 0], [0, 0, 0, 0]]])
    assert _imbalance(load_SLE, 10).tolist() == [[1.0, 2.0], [4.0, 1.0]]
    assert _imbalance(load_SLE, 1).tolist() == [[1.5], [2.5]]
    assert _imbalance(np.ones((1000, 2, 4)), 600).shape == (2, 600)
    assert _over_mean(np.array([[1.0, 3.0], [0.0, 0.0]])).tolist() == [[0.5, 1.5], [1.0, 1.0]]


def test_the_running_mean_keeps_constants_and_skips_what_is_not_finite():
    assert np.allclose(_running_mean(np.full(200, 3.0)), 3.0)
    values = np.array([1.0, np.inf, 3.0, 5.0])
    assert _running_mean(values).tolist() == [1.0, 2.0, 4.0, 4.0]


def test_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'moe-runtime\[train\]'"):
        write_report(tmp_path)
