"""A run that is asked to stop: its ranks agree on the step and leave a whole checkpoint from which the rest follows."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from train_runs import Train, arguments, child_environment, command, rows

from moe_runtime import checkpoint

RUN = ("parallel.expert=2", "parallel.data=fsdp2", "train.validate_every=0")


def _stopped(config: Path, run_dir: Path, steps: str, number: signal.Signals, *, whole_launch: bool) -> tuple[int, str]:
    """(torchrun's exit code, what it said): two ranks; after six steps `number` goes to torchrun or to one rank."""
    process = subprocess.Popen(
        command(2, arguments(config, run_dir, (*RUN, steps))),
        stderr=subprocess.PIPE,
        text=True,
        env={**child_environment(), "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1"},
    )
    metrics = run_dir / "metrics.jsonl"
    end = time.monotonic() + 150
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 6):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid if whole_launch else int(children[-1]), number)
    _, said = process.communicate(timeout=100)
    return process.returncode, said


@pytest.mark.parametrize(
    ("number", "whole_launch"),
    [(signal.SIGUSR1, False), (signal.SIGTERM, True), pytest.param(signal.SIGUSR1, True, marks=pytest.mark.slow)],
    ids=["usr1-rank", "term-launch", "usr1-launch"],
)
def test_a_signal_saves_and_stops_and_the_rest_equals_an_undisturbed_run(
    number: signal.Signals, whole_launch: bool, tiny_config: Path, tmp_path: Path, train: Train
) -> None:
    # torchrun is slow to pass a signal on; a run that is gone by then shows nothing.
    last = 600 if whole_launch else 60
    steps = f"train.steps={last}"
    code, said = _stopped(tiny_config, tmp_path / "stopped", steps, number, whole_launch=whole_launch)
    # torchrun itself ends with an error when it was the one to be signalled.
    assert (code == 0) != whole_launch, said
    done = len(rows(tmp_path / "stopped"))
    assert 6 <= done < last
    assert f"stopped after step {done} of {last}, saved, " in said
    (left,) = (tmp_path / "stopped" / "checkpoints").iterdir()
    assert left.name == f"step-{done:06d}" and checkpoint.verify(left)
    if whole_launch:
        return
    undisturbed = train(tmp_path / "whole", *RUN, steps, ranks=2)
    assert undisturbed.returncode == 0, undisturbed.stderr
    resumed = train(tmp_path / "stopped", *RUN, steps, ranks=2, resume="latest")
    assert resumed.returncode == 0, resumed.stderr
    assert rows(tmp_path / "stopped") == rows(tmp_path / "whole")
