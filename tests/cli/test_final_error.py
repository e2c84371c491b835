"""Errors that no restart can cure: the file for torchrun's agent, and no second attempt."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_runtime.cli.exits import FAILED, USAGE, fail


def test_a_usage_error_writes_the_agents_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert fail("a disk\nis full", code=FAILED) == FAILED
    assert not (tmp_path / "error.json").exists()
    assert fail("no such\nkey", code=USAGE) == USAGE
    content = json.loads((tmp_path / "error.json").read_text())
    assert content["reason"] == "no such key"
    assert content["errorTraits"]["retryability"] == "False"
    assert capsys.readouterr().err.count("no such key") == 1
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    assert fail("no such key", code=USAGE) == USAGE
    assert "no final-error file" in capsys.readouterr().err


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_torchrun_tries_a_bad_configuration_once(max_restarts: int, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launcher += [f"--max-restarts={max_restarts}", "--log-dir", str(tmp_path / "logs"), "--redirects", "0"]
    done = subprocess.run(
        [*launcher, "-m", "moe_runtime", "train", str(tmp_path / "none.toml")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode != 0
    assert done.stderr.count("moe_runtime: ") == 1 and "none.toml" in done.stderr
    reports = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("error.json"))
    assert reports and all("attempt_0" in path.parts for path in reports), reports
