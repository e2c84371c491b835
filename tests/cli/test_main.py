"""The command line from outside: start-up, exit codes, one sentence on standard error."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_runtime import __version__
from moe_runtime.cli import exits, lazy, main, with_resume_value
from moe_runtime.comm.bootstrap import Launch
from moe_runtime.core.errors import CheckpointError, ConfigError, UnsupportedError
from moe_runtime.train.config import Config

ROOT = Path(__file__).parents[2]
GOOD = '[model]\nmodel_type = "qwen3_moe"\n[train]\nsteps = 4\nglobal_batch_size = 4\n[optim]\nlr = 1e-3\n'
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID")


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One process without a launcher, in an empty folder with a good config, good.toml."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.toml").write_text(GOOD)
    return tmp_path


class FakeJob:
    """Stands for moe_runtime.cli.job: keeps what it was given and fails as told."""

    def __init__(self, at_prepare: BaseException | None = None, at_run: BaseException | None = None) -> None:
        self.at_prepare, self.at_run = at_prepare, at_run
        self.given: list[tuple[Config, Launch]] = []

    def prepare_job(self, config: Config, launch: Launch) -> "FakeJob":
        self.given.append((config, launch))
        if self.at_prepare is not None:
            raise self.at_prepare
        return self

    def run(self) -> None:
        if self.at_run is not None:
            raise self.at_run


def use(monkeypatch: pytest.MonkeyPatch, job: FakeJob) -> FakeJob:
    load: Any = lazy.load
    monkeypatch.setattr(lazy, "load", lambda name: job if name == "job" else load(name))
    return job


def test_starting_imports_nothing_heavy(tmp_path: Path):
    heavy = "torch", "numpy", "transformers", "matplotlib", "tokenizers"
    done = python("-c", f"import sys, moe_runtime.cli; print([m for m in {heavy} if m in sys.modules])", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_bad_key_is_one_line_and_exit_code_two(tmp_path: Path):
    (tmp_path / "bad.toml").write_text(GOOD.replace("steps", "step"))
    done = python("-m", "moe_runtime", "train", "bad.toml", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "moe_runtime: unknown key 'train.step'; did you mean 'train.steps'?\n"
    assert [path.name for path in tmp_path.iterdir()] == ["bad.toml"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train"], "Missing argument 'CONFIG'."),
        (["train", "good.toml", "--sett", "a=1"], "No such option: --sett"),
        (["tran"], "No such command 'tran'."),
        (["train", "none.toml"], "cannot read the config file none.toml: No such file or directory"),
        (["train", "."], "cannot read the config file .: Is a directory"),
        (["train", "good.toml", "--set", "train.steps"], "an override must read section.key=value, got 'train.steps'"),
        (["train", "good.toml", "--set", "optim.lr=fast"], "optim.lr must be a number, got 'fast' (a string)"),
        (
            ["train", "good.toml", "--set", "parallel.expert=2"],
            "the number of ranks must be a multiple of parallel.exp",
        ),
        (["train", "good.toml", "--resume"], "nothing to resume: no folder runs/good-<n> exists"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_exists(
    alone: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"moe_runtime: {sentence}") and captured.err.count("\n") == 1
    assert captured.out == ""
    assert [path.name for path in alone.iterdir()] == ["good.toml"]


def test_contradicting_launchers_are_refused(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    variables = {"RANK": "1", "WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "good.toml"]) == 2
    assert capsys.readouterr().err.startswith("moe_runtime: RANK=1 contradicts OMPI_COMM_WORLD_RANK=0")


def test_a_good_run_gets_config_and_launch(alone: Path, monkeypatch: pytest.MonkeyPatch):
    job = use(monkeypatch, FakeJob())
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "good.toml", "--set", "train.steps=7", "--set", "optim.lr=0.5"]) == 0
    ((config, launch),) = job.given
    assert (config.train.steps, config.optim.lr, config.run.name, config.run.resume) == (7, 0.5, "good", "")
    assert (launch.rank, launch.world_size) == (1, 2)


@pytest.mark.parametrize(
    "form", [["good.toml", "--resume"], ["--resume", "good.toml"], ["good.toml", "--resume", "latest"]]
)
def test_resume_alone_means_the_latest(alone: Path, monkeypatch: pytest.MonkeyPatch, form: list[str]):
    (alone / "runs" / "good-1").mkdir(parents=True)
    job = use(monkeypatch, FakeJob())
    assert main(["train", *form]) == 0
    assert job.given[0][0].run.resume == "latest"


def test_resume_takes_a_folder_and_precedes_the_file(alone: Path, monkeypatch: pytest.MonkeyPatch):
    (alone / "mine").mkdir()
    job = use(monkeypatch, FakeJob())
    assert main(["train", "good.toml", "--set", "run.resume=latest", "--resume", "mine"]) == 0
    assert job.given[0][0].run.resume == "mine"


def test_resume_values():
    assert with_resume_value(["--resume", "--set", "a=1"]) == ["--resume", "latest", "--set", "a=1"]
    assert with_resume_value(["c.toml", "--resume"]) == ["c.toml", "--resume", "latest"]
    assert with_resume_value(["--resume", "runs/x-1", "c.toml"]) == ["--resume", "runs/x-1", "c.toml"]
    assert with_resume_value(["--resume=runs/x-1"]) == ["--resume=runs/x-1"]


@pytest.mark.parametrize(
    ("job", "code", "err"),
    [
        (FakeJob(at_prepare=ConfigError("a\nb")), 2, "moe_runtime: a b\n"),
        (FakeJob(at_prepare=ImportError("needs x")), 2, "moe_runtime: needs x\n"),
        (FakeJob(at_prepare=KeyboardInterrupt()), 130, ""),
        (FakeJob(at_run=ConfigError("late")), 2, "moe_runtime: late\n"),
        (FakeJob(at_run=CheckpointError("damaged")), 1, "moe_runtime: damaged\n"),
        (FakeJob(at_run=UnsupportedError("cannot")), 1, "moe_runtime: cannot\n"),
        (FakeJob(at_run=KeyboardInterrupt()), 130, ""),
    ],
)
def test_exit_codes(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], job: FakeJob, code: int, err: str
):
    use(monkeypatch, job)
    assert main(["train", "good.toml"]) == code
    assert capsys.readouterr().err == err


@pytest.mark.parametrize(
    "job", [FakeJob(at_run=ZeroDivisionError()), FakeJob(at_prepare=ModuleNotFoundError("no x", name="x"))]
)
def test_defects_keep_their_traceback(alone: Path, monkeypatch: pytest.MonkeyPatch, job: FakeJob):
    use(monkeypatch, job)
    with pytest.raises((ZeroDivisionError, ModuleNotFoundError)):
        main(["train", "good.toml"])


@pytest.mark.parametrize(
    ("job", "code", "err"),
    [
        (FakeJob(at_prepare=ConfigError("same for all")), 2, ""),
        (FakeJob(at_run=CheckpointError("disk full")), 1, "moe_runtime: rank 1: disk full\n"),
    ],
)
def test_other_ranks_wait_and_speak_only_for_themselves(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], job: FakeJob, code: int, err: str
):
    waits: list[float] = []
    monkeypatch.setattr(exits, "time", SimpleNamespace(sleep=waits.append))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    use(monkeypatch, job)
    assert main(["train", "good.toml"]) == code
    assert capsys.readouterr().err == err and waits == [exits.WAIT_SECONDS]


def test_version_and_help(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"moe_runtime {__version__}\n"
    assert main([]) == 0
    assert "doctor" in capsys.readouterr().out
    assert main(["train", "--help"]) == 0
    assert "--resume" in capsys.readouterr().out
