"""Names that a shell would run are names: they work or are refused in a sentence, and nothing is run."""

import os
import subprocess
from pathlib import Path

import pytest
from train_runs import arguments

from moe_runtime.cli import main

LAUNCHER = Path(__file__).parents[2] / "launch" / "torchrun.sh"
NASTY = "a b;touch pwned;$(touch pwned)`touch pwned`'\"&&touch pwned|"
SHORT = ("train.steps=2", "optim.warmup_steps=1", "train.validate_every=0", "log.tensorboard=true")


def test_a_run_in_folders_with_nasty_names(tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / NASTY
    home.mkdir()
    config = home / f"{NASTY}.toml"
    config.write_text(tiny_config.read_text())
    text = home / "text.txt"
    text.write_text("expert router token gate " * 3000)
    overrides = [*SHORT, f"data.source='''{text}'''", "data.validation_fraction=0.5"]
    assert main(arguments(config, home / "run", overrides)) == 0
    modes = {path: path.stat().st_mode & 0o077 for path in (home / "run").rglob("*")}
    assert len(modes) > 8 and not any(modes.values()), modes
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("key", ["model.model_type", "run.resume", "data.source", "experts.backend"])
def test_a_nasty_value_is_refused_in_a_sentence(
    key: str, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments(tiny_config, tmp_path / "run", [f"{key}=$(touch pwned);`touch pwned`"])) == 2
    printed = capsys.readouterr().err.strip()
    assert "touch pwned" in printed and printed.count("\n") == 0
    assert not list(tmp_path.rglob("pwned"))


def test_the_launch_script_hands_words_on_as_they_are(tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "torchrun"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nprintf "%s\\n" "$TORCHELASTIC_SIGNALS_TO_HANDLE"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", str(LAUNCHER), f"{NASTY}.toml", "--set", f"run.dir={NASTY}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"},
    )
    words = done.stdout.splitlines()
    assert words[-5:-1] == ["train", f"{NASTY}.toml", "--set", f"run.dir={NASTY}"]
    assert "SIGUSR1" in words[-1].split(",") and "SIGTERM" in words[-1].split(",")
    assert not (tmp_path / "pwned").exists()
