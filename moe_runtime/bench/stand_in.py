"""A stand-in for an exchange, on one GPU: what hides it is measured where there is nobody to exchange with.

For the length asked for, its stream keeps a few multiprocessors busy, as a collective's kernels do, and copies from
the host, as its traffic does. Rows are copied too: values and gradients are those of an exchange with oneself.
Exposed: how long the stream that computes stood in the wait, by events on both sides of it.
"""

# R routed rows   D model width   E local experts

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import moe_runtime as mr
from moe_runtime.comm.all_to_all import start, wait

SCHEDULES = ("inline", "late", "deferred")
_BUSY_STREAMS = 8  # each holds one multiprocessor
_HOST_BYTES = 2**24
_CALIBRATION_CYCLES = 20_000_000


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one measurement runs; `filler_bytes` travels with a real exchange, and is 0 for a stand-in."""

    rows: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    filler_bytes: int
    rounds: int


class Occupier:
    """Keeps a few multiprocessors and a copy engine of one device busy for a time."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._busy = [torch.cuda.Stream(device) for _ in range(_BUSY_STREAMS)]
        self._host = torch.empty(_HOST_BYTES, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(_HOST_BYTES, dtype=torch.uint8, device=device)
        self._cycles_a_ms = _CALIBRATION_CYCLES / _milliseconds(lambda: torch.cuda._sleep(_CALIBRATION_CYCLES))
        self._copy_ms = _milliseconds(lambda: self._device.copy_(self._host, non_blocking=True))

    def occupy(self, milliseconds: float) -> None:
        """Launched on `stream`, which is done when all of it is."""
        cycles = int(milliseconds * self._cycles_a_ms)
        for stream in self._busy:
            stream.wait_stream(self.stream)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
        with torch.cuda.stream(self.stream):
            for _ in range(int(milliseconds / self._copy_ms)):
                self._device.copy_(self._host, non_blocking=True)
        for stream in self._busy:
            self.stream.wait_stream(stream)


def _milliseconds(run: Any) -> float:
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


@dataclass(kw_only=True)
class StandIn:
    """Takes an Exchange's place between `comm.start` and `comm.wait`: every row comes back to this rank."""

    occupier: Occupier
    milliseconds: float
    marks: dict[str, torch.cuda.Event] = field(default_factory=dict)
    received: Tensor | None = None

    def launch(self, rows: Tensor, *, reverse: bool) -> Tensor:
        """Start: the rows are copied on the stand-in's stream, which stays busy as long as asked for."""
        stream = self.occupier.stream
        stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(stream):
            self._mark("launched")
            self.received = rows.clone()
        self.occupier.occupy(self.milliseconds if reverse else 0.0)
        with torch.cuda.stream(stream):
            self._mark("arrived")
        rows.record_stream(stream)
        self.received.record_stream(torch.cuda.current_stream(rows.device))
        return self.received

    def finish(self) -> Tensor:
        """Make the current stream wait for it."""
        assert self.received is not None
        self._mark("waits_from")
        torch.cuda.current_stream(self.received.device).wait_event(self.marks["arrived"])
        self._mark("goes_on")
        received, self.received = self.received, None
        return received

    def _mark(self, name: str) -> None:
        self.marks[name] = torch.cuda.Event(enable_timing=True)
        self.marks[name].record()

    def between(self, first: str, second: str) -> float:
        """Milliseconds on the device's clock."""
        return self.marks[first].elapsed_time(self.marks[second])


def table(lengths_ms: Sequence[float], setting: Setting, device: torch.device) -> str:
    """A markdown table: backward, exchange and exposed time of each schedule for each length; medians of `rounds`."""
    rows = ["| stand-in | schedule | backward | exchange | exposed | of the exchange |", "|---|---|---|---|---|---|"]
    occupier = Occupier(device)
    layers = {schedule: _layer(schedule, setting, device) for schedule in SCHEDULES}
    _compare(layers, setting, occupier)
    for length in lengths_ms:
        taken: dict[str, list[tuple[float, float, float]]] = {schedule: [] for schedule in SCHEDULES}
        for _ in range(setting.rounds):
            for schedule, (experts, coordinator) in layers.items():
                taken[schedule].append(_step(experts, coordinator, setting, StandIns(occupier, length)))
        for schedule, found in taken.items():
            backward, exchange, exposed = (statistics.median(column) for column in zip(*found, strict=True))
            rows.append(
                f"| {length:g} ms | {schedule} | {backward:.3f} ms | {exchange:.3f} ms | {exposed:.3f} ms "
                f"| {exposed / exchange:.0%} |"
            )
    return "\n".join(rows)


@dataclass(frozen=True)
class StandIns:
    """Of one step: dispatch's takes the time asked for, combine's none."""

    occupier: Occupier
    milliseconds: float

    def pair(self) -> tuple[Any, Any]:
        """(dispatch, combine)"""
        return tuple(StandIn(occupier=self.occupier, milliseconds=ms) for ms in (self.milliseconds, 0.0))  # pyright: ignore[reportReturnType]


def _layer(schedule: Any, setting: Setting, device: torch.device) -> tuple[mr.GroupedMLP, mr.WgradCoordinator]:
    torch.manual_seed(0)
    experts = mr.GroupedMLP(
        setting.num_experts,
        setting.hidden_size,
        setting.intermediate_size,
        delay_wgrad_compute=schedule == "deferred",
        dtype=torch.bfloat16,
        device=device,
    )
    return experts, mr.WgradCoordinator(schedule).attach(experts)


def _step(
    experts: mr.GroupedMLP, coordinator: mr.WgradCoordinator, setting: Setting, stand_ins: StandIns
) -> tuple[float, float, float]:
    """(milliseconds of backward and flush, length of dispatch's reverse, exposed milliseconds of it)"""
    device = experts.gate_up.weight.device
    generator = torch.Generator(device).manual_seed(1)
    shape = (setting.rows, setting.hidden_size)
    x_RD = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).requires_grad_()
    ends_E = torch.linspace(0, setting.rows, setting.num_experts + 1, device=device)[1:].to(torch.int32)
    dispatch, combine = stand_ins.pair()
    pending_RD = start(x_RD, dispatch)
    weights = experts.take_weights()
    y_RD = experts.forward_ends(wait(pending_RD, dispatch), ends_E, None, weights)
    loss = wait(start(y_RD, combine), combine).float().square().mean()
    experts.zero_grad()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    loss.backward()
    coordinator.flush()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), dispatch.between("launched", "arrived"), dispatch.between("waits_from", "goes_on")


def _compare(layers: dict[str, Any], setting: Setting, occupier: Occupier) -> None:
    """AssertionError where a schedule changes a gradient: nothing is timed then."""
    gradients = {}
    for schedule, (experts, coordinator) in layers.items():
        _step(experts, coordinator, setting, StandIns(occupier, 0.1))
        gradients[schedule] = [parameter.grad.clone() for parameter in experts.parameters()]
    for schedule in SCHEDULES[1:]:
        if not all(torch.equal(a, b) for a, b in zip(gradients["inline"], gradients[schedule], strict=True)):
            raise AssertionError(f"{schedule} changed a gradient: nothing is timed")
