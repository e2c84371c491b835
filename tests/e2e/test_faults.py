"""Faults of ranks, launchers, links and hosts: the run's metrics equal an undisturbed run's, bit for bit."""

import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from fault_runs import DEADLINE_SECONDS, OVERRIDES, Faults, kill_launcher, launched
from train_runs import arguments, child_environment, command, rows

from moe_runtime.testing import netns

pytestmark = pytest.mark.skipif(netns.missing_requirement() is not None, reason=str(netns.missing_requirement()))

# Steps of a run, and those after which it saves.
STEPS, EVERY = 10, 3
PLACES = ("forward", "backward", "exchange", "optimizer", "save")


@pytest.fixture(scope="session")
def undisturbed(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Metrics of the same run on one host, whose numbers are those of two."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    words = command(2, arguments(tiny_config, folder, OVERRIDES))
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=child_environment(), check=False)
    assert done.returncode == 0, done.stderr
    return rows(folder)


def kill_at(where: str, rng: random.Random, *, step: int | None = None, rank: int | None = None) -> dict[str, Any]:
    """SIGKILL of one rank at a place, or within the next milliseconds; a save goes on on a thread."""
    at = rng.randrange(1, STEPS) if step is None else step
    seconds = rng.choice([0.0, rng.uniform(0.0, 0.004)]) if where != "save" else rng.uniform(0.0, 0.03)
    if where == "save":
        at = max(EVERY, at // EVERY * EVERY)
    rank = rng.randrange(2) if rank is None else rank
    return {"where": where, "step": at, "rank": rank, "action": "kill", "seconds": seconds}


def mark(step: int) -> dict[str, Any]:
    """Rank 0 makes the fault's file when it comes to this step, and goes on."""
    return {"where": "forward", "step": step, "rank": 0, "action": "mark"}


def expect_undisturbed(faulty: Faults, undisturbed: list[dict[str, float]]) -> None:
    codes = faulty.finish()
    assert set(codes.values()) == {0}, f"{codes}\n{faulty.printed()}"
    assert rows(faulty.run_dir) == undisturbed


def cut_for(faulty: Faults, fault: dict[str, Any], seconds: float) -> None:
    """Unplug the second host once the fault has made its file."""
    faulty.wait_for(Path(fault["once"]))
    netns.cut(faulty.cluster, faulty.cluster.hosts[1])
    time.sleep(seconds)
    netns.mend(faulty.cluster, faulty.cluster.hosts[1])


def expect_resumed(faulty: Faults) -> None:
    """A save that had only begun when a rank was lost is not whole, so the one before counts."""
    resumed = faulty.resumed_steps()
    assert resumed == sorted(resumed) and set(resumed) <= set(range(EVERY, STEPS, EVERY)), resumed


# ---- in `make test`: eight faults in two launches ----


def test_ranks_killed_in_each_phase_cost_the_steps_since_the_last_save(
    tiny_config: Path, tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    rng = random.Random(9)
    places = zip((*PLACES, "exchange"), (2, 4, 5, 7, 9, 10), strict=True)
    faults = [kill_at(where, rng, step=step) for where, step in places]
    with launched(tiny_config, tmp_path / "kills", faults, max_restarts=len(faults)) as faulty:
        expect_undisturbed(faulty, undisturbed)
        assert all(Path(fault["once"]).exists() for fault in faults)
        expect_resumed(faulty)
        assert faulty.resumed_steps()[-1] >= 6


def test_a_short_cut_of_a_link_costs_nothing_and_a_long_one_a_restart(
    tiny_config: Path, tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    faults = [mark(2), mark(5), mark(8)]
    with launched(tiny_config, tmp_path / "cuts", faults, max_restarts=2) as faulty:
        cut_for(faulty, faults[0], DEADLINE_SECONDS / 4)
        faulty.wait_for(Path(faults[1]["once"]))
        assert faulty.reports() == [] and faulty.resumed_steps() == []
        cut_for(faulty, faults[2], 2.0 * DEADLINE_SECONDS)
        expect_undisturbed(faulty, undisturbed)
        assert len(faulty.resumed_steps()) >= 1
        # Each side named the other, which it heard no more of.
        assert {0, 1} <= {report["rank"] for report in faulty.reports()}
        assert all(report["step"] == 8 and report["missing"] == [1 - report["rank"]] for report in faulty.reports())


# ---- in `make test-all`: forty launches ----


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("where", PLACES)
def test_a_rank_killed_anywhere(
    where: str, seed: int, tiny_config: Path, tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    fault = kill_at(where, random.Random(f"{where} {seed}"))
    with launched(tiny_config, tmp_path / "kill", [fault]) as faulty:
        expect_undisturbed(faulty, undisturbed)
        assert Path(fault["once"]).exists()
        expect_resumed(faulty)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_link_cut_for_less_than_the_deadline(
    seed: int, tiny_config: Path, tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    rng = random.Random(seed)
    fault = mark(rng.randrange(2, STEPS))
    with launched(tiny_config, tmp_path / "short", [fault], max_restarts=0) as faulty:
        cut_for(faulty, fault, rng.uniform(0.1, DEADLINE_SECONDS / 3))
        expect_undisturbed(faulty, undisturbed)
        assert faulty.reports() == [] and faulty.resumed_steps() == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_link_cut_for_longer(
    seed: int, tiny_config: Path, tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    rng = random.Random(seed)
    fault = mark(rng.randrange(2, STEPS))
    with launched(tiny_config, tmp_path / "long", [fault], max_restarts=2) as faulty:
        cut_for(faulty, fault, DEADLINE_SECONDS * rng.uniform(1.5, 2.5))
        expect_undisturbed(faulty, undisturbed)
        assert {report["rank"] for report in faulty.reports()} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_rank_stopped_without_end(
    seed: int, tiny_config: Path, tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    rng = random.Random(seed)
    fault = {**kill_at(rng.choice(PLACES[:4]), rng, rank=seed), "action": "stop"}
    with launched(tiny_config, tmp_path / "stop", [fault]) as faulty:
        expect_undisturbed(faulty, undisturbed)
        (report,) = faulty.reports()
        assert report["rank"] == 1 - seed and report["missing"] == [seed]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_launcher_of_a_host_without_the_store_killed_and_started_again(
    seed: int, tiny_config: Path, tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    fault = mark(random.Random(seed).randrange(2, STEPS))
    with launched(tiny_config, tmp_path / "launcher", [fault], max_restarts=3) as faulty:
        second = faulty.cluster.hosts[1]
        faulty.wait_for(Path(fault["once"]))
        kill_launcher(faulty, second)
        netns.send_signal(second, signal.SIGKILL)
        faulty.start(second)
        expect_undisturbed(faulty, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_the_host_of_the_store_lost_is_said_and_a_fresh_launch_goes_on(
    seed: int, tiny_config: Path, tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    fault = mark(random.Random(seed).randrange(5, STEPS))
    with launched(tiny_config, tmp_path / "store", [fault], max_restarts=3) as faulty:
        first, second = faulty.cluster.hosts
        faulty.wait_for(Path(fault["once"]))
        netns.drop(faulty.cluster, first)
        codes = faulty.finish()
        assert codes["host1"] != 0
        log = (faulty.folder / "host1.log").read_text()
        assert "RendezvousConnectionError" in log or "DistNetworkError" in log, faulty.printed()
        netns.restore(faulty.cluster, first)
        for host in (first, second):
            faulty.start(host)
        expect_undisturbed(faulty, undisturbed)
        assert faulty.resumed_steps()[0] >= EVERY


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_host_that_does_not_come_back_is_done_without(
    seed: int, tiny_config: Path, tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    fault = mark(random.Random(seed).randrange(5, STEPS))
    with launched(tiny_config, tmp_path / "fewer", [fault], nodes="1:2", max_restarts=3) as faulty:
        faulty.wait_for(Path(fault["once"]))
        netns.drop(faulty.cluster, faulty.cluster.hosts[1])
        codes = faulty.finish()
        assert codes["host0"] == 0, faulty.printed()
        changes = "parallel.expert = 1 in place of 2, train.microbatches = 4 in place of 2"
        assert f"restarted with 1 ranks, began with 2: {changes}" in faulty.printed()
        (resumed,) = faulty.resumed_steps()
    found = rows(faulty.run_dir)
    assert found[:resumed] == undisturbed[:resumed]
    # From there on it is, bit for bit, a run of one rank begun at that checkpoint.
    alone = tmp_path / "alone"
    plan = (*OVERRIDES, "parallel.expert=1", "train.microbatches=4")
    source = faulty.run_dir / "checkpoints" / f"step-{resumed:06d}"
    words = command(1, arguments(tiny_config, alone, plan, resume=str(source)))
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=child_environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert found[resumed:] == rows(alone)


# What every rank's summary says. A rank that skips a layer goes on to a gather of weights, in which it is alone; the
# other waits for it in the layer.
PLANTED = {"sizes": "of layer 'model.layers.", "skip": "'counts' of layer 'model.layers.0.mlp.experts'"}


@pytest.mark.parametrize("action", PLANTED)
def test_a_planted_mismatch_ends_every_rank_with_a_report_that_names_rank_and_layer(
    action: str, tiny_config: Path, tmp_path: Path
) -> None:
    fault = {"where": action, "step": 3, "rank": 1, "action": action}
    with launched(tiny_config, tmp_path / action, [fault], max_restarts=0) as faulty:
        faulty.wait_for(Path(fault["once"]))
        started = time.monotonic()
        codes = faulty.finish()
        # The deadline, the grace for reports, and torchrun's own end.
        assert time.monotonic() - started < DEADLINE_SECONDS + 5.0 + 30.0
        assert 0 not in codes.values()
        found = {report["rank"]: report for report in faulty.reports()}
        assert set(found) == {0, 1}, faulty.printed()
        for report in found.values():
            summary = report["summary"]
            assert PLANTED[action] in summary and "rank 0" in summary and "rank 1" in summary, summary
        if action == "sizes":
            assert all("sends" in report["reason"] and "which expects" in report["reason"] for report in found.values())
        else:
            assert found[0]["missing"] == [1] and found[0]["layer"] == "model.layers.0.mlp.experts"
