"""Choosing a backend: the order, the reasons, the one log line, and that a name never falls back."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_runtime.core.errors import UnsupportedError
from moe_runtime.kernels import select
from moe_runtime.kernels.combine import gather_sum
from moe_runtime.kernels.permute import gather_rows, route
from moe_runtime.kernels.select import Backend, NativeStatus, Problem, Table, native_status, never_refuses
from moe_runtime.kernels.swiglu import swiglu, swiglu_backward
from moe_runtime.kernels.tables import TABLES, describe


def refuses_with(reason: str | None) -> Callable[[Problem], str | None]:
    return lambda problem: reason


def problem(device: str = "cpu") -> Problem:
    return Problem((torch.empty(1, device=device),))


FAST = Backend("fast", never_refuses, "fast")
PICKY = Backend("picky", refuses_with("dislikes this"), "picky")
FAR = Backend("far", never_refuses, "far", device="cuda")
SLOW = Backend("slow", never_refuses, "slow")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == select.__name__ and r.levelno == logging.WARNING]


def test_the_first_that_accepts_runs(caplog: pytest.LogCaptureFixture) -> None:
    assert Table("op", (FAST, SLOW)).choose(problem()) == "fast"
    assert Table("op", (FAR, SLOW)).choose(problem()) == "slow"
    assert not warnings_of(caplog)  # FAR was never meant for the CPU: nothing is lost


def test_a_passed_over_backend_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    table = Table("logged_op", (PICKY, SLOW))
    assert [table.choose(problem()) for _ in range(3)] == ["slow"] * 3
    assert warnings_of(caplog) == ["logged_op runs on backend slow (picky: dislikes this)"]


def test_a_name_never_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    table = Table("op", (PICKY, FAR, SLOW))
    assert table.choose(problem(), "slow") == "slow"
    with pytest.raises(UnsupportedError, match=r"op cannot run on the backend asked for \(picky: dislikes this\)"):
        table.choose(problem(), "picky")
    with pytest.raises(UnsupportedError, match=r"far: runs on cuda tensors, got cpu"):
        table.choose(problem(), "far")
    with pytest.raises(ValueError, match="must be one of picky, far, slow for op; got 'fast'"):
        table.choose(problem(), "fast")
    assert not warnings_of(caplog)


def test_an_error_lists_every_refusal() -> None:
    with pytest.raises(UnsupportedError, match=r"\(picky: dislikes this; far: runs on cuda tensors, got cpu\)"):
        Table("op", (PICKY, FAR)).choose(problem())


def test_describe_says_what_a_device_gets() -> None:
    assert Table("op", (PICKY, FAR, SLOW)).describe(torch.device("cpu")) == (
        "op",
        "slow",
        ["picky: dislikes this", "far: runs on cuda tensors, got cpu"],
    )
    assert Table("op", (PICKY,)).describe(torch.device("cpu")) == ("op", "none", ["picky: dislikes this"])


def test_describe_covers_every_table() -> None:
    selections = {selection.op: selection for selection in describe(torch.device("cpu"))}
    assert len(selections) == len(TABLES)
    rows = {"route", "gather_rows", "gather_sum", "swiglu"}
    assert rows < selections.keys()
    expected = "native" if native_status().available else "reference"
    assert {selections[op].chosen for op in rows} == {expected}
    meta = {selection.op: selection for selection in describe(torch.device("meta"))}
    refusals = ["native: runs on cpu tensors, got meta", "triton: runs on cuda tensors, got meta"]
    assert meta["swiglu"] == ("swiglu", "reference", refusals)


def run_every_op(backend: str | None = None, *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    x_TD = torch.linspace(-1, 1, 12, dtype=dtype).view(3, 4)
    routed = route(torch.tensor([[1, 0], [-1, 1], [0, 0]]), 2, backend=backend)
    y_RD = gather_rows(x_TD, routed.slot_R, routed.ends_E, top_k=2, backend=backend)
    a_RF = swiglu(y_RD, backend=backend)
    dh_RH, _ = swiglu_backward(a_RF, y_RD, backend=backend)
    return [*routed, y_RD, gather_sum(y_RD, routed.row_TK, backend=backend), a_RF, dh_RH]


def test_without_native_the_reference_runs_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run_every_op("reference")
    monkeypatch.setattr(select, "_NATIVE", NativeStatus(False, "moe_runtime._C is not here"))
    for _ in range(2):
        for actual, wanted in zip(run_every_op(), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=0)
    ops = ("route", "gather_rows", "swiglu", "gather_sum")
    assert sorted(warnings_of(caplog)) == sorted(
        f"{op} runs on backend reference (native: moe_runtime._C is not here)" for op in ops
    )
    with pytest.raises(UnsupportedError, match=r"native: moe_runtime\._C is not here"):
        run_every_op("native")


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module"), ImportError("undefined symbol: x")], ids=repr)
def test_native_status_says_how_to_build(monkeypatch: pytest.MonkeyPatch, error: ImportError) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(select, "import_module", fail)
    available, reason = select._load_native()
    assert not available
    assert "pip install --no-build-isolation -e ." in reason
    assert ("undefined symbol: x" in reason) == (type(error) is ImportError)


def test_native_refuses_other_dtypes_by_name(native_ops: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"native: takes float32 or bfloat16, got torch\.float64"):
        gather_sum(torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.int32), backend="native")
    assert run_every_op(dtype=torch.float64)[-1].dtype == torch.float64


def test_triton_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(select, "find_spec", lambda name: name)
    assert select.triton(None).refuses(problem()) == "this torch is built without CUDA"
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    assert select.triton(None).refuses(problem()) == "triton is not installed"
    with pytest.raises(UnsupportedError, match=r"triton: runs on cuda tensors, got cpu"):
        run_every_op("triton")


def test_triton_refuses_other_dtypes_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(select, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # what a CPU tensor's device index is
    backend = select.triton("run", torch.float32)
    assert backend.refuses(problem()) is None
    assert backend.refuses(Problem((torch.empty(1, dtype=torch.float64),))) == "takes float32, got torch.float64"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert backend.refuses(problem()) == "runs on the current device cuda:1, got cuda:None"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_op_traces_in_one_graph(native_ops: Any, device: str) -> None:
    compiled = torch.compile(run_every_op, backend="aot_eager", fullgraph=True)
    for actual, wanted in zip(compiled(), run_every_op(), strict=True):
        torch.testing.assert_close(actual, wanted)
    with torch.device(device):
        shapes = [t.shape for t in run_every_op()]
    assert shapes == [t.shape for t in run_every_op("reference")]


@pytest.mark.gpu
def test_the_reference_never_waits_for_the_gpu() -> None:
    ids_TK = torch.randint(-1, 7, (301, 3), device="cuda")
    x_TD = torch.randn(301, 66, device="cuda").to(torch.bfloat16)
    gate_R = torch.rand(903, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        routed = route(ids_TK, 7, backend="reference")
        y_RD = gather_rows(x_TD, routed.slot_R, routed.ends_E, top_k=3, backend="reference")
        out_TD = gather_sum(y_RD, routed.row_TK, backend="reference")
        a_RF = swiglu(y_RD, gate_R, layout="interleaved", backend="reference")
        dh_RH, dgate_R = swiglu_backward(a_RF, y_RD, gate_R, layout="interleaved", backend="reference")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_cpu = route(ids_TK.cpu(), 7)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(routed, on_cpu, strict=True))
    y_cpu_RD = gather_rows(x_TD.cpu(), on_cpu.slot_R, on_cpu.ends_E, top_k=3)
    assert torch.equal(y_RD.cpu(), y_cpu_RD)
    assert torch.equal(out_TD.cpu(), gather_sum(y_cpu_RD, on_cpu.row_TK))
    torch.testing.assert_close(a_RF.cpu(), swiglu(y_cpu_RD, gate_R.cpu(), layout="interleaved"))
    expected = swiglu_backward(a_RF.cpu(), y_cpu_RD, gate_R.cpu(), layout="interleaved")
    assert dgate_R is not None and expected[1] is not None
    torch.testing.assert_close(dh_RH.cpu(), expected[0])
    torch.testing.assert_close(dgate_R.cpu(), expected[1])
