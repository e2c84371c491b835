"""What experts cost to store: the numbers that the documentation gives."""

import json
import sys
from math import prod
from typing import Any

import pytest
import torch

from moe_runtime.bench import storage
from moe_runtime.tensor import QuantizedTensor

SHAPE = (4, 256, 384)
CPU = torch.device("cpu")
# Bytes a parameter; then bytes a member that come on top.
EXPECTED = {
    ("bf16", "the values"): (2.0, 0),
    ("mxfp8", "both directions"): (2.0625, 0),
    ("mxfp8", "row-wise only"): (1.03125, 0),
    ("nvfp4 2d", "both directions"): (1 + 2 / 256, 8),
    ("nvfp4 2d", "row-wise only"): (0.5 + 1 / 256, 4),
    ("nvfp4 1d", "both directions"): (1.125, 8),
    ("nvfp4 1d", "row-wise only"): (0.5625, 4),
    ("float8", "both directions"): (2.0, 4),
    ("float8", "row-wise only"): (1.0, 4),
    ("fp8_block", "both directions"): (2 * (1 + 4 / 16384), 0),
    ("fp8_block", "row-wise only"): (1 + 4 / 16384, 0),
    ("mxfp4", "row-wise only"): (0.53125, 0),
}


def test_every_format_and_option_costs_what_it_should() -> None:
    measured = {(name, how): storage.measure(name, how, build, SHAPE, CPU) for name, how, build in storage.storages()}
    assert measured.keys() == EXPECTED.keys()
    for key, (each, member) in EXPECTED.items():
        assert measured[key].bytes_held == prod(SHAPE) * each + SHAPE[0] * member, key
        assert measured[key].bytes_formula == measured[key].bytes_held and measured[key].bytes_allocated is None


def test_bytes_that_are_not_the_formulas_end_the_run() -> None:
    """A high-precision copy that somebody keeps, a format that pads: both are seen."""
    build = {name: build for name, _, build in storage.storages()}["mxfp8"]

    def padded(shape: Any, device: torch.device) -> Any:
        weight = build(shape, device)
        assert isinstance(weight, QuantizedTensor)
        weight.records.any.payload.untyped_storage().resize_(2 * prod(shape))
        return weight

    with pytest.raises(RuntimeError, match=r"mxfp8, padded: expected the formula's .* bytes, got"):
        storage.measure("mxfp8", "padded", padded, SHAPE, CPU)


def test_lines_and_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["storage", "--shape", "4", "256", "384", "--device", "cpu"])
    storage.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(row["name"], row["stored"]) for row in rows] == list(EXPECTED)
    assert all(row["bytes_held"] == row["bytes_formula"] and row["bench"] == "storage" for row in rows)
    assert lines[-1].startswith("| mxfp4 | row-wise only | 0.53125 | 26.6% |")
    assert sum(line.startswith("| ") for line in lines) == 1 + len(EXPECTED)
