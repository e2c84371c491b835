"""How much of the exchange in backward each schedule of weight gradients leaves exposed: time spent waiting for it.

    python -m moe_runtime.bench.overlap [--ranks 2] [--rows 2048] [--filler-mb 0 8 32] [--rounds 9] [--timeline FILE]

Each rank runs experts between the two exchanges of a layer over gloo. In backward, the rows' gradients travel back to
where the rows came from; nothing but weight gradients can run meanwhile. A real collective of `filler-mb` MiB for each
pair of ranks goes with it and sets its length. Exposed: how long the process stood in the wait, which includes time in
which another process had the core. Schedules alternate in one process; gradients are compared first. --timeline draws
the last setting's last round, as rank 0 saw it.

    python -m moe_runtime.bench.overlap --stand-in-ms 0.25 0.5 1 [--rows 65536 ...]

On one GPU there is nobody to exchange with: a stand-in takes the collective's place, see bench/stand_in.
"""

# R routed rows   D model width   E local experts

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import moe_runtime as mr
from moe_runtime.bench import stand_in
from moe_runtime.bench.moe import cuda_device
from moe_runtime.bench.stand_in import SCHEDULES, Setting
from moe_runtime.comm.all_to_all import Exchange, start, wait
from moe_runtime.report.timeline import Bar, write_timelines
from moe_runtime.testing.ranks import RankPool


@dataclass(kw_only=True)
class _TimedExchange(Exchange):
    """An exchange with a filler beside it, that notes how long backward stood waiting for it."""

    filler: Tensor | None = None
    filler_work: dist.Work | None = None
    launched: float = 0.0
    waits_from: float = 0.0
    finished: float = 0.0

    @property
    def length(self) -> float:
        """Seconds from launch to arrival."""
        return self.finished - self.launched

    @property
    def exposed(self) -> float:
        """Seconds of it that were spent waiting."""
        return self.finished - self.waits_from

    def launch(self, rows: Tensor, *, reverse: bool) -> Tensor:
        self.launched = time.perf_counter()
        if reverse and self.filler is not None:
            into = torch.empty_like(self.filler)
            self.filler_work = dist.all_to_all_single(into, self.filler, group=self.group, async_op=True)
        return super().launch(rows, reverse=reverse)

    def finish(self) -> Tensor:
        self.waits_from = time.perf_counter()
        received = super().finish()
        if self.filler_work is not None:
            self.filler_work.wait()
            self.filler_work = None
        self.finished = time.perf_counter()
        return received


class _Layer:
    """Dispatch, experts, combine, with the schedule's weights taken where `RoutedExperts` takes them."""

    def __init__(self, schedule: str, setting: Setting) -> None:
        torch.manual_seed(0)
        self.setting = setting
        self.experts = mr.GroupedMLP(
            setting.num_experts,
            setting.hidden_size,
            setting.intermediate_size,
            delay_wgrad_compute=schedule == "deferred",
        )
        self.coordinator = mr.WgradCoordinator(schedule).attach(self.experts)  # pyright: ignore[reportArgumentType]
        world = dist.get_world_size()
        share = setting.rows // world
        self.splits = (share,) * world
        self.bars: list[Bar] = []
        self.filler = torch.ones(world * max(setting.filler_bytes // 4, 1)) if setting.filler_bytes else None

    def _exchange(self) -> _TimedExchange:
        group = dist.group.WORLD
        assert group is not None
        return _TimedExchange(group=group, send_rows=self.splits, receive_rows=self.splits, filler=self.filler)

    def step(self, x_RD: Tensor, ends_E: Tensor) -> tuple[float, float, float]:
        """(seconds of backward and flush, length of the exchange, exposed seconds) of dispatch's reverse."""
        dispatch, combine = self._exchange(), self._exchange()
        pending_RD = start(x_RD, dispatch)
        weights = self.experts.take_weights()
        rows_RD = wait(pending_RD, dispatch)
        y_RD = self.experts.forward_ends(rows_RD, ends_E, None, weights)
        out_RD = wait(start(y_RD, combine), combine)
        dist.barrier()
        jobs = len(self.coordinator.trace()["traceEvents"])
        began = time.perf_counter()
        out_RD.square().sum().backward()
        self.coordinator.flush()
        seconds = time.perf_counter() - began
        self.bars = _bars(began, dispatch, combine, self.coordinator.trace()["traceEvents"][jobs:])
        return seconds, dispatch.length, dispatch.exposed


def _bars(began: float, dispatch: _TimedExchange, combine: _TimedExchange, jobs: list[dict[str, Any]]) -> list[Bar]:
    """One backward: what is computed between the two exchanges, and over it the weight gradients where they ran."""

    def bar(lane: str, kind: str, start: float, stop: float) -> Bar:
        return Bar(lane, kind, 1e3 * (start - began), 1e3 * (stop - began))

    # Inline, no job stands apart: each weight gradient is part of its layer's backward.
    kind = "dgrad" if jobs else "dgrad + wgrad"
    bars = [bar("computes", kind, combine.finished, dispatch.launched)]
    for event in jobs:
        start = event["ts"] / 1e6
        bars.append(bar("computes", "wgrad", start, start + event["dur"] / 1e6))
    for exchange in (combine, dispatch):
        bars.append(bar("computes", "waiting", exchange.waits_from, exchange.finished))
        bars.append(bar("travels", "exchange", exchange.launched, exchange.finished))
    return bars


def measure(setting: Setting) -> tuple[dict[str, Any], dict[str, list[Bar]]]:
    """On every rank: medians of each schedule, after comparing their gradients, and the last round's bars."""
    layers = {schedule: _Layer(schedule, setting) for schedule in SCHEDULES}
    rows = sum(layers["inline"].splits)
    x_RD = torch.randn(rows, setting.hidden_size, generator=torch.Generator().manual_seed(dist.get_rank()))
    x_RD.requires_grad_()
    ends_E = torch.linspace(0, rows, setting.num_experts + 1)[1:].to(torch.int32)
    for layer in layers.values():
        layer.step(x_RD, ends_E)
    for name, parameter in layers["inline"].experts.named_parameters():
        for schedule in SCHEDULES[1:]:
            other = layers[schedule].experts.get_parameter(name)
            if parameter.grad is None or other.grad is None or not torch.equal(parameter.grad, other.grad):
                raise AssertionError(f"{schedule} changed the gradient of {name}: nothing is timed")
    taken: dict[str, list[tuple[float, float, float]]] = {schedule: [] for schedule in SCHEDULES}
    for _ in range(setting.rounds):
        for schedule, layer in layers.items():
            layer.experts.zero_grad()
            taken[schedule].append(layer.step(x_RD, ends_E))
    keys = ("backward_ms", "exchange_ms", "exposed_ms")
    medians = {
        schedule: dict(zip(keys, (1e3 * statistics.median(column) for column in zip(*rows, strict=True)), strict=True))
        for schedule, rows in taken.items()
    }
    return medians, {schedule: layer.bars for schedule, layer in layers.items()}


def main() -> None:
    """Prints a JSON line a setting, and a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--intermediate-size", type=int, default=512)
    parser.add_argument("--experts", type=int, default=8, help="local to a rank")
    parser.add_argument("--filler-mb", type=float, nargs="+", default=[0, 8, 32])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--stand-in-ms", type=float, nargs="+", help="on one GPU: lengths of the stand-in's exchange")
    parser.add_argument("--timeline", type=Path, help="draw one backward of each schedule into this file")
    arguments = parser.parse_args()
    if arguments.stand_in_ms:
        print(stand_in.table(arguments.stand_in_ms, _sizes(arguments, 0), cuda_device()))
        return
    timelines: dict[str, list[Bar]] = {}
    table = ["| filler | schedule | backward | exchange | exposed | of the exchange |", "|---|---|---|---|---|---|"]
    with RankPool(arguments.ranks) as pool:
        for filler in arguments.filler_mb:
            setting = _sizes(arguments, int(filler * 2**20))
            medians, timelines = pool.run(measure, setting)[0]
            print(json.dumps({"bench": "overlap", "ranks": arguments.ranks, "filler_mb": filler, **medians}))
            for schedule, found in medians.items():
                share = found["exposed_ms"] / found["exchange_ms"]
                table.append(
                    f"| {filler:g} MiB | {schedule} | {found['backward_ms']:.1f} ms | {found['exchange_ms']:.1f} ms "
                    f"| {found['exposed_ms']:.1f} ms | {share:.0%} |"
                )
    print("\n".join(table))
    if arguments.timeline is not None:
        write_timelines(arguments.timeline, timelines)


def _sizes(arguments: argparse.Namespace, filler_bytes: int) -> Setting:
    return Setting(
        rows=arguments.rows,
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        num_experts=arguments.experts,
        filler_bytes=filler_bytes,
        rounds=arguments.rounds,
    )


if __name__ == "__main__":
    main()
