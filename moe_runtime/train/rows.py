"""JSON lines of a run, one object a step: strict JSON, never a part of a line, and no step twice after a resume."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def json_number(value: float | int) -> float | int | str:
    """JSON has no NaN or infinity: "NaN", "Infinity" and "-Infinity" stand for them, which `float` reads."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def drop_rows_after(path: Path, step: int) -> None:
    """Keep the rows of steps <= `step`, in place of the old file at once; a line cut short by a kill goes too."""
    kept: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["step"] <= step:
            kept.append(line + "\n")
    replace_file(path, "".join(kept).encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` beside `path` and move it there: a reader sees the old file or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class RowsFile:
    """Rows of some steps of a run, in a file that exists from the first row on; only the main rank writes.

    resumed_step  rows of later steps, which this run will see again, are dropped; None for a new run
    """

    def __init__(self, path: Path, *, is_main: bool, resumed_step: int | None) -> None:
        self._path, self._is_main = path, is_main
        if is_main and resumed_step is not None and path.exists():
            drop_rows_after(path, resumed_step)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row; its "step" is an int, its numbers are finite or passed through `json_number`."""
        if self._is_main:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
