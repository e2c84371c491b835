"""Hosts made of namespaces, each with its own address and name, train as one host does, under every launcher."""

import subprocess
import sys
from pathlib import Path

import pytest
from train_runs import arguments, child_environment, command, rows

from moe_runtime.cli import main
from moe_runtime.testing.netns import missing_requirement

ROOT = Path(__file__).parents[2]
needs_namespaces = pytest.mark.skipif(missing_requirement() is not None, reason=str(missing_requirement()))

FEW_STEPS = ("train.steps=3", "train.validate_every=0", "optim.warmup_steps=1", "log.tensorboard=false")
QUICKSTART = ROOT / "launch" / "configs" / "quickstart.toml"


def _on_cluster(run_dir: Path, config: Path, overrides: tuple[str, ...], *options: str) -> str:
    """Train on hosts of a cluster; what was printed."""
    words = ["cluster", *options, "--", *arguments(config, run_dir, overrides)]
    done = subprocess.run(
        [sys.executable, "-m", "moe_runtime", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        env=child_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@needs_namespaces
def test_two_hosts_of_two_ranks_train_the_quickstart_to_the_bits_of_one_host(tmp_path: Path) -> None:
    printed = _on_cluster(tmp_path / "hosts", QUICKSTART, FEW_STEPS, "--hosts=2", "--ranks=2")
    assert "[host0]" in printed and "4 ranks: expert 2, data fsdp2" in printed
    words = command(4, arguments(QUICKSTART, tmp_path / "one", FEW_STEPS))
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=child_environment(), check=False)
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "hosts")
    assert found == rows(tmp_path / "one") and [row["step"] for row in found] == [1, 2, 3]


@needs_namespaces
def test_mpirun_over_two_hosts_trains_to_the_bits_of_torchrun(tiny_config: Path, tmp_path: Path) -> None:
    overrides = (*FEW_STEPS, "parallel.expert=2", "parallel.data=fsdp2")
    _on_cluster(tmp_path / "mpi", tiny_config, overrides, "--hosts=2", "--ranks=1", "--launcher=mpirun")
    words = command(2, arguments(tiny_config, tmp_path / "one", overrides))
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=child_environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "mpi") == rows(tmp_path / "one")


def test_what_slurm_would_run_is_printed_and_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["cluster", "--hosts=3", "--ranks=8", "--launcher=slurm", "--", "train", "c.toml", "--set", "run.name=a b"]
    assert main(words) == 0
    printed = capfd.readouterr().out
    for part in ("--nnodes 3", "--nproc-per-node 8", "--rdzv-endpoint host0:29400", "train c.toml --set run.name=a b"):
        assert part in printed, printed
    script = tmp_path / "launch" / "slurm.sbatch"
    script.parent.mkdir()
    script.write_text('srun torchrun -m moe_runtime train "$1"\n')
    monkeypatch.chdir(tmp_path)
    assert main(words) == 1
    assert "expected srun to run '-m moe_runtime train c.toml --set" in capfd.readouterr().err


REFUSED = {
    "no command": (["cluster"], "Missing argument"),
    "launcher": (["cluster", "--launcher=ssh", "--", "train"], "must be one of torchrun, mpirun, slurm, got 'ssh'"),
    "ranks": (["cluster", "--ranks=0", "--", "train"], "--ranks must be at least 1, got 0"),
    "slurm trains": (["cluster", "--launcher=slurm", "--", "doctor"], "runs the train command, got 'doctor'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_cluster_command_is_one_sentence(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words, sentence = REFUSED[case]
    assert main(words) == 2
    assert sentence in capsys.readouterr().err
