"""The adapters' benchmark at a tiny size: every arm computes the same loss, and a wrong one ends the run."""

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_runtime.bench import lora

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, lora.Measured]:
    folder = lora.write_base(tmp_path_factory.mktemp("base") / "tiny", "tiny", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT's imports
        return {
            arm: lora.measure(arm, folder, shape="tiny", tokens=32, sequence=16, rank=2, steps=1, device=CPU)
            for arm in lora.ARMS
        }


def test_stored_bytes_a_parameter(found: dict[str, lora.Measured]) -> None:
    got = {arm: measured.expert_bytes_per_parameter for arm, measured in found.items()}
    assert got["bf16"] == got["peft"] == 2 and got["mxfp8"] == 33 / 32 and got["default"] == 33 / 16
    assert got["nvfp4"] == pytest.approx(0.5625, rel=0.01)


def test_losses_are_compared(found: dict[str, lora.Measured]) -> None:
    arms = list(found.values())
    lora.check_losses(arms)
    with pytest.raises(SystemExit, match="nvfp4's first loss is"):
        lora.check_losses([*arms, replace(found["nvfp4"], first_loss=2 * found["nvfp4"].first_loss)])
    rows = lora.table(arms).splitlines()
    assert len(rows) == 2 + len(arms) and rows[2].startswith("| bf16 | 2.000 |")


def test_the_folder_is_written_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "lines.jsonl"
    options = f"--layers 1 --arms mxfp8 --rank 2 --device cpu --tokens 16 --steps 1 --folder {tmp_path / 'base'}"
    monkeypatch.setattr(sys, "argv", ["lora", *options.split(), "--json", str(lines)])
    for _ in range(2):
        lora.main()
    assert capsys.readouterr().out.count("wrote ") == 1
    assert len(lines.read_text().splitlines()) == 2
