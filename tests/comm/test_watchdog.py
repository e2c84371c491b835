"""Three ranks of which one is late, stopped, skips or errs: all end within the deadline, each with a report."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from watched_rank import DEADLINES, FAULTY, LAYERS, WORLD

from moe_runtime.comm.incident import Incident, Peers, Position
from moe_runtime.comm.watch import Collective
from moe_runtime.comm.watchdog import EXIT_CODE

SCRIPT, ROOT = Path(__file__).with_name("watched_rank.py"), Path(__file__).parents[2]
# The longest deadline, the grace of those who wait for reports, a start on a busy machine.
WITHIN_SECONDS = 5.0 + DEADLINES.grace + 60.0


def run_ranks(case: str, folder: Path) -> tuple[list[int | None], list[str]]:
    """Exit codes, None for a rank that had to be ended, and what each printed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), case, str(rank), str(folder), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for rank in range(WORLD)
    ]
    deadline, codes, printed = time.monotonic() + WITHIN_SECONDS, [], []
    for rank, process in enumerate(processes):
        waits = 0.0 if case == "stopped" and rank == FAULTY else max(0.0, deadline - time.monotonic())
        try:
            text, code = process.communicate(timeout=waits)[0], process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            text, code = process.communicate()[0], None
        printed.append(text)
        codes.append(code)
    return codes, printed


def reports(folder: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert len({report["rank"] for report in found}) == len(found), "more than one report of a rank"
    return {report["rank"]: report for report in found}


def left(folder: Path) -> list[str]:
    return sorted(path.name.split("-pid-")[0] for path in folder.glob("*.crash.txt"))


def test_a_healthy_run_leaves_nothing(tmp_path: Path) -> None:
    codes, printed = run_ranks("healthy", tmp_path)
    assert codes == [0] * WORLD, printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["late", "stopped"])
def test_a_rank_that_does_not_arrive_is_named_with_its_layer(case: str, tmp_path: Path) -> None:
    codes, printed = run_ranks(case, tmp_path)
    assert codes[:FAULTY] == [EXIT_CODE] * FAULTY, printed
    found = reports(tmp_path)
    for rank in range(FAULTY):
        report = found[rank]
        assert (report["step"], report["phase"], report["layer"]) == (2, "forward", LAYERS[1])
        assert (report["send_rows"], report["receive_rows"]) == ([2, 2, 2], [2, 2, 2])
        assert (report["arrived"], report["missing"]) == ([0, 1], [FAULTY])
        assert LAYERS[0] in report["positions"][str(FAULTY)]
        assert any("exchange" in line for line in report["stacks"][main_thread(report)])
        assert any("gloo:all_gather" in entry["profiling_name"] for entry in report["flight_recorder"])
        assert (list(report["silent_seconds"]) == [str(FAULTY)]) == (case == "stopped")
    if case == "late":
        # It was told, and says where it was itself.
        assert codes[FAULTY] == EXIT_CODE and found[FAULTY]["reason"].startswith("told to end: rank ")
        assert any("train" in line for line in found[FAULTY]["stacks"][main_thread(found[FAULTY])])
        assert left(tmp_path) == []
    else:
        assert FAULTY not in found and left(tmp_path) == [f"rank-{FAULTY}"]


def main_thread(report: dict[str, Any]) -> str:
    return next(name for name in report["stacks"] if name.startswith("MainThread"))


def test_a_phase_has_a_deadline_too(tmp_path: Path) -> None:
    codes, printed = run_ranks("phase", tmp_path)
    assert codes == [EXIT_CODE] * WORLD, printed
    found = reports(tmp_path)
    assert len(found) == WORLD and {report["phase"] for report in found.values()} == {"backward"}
    said = [report["reason"] for report in found.values()]
    assert any("phase 'backward' of step 2 took 2." in reason and "at most 2 s" in reason for reason in said), said


WRONG = {
    "sizes": f"'rows to experts' of layer '{LAYERS[1]}': rank 0 sends 2 rows to rank {FAULTY}, which expects 3",
    "skipped": f"rank 0 is in 'rows to experts' of layer '{LAYERS[1]}'",
}


@pytest.mark.parametrize("case", ["sizes", "error"])
def test_an_error_of_one_rank_or_of_all_is_reported_by_every_rank(case: str, tmp_path: Path) -> None:
    codes, printed = run_ranks(case, tmp_path)
    assert 0 not in codes and None not in codes, printed
    found = reports(tmp_path)
    assert len(found) == WORLD
    if case == "sizes":
        assert all(WRONG[case] in report["reason"] for report in found.values()), found
    else:
        assert "KeyError: 'no such batch'" in found[FAULTY]["reason"]
        assert all(f"rank {FAULTY}" in report["summary"] for report in found.values())


def test_a_rank_that_skips_a_collective_is_named_by_all(tmp_path: Path) -> None:
    """The exchange that the skipping rank enters next is of the same layer and size: only positions tell them apart."""
    codes, printed = run_ranks("skipped", tmp_path)
    assert 0 not in codes and None not in codes, printed
    found = reports(tmp_path)
    assert len(found) == WORLD
    for rank in range(FAULTY):
        assert FAULTY in found[rank]["missing"] and found[rank]["layer"] == LAYERS[1], found[rank]["summary"]


def test_rows_that_abort_the_process_leave_its_place_and_its_stacks(tmp_path: Path) -> None:
    """Without the comparison gloo ends the process that gets more rows than it expects."""
    codes, printed = run_ranks("unseen sizes", tmp_path)
    assert codes[FAULTY] == -signal.SIGABRT and 0 not in codes, (codes, printed)
    (box,) = tmp_path.glob("*.crash.txt")
    text = box.read_text()
    assert f"rank {FAULTY}: step 2, phase 'forward', in 'rows to experts' of layer '{LAYERS[1]}'" in text
    assert "Fatal Python error: Aborted" in text and "watched_rank.py" in text
    assert set(reports(tmp_path)) == {0, 1}


def test_a_killed_rank_leaves_its_place(tmp_path: Path) -> None:
    codes, printed = run_ranks("killed", tmp_path)
    assert codes[FAULTY] == -signal.SIGKILL and 0 not in codes, printed
    found = reports(tmp_path)
    assert set(found) == {0, 1} and left(tmp_path) == [f"rank-{FAULTY}"]
    (box,) = tmp_path.glob("*.crash.txt")
    assert f"rank {FAULTY}: step 2, phase 'forward', in 'rows to experts' of layer '{LAYERS[0]}'" in box.read_text()
    assert box.stat().st_mode & 0o077 == 0


def test_a_report_says_who_is_where() -> None:
    exchange = Collective(name="counts", layer="l", ranks=(0, 2, 3))
    here = Position(step=4, phase="forward", phases=8, collectives=5, collective=exchange)
    positions = {
        1: Position(step=4, phase="forward", phases=8, collectives=1),
        2: Position(step=4, phase="forward", phases=8, collectives=4),
    }
    incident = Incident(
        rank=0,
        world_size=4,
        reason="too slow",
        position=here,
        phase_seconds=1.0,
        collective_seconds=1.0,
        peers=Peers(positions=positions, silent={2: 7.4}),
    )
    assert (incident.arrived, incident.missing) == ([0], [2, 3])
    assert str(incident) == (
        "rank 0: too slow; step 4, phase 'forward', in 'counts' of layer 'l' among ranks [0, 2, 3]; not arrived: "
        "rank 2 (step 4, phase 'forward', silent for 7 s); rank 3 (never said where it is)"
    )
