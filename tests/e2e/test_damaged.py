"""Checkpoints that went wrong on the disk: the one before is taken, by name, and the end is as if nothing had been."""

from pathlib import Path

from train_runs import Train, rows

RUN = ("train.validate_every=0", "train.checkpoint_every=4", "train.steps=12")


def test_a_flipped_byte_in_the_newest_checkpoint_costs_the_steps_since_the_one_before(
    tmp_path: Path, train: Train
) -> None:
    assert train(tmp_path / "run", *RUN).returncode == 0
    before = rows(tmp_path / "run")
    data = max(
        (tmp_path / "run" / "checkpoints" / "step-000012").glob("*.distcp"), key=lambda path: path.stat().st_size
    )
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 0x10
    data.write_bytes(content)
    resumed = train(tmp_path / "run", *RUN, resume="latest")
    assert resumed.returncode == 0, resumed.stderr
    assert (
        f"step-000012 is damaged: {data.name} does not match its checksum; trying the one before it" in resumed.stderr
    )
    assert "resumed after step 8" in resumed.stderr
    assert rows(tmp_path / "run") == before
