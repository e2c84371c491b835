"""Restarted launches: which run they go on with, and the plan for another number of ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from moe_runtime.comm.bootstrap import Launch
from moe_runtime.core.errors import ConfigError
from moe_runtime.train import elastic
from moe_runtime.train.config import (
    Config,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    check_world,
)


def config(run_dir: str = "", *, batch: int = 16, microbatches: int = 1, expert: int = 4, replicate: int = 1) -> Config:
    return Config(
        run=RunConfig(dir=run_dir, name="job"),
        model=ModelConfig(model_type="qwen3_moe"),
        train=TrainConfig(steps=4, global_batch_size=batch, microbatches=microbatches),
        optim=OptimConfig(lr=1e-3),
        parallel=ParallelConfig(expert=expert, replicate=replicate),
    )


def launch(job: str = "a", **fields: int) -> Launch:
    return Launch(**{"world_size": 8, **fields}, job=job)


def save_something(folder: Path) -> None:
    (folder / "checkpoints" / "step-000002").mkdir(parents=True)
    (folder / "checkpoints" / "step-000002" / "manifest.json").touch()


@pytest.mark.parametrize("run_dir", ["", "here"])
def test_a_restart_goes_on_with_the_run_of_its_launch(
    run_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = config(run_dir)
    assert elastic.restarted(first, launch()) == first
    folder = elastic.claim(first, launch())
    again = elastic.restarted(first, launch())
    assert (again.run.dir, again.run.resume) == (str(folder), str(folder))
    assert elastic.claim(again, launch()) == folder
    # It had saved nothing: it begins as the launch began. Once it has, from there.
    assert elastic.resume_from(again, folder, launch()) == ""
    save_something(folder)
    assert elastic.resume_from(again, folder, launch()) == str(folder)
    # Another launch of the same configuration is another run.
    other = elastic.restarted(first, launch("b"))
    assert other == first


def test_a_restart_begins_again_from_what_its_launch_resumed(tmp_path: Path) -> None:
    first = config(str(tmp_path / "run"))
    first = replace(first, run=replace(first.run, resume="other/checkpoints/step-000005"))
    folder = elastic.claim(first, launch())
    again = elastic.restarted(first, launch())
    assert elastic.resume_from(again, folder, launch()) == "other/checkpoints/step-000005"
    by_hand = replace(first, run=replace(first.run, resume="latest"))
    assert elastic.resume_from(by_hand, folder, launch("b")) == "latest"


def test_a_restart_without_an_id_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match="expected torchrun with an --rdzv-id of its own, got none"):
        elastic.restarted(config(), launch("", restart_count=1))
    assert elastic.restarted(config(), launch("")) == config()


# ranks before and now, (batch, microbatches, expert, replicate) -> (microbatches, expert, replicate)
PLANS = {
    "as it was": (8, 8, (16, 1, 4, 1), (1, 4, 1)),
    "half the hosts": (8, 4, (16, 1, 4, 1), (2, 4, 1)),
    "fewer ranks than an expert group": (8, 2, (16, 1, 4, 1), (4, 2, 1)),
    "one rank": (4, 1, (16, 2, 4, 1), (8, 1, 1)),
    "an odd number": (8, 6, (48, 1, 4, 1), (2, 2, 1)),
    "replicas": (8, 4, (16, 1, 2, 4), (2, 1, 4)),
    "more hosts": (4, 8, (16, 1, 4, 1), (1, 4, 1)),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_fits_the_ranks_there_are(case: str) -> None:
    before, now, (batch, microbatches, expert, replicate), expected = PLANS[case]
    first = config(batch=batch, microbatches=microbatches, expert=expert, replicate=replicate)
    check_world(first, before)
    again = elastic.replanned(first, before=before, now=now)
    check_world(again, now)
    assert (again.train.microbatches, again.parallel.expert, again.parallel.replicate) == expected
    assert again.train.global_batch_size == batch
    sequences = [batch // (plan.train.microbatches * ranks) for plan, ranks in ((first, before), (again, now))]
    assert sequences[1] <= sequences[0]


def test_ranks_that_cannot_share_the_batch_are_refused_in_a_sentence() -> None:
    again = elastic.replanned(config(batch=16), before=8, now=3)
    with pytest.raises(ConfigError, match=r"microbatches x ranks = 1 x 3 = 3, got 16"):
        check_world(again, 3)


def test_what_was_planned_anew_is_said() -> None:
    first = config()
    again = elastic.replanned(first, before=8, now=2)
    assert elastic.changes(first, again) == "parallel.expert = 2 in place of 4, train.microbatches = 4 in place of 1"
    assert elastic.changes(first, first) == ""
