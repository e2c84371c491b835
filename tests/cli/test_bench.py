"""`bench`: every benchmark of the package by name, its own options passed on as they are."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_runtime.cli import lazy, main

FOLDER = Path(__file__).parents[2] / "moe_runtime" / "bench"


def test_options_reach_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    stand_in: Any = SimpleNamespace(main=lambda: seen.append(sys.argv))
    monkeypatch.setitem(sys.modules, lazy.BENCHMARKS["gemm"], stand_in)
    assert main(["bench", "gemm", "--rounds", "3", "--help", "--json=x"]) == 0
    assert seen == [["moe_runtime bench gemm", "--rounds", "3", "--help", "--json=x"]]


def test_names(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["bench"], ["bench", "--help"]):
        assert main(arguments) == 0
        assert "NAME one of checkpoint, cpu, frozen, gemm, layer, lora, overlap" in capsys.readouterr().out
    assert main(["bench", "gem"]) == 2
    assert "expected a benchmark among checkpoint, cpu, frozen, gemm, " in capsys.readouterr().err


def test_every_benchmark_has_a_name() -> None:
    runnable = {f"moe_runtime.bench.{path.stem}" for path in FOLDER.glob("*.py") if "def main()" in path.read_text()}
    assert runnable == set(lazy.BENCHMARKS.values())
