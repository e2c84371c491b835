"""Phase times of all ranks: the row that is written, and which rank is called slow."""

import json
from pathlib import Path

from moe_runtime.train.phases import PHASES, PhaseSeconds
from moe_runtime.train.slow_ranks import SlowRanks, slow


def test_a_row_holds_every_phase(tmp_path: Path) -> None:
    spent = dict.fromkeys(PHASES, PhaseSeconds()) | {"forward": PhaseSeconds(wall=2.0, busy=1.5)}
    SlowRanks(tmp_path, is_main=True, resumed_step=None).record(20, 10, spent)
    row = json.loads((tmp_path / "phases.jsonl").read_text())
    assert (row["step"], row["steps"]) == (20, 10)
    assert set(row["seconds"]) == set(row["busy_seconds"]) == set(PHASES)
    assert row["seconds"]["forward"] == [2.0] and row["busy_seconds"]["forward"] == [1.5]


def test_the_rank_that_computes_longer_is_named_not_those_that_wait_for_it() -> None:
    seconds = {phase: [0.0] * 4 for phase in PHASES} | {"backward": [9.0, 9.0, 9.0, 9.0]}
    busy = {phase: [0.0] * 4 for phase in PHASES} | {"backward": [4.0, 4.1, 9.0, 4.0]}
    assert slow(seconds, busy) == ["rank 2 spent 9.00 s in 'backward', the median rank 4.00 s"]
    busy["backward"] = [4.0, 4.1, 5.9, 4.0]
    assert slow(seconds, busy) == []


def test_slow_data_is_seen_by_the_clock() -> None:
    seconds = {phase: [1.0, 1.0] for phase in PHASES} | {"data": [0.01, 3.0]}
    busy = {phase: [1.0, 1.0] for phase in PHASES}
    assert slow(seconds, busy) == ["rank 1 spent 3.00 s in 'data', the median rank 0.01 s"]


def test_many_times_next_to_nothing_is_not_slow() -> None:
    seconds = {phase: [10.0, 10.0] for phase in PHASES} | {"data": [0.001, 0.1]}
    assert slow(seconds, {phase: [1.0, 1.0] for phase in PHASES}) == []


def test_one_rank_alone_is_never_slow() -> None:
    assert slow({phase: [1.0] for phase in PHASES}, {phase: [1.0] for phase in PHASES}) == []
