"""The doctor's report: complete, on rank 0 only, and quiet about what is not there."""

import importlib.metadata
import platform
from typing import Any

import pytest
import torch

from moe_runtime.cli import doctor as doctor_module
from moe_runtime.cli.doctor import OPTIONAL_PACKAGES, doctor, torch_note
from moe_runtime.kernels.select import NativeStatus, Selection


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


def test_the_report_names_everything(capsys: pytest.CaptureFixture[str]):
    assert doctor() == 0
    out = capsys.readouterr().out
    for word in (
        platform.python_version(),
        torch.__version__,
        "kernels on cpu",
        "gloo",
        "nccl",
        "mpi",
        *OPTIONAL_PACKAGES,
    ):
        assert word in out
    assert "moe_runtime._C" in out


def test_choices_and_refusals_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    reason = "native: takes float32 or bfloat16, got float64 " + "and more words " * 6
    selections = [Selection("swiglu", "reference", [reason]), Selection("route", "native", [])]
    monkeypatch.setattr(doctor_module, "describe", lambda device: selections)
    monkeypatch.setattr(doctor_module, "native_status", lambda: NativeStatus(False, "not built; [build] it"))
    assert doctor() == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"swiglu reference {reason.strip()}" in out and "route native first choice" in out
    assert "not built; [build] it" in out


def test_it_works_when_nothing_optional_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(doctor_module.dist, "is_available", lambda: False)
    assert doctor() == 0
    out = capsys.readouterr().out
    assert out.count("not installed") == len(OPTIONAL_PACKAGES) and "not built into this torch" in out


def test_other_ranks_print_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert doctor() == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("version", "device_type", "note"),
    [
        ("2.13.0+cpu", "cpu", None),
        ("2.11.1+cu128", "cuda", None),
        ("2.12.0", "cpu", "torch 2.12 on cpu is not tested (tested: 2.13 on cpu)"),
        ("2.13.0", "cuda", "torch 2.13 on cuda is not tested (tested: 2.11 on cuda)"),
        ("2.10.0", "cpu", "torch 2.10.0 is outside the supported range 2.11 to 2.14"),
        ("2.15.0a0+git", "cpu", "torch 2.15.0a0+git is outside the supported range 2.11 to 2.14"),
        ("3.0", "cuda", "torch 3.0 is outside the supported range 2.11 to 2.14"),
        ("local", "cpu", "torch local: cannot tell its version"),
    ],
)
def test_the_note_on_torch(version: str, device_type: str, note: Any):
    assert torch_note(version, device_type) == note
