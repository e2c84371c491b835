"""Reading a run folder: the columns of metrics.jsonl and the records of expert_load.bin, as arrays.

The formats are described where they are written, in `moe_runtime.train.metrics`. Nothing is drawn here.
"""

# S steps   L MoE layers   E experts of a layer

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_LOAD_DTYPE = np.dtype("<i8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """The rows of metrics.jsonl: `step_S` [S] int64, and for each quantity [S] float64, NaN where not measured."""

    step_S: np.ndarray
    columns: dict[str, np.ndarray]

    def measured(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of the rows that have `name`; a value that is itself NaN stays out."""
        values_S = self.columns.get(name, np.full(len(self.step_S), np.nan))
        is_measured_S = ~np.isnan(values_S)
        return self.step_S[is_measured_S], values_S[is_measured_S]


def read_metrics(run_dir: Path) -> Metrics:
    """Every complete row of the run's metrics.jsonl; a last line that is still being written is left out."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"expected a run folder with {path.name}, got '{run_dir}' without it")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    if not rows:
        raise ValueError(f"expected at least one step in '{path}', got none")
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    return Metrics(
        step_S=np.array([row["step"] for row in rows], dtype=np.int64),
        columns={name: np.array([float(row.get(name, "nan")) for row in rows]) for name in names},
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertLoad:
    """Tokens by step, layer and expert: `step_S` [S] int64, `load_SLE` [S, L, E] int64, memory-mapped."""

    step_S: np.ndarray
    load_SLE: np.ndarray


def read_load(run_dir: Path) -> ExpertLoad | None:
    """The run's expert load, None where none was recorded; part of a record at the end is left out."""
    header_path, path = run_dir / "expert_load.json", run_dir / "expert_load.bin"
    if not (header_path.is_file() and path.is_file()):
        return None
    header = json.loads(header_path.read_text(encoding="utf-8"))
    layers, experts = header["layers"], header["experts"]
    width = 1 + layers * experts
    num_records = path.stat().st_size // (width * _LOAD_DTYPE.itemsize)
    if num_records == 0 or width == 1:
        return None
    records = np.memmap(path, dtype=_LOAD_DTYPE, mode="r", shape=(num_records, width))
    return ExpertLoad(step_S=records[:, 0], load_SLE=records[:, 1:].reshape(num_records, layers, experts))
