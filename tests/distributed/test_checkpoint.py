"""Checkpoints: saved at one layout, loaded at any other, bit for bit; damage and other models are refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parallel_cases import load, load_other_model, save

from moe_runtime import checkpoint
from moe_runtime.checkpoint import files
from moe_runtime.core.errors import CheckpointError
from moe_runtime.testing.ranks import RankPool

Ranks = Callable[[int], RankPool]

LAYOUTS = [(1, "none", 1), (2, "ddp", 2), (2, "fsdp2", 1), (2, "fsdp2", 2), (4, "fsdp2", 2), (4, "ddp", 4)]
PAIRS = [
    (saved, loaded, discrete)
    for index, saved in enumerate(LAYOUTS)
    for loaded in (LAYOUTS[(index + 1) % len(LAYOUTS)], LAYOUTS[(index + 3) % len(LAYOUTS)])
    for discrete in ((False, True) if saved[0] == 2 else (False,))
]


def _run(ranks: Ranks, layout: tuple, function: Callable, folder: Path, *extra: object) -> list:
    world, data, expert = layout
    if world == 1:
        return [function(str(folder), data, expert, *extra)]
    return ranks(world).run(function, str(folder), data, expert, *extra)


@pytest.mark.parametrize(
    ("saved", "loaded", "discrete"),
    PAIRS,
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else ("grouped", "discrete")[value],
)
def test_saved_at_one_layout_loaded_at_another(
    saved: tuple, loaded: tuple, discrete: bool, ranks: Ranks, tmp_path: Path
) -> None:
    before = {name: value for part in _run(ranks, saved, save, tmp_path, discrete) for name, value in part.items()}
    results = _run(ranks, loaded, load, tmp_path, discrete)
    after = {name: value for part, _ in results for name, value in part.items()}
    assert after.keys() == before.keys()
    assert any(name.endswith("exp_avg_sq") for name in after)
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    assert results[0][1] == {"note": "two steps", "step": 2}


def test_checkpoint_of_another_model_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    _run(ranks, (2, "fsdp2", 2), save, tmp_path, False)
    sentences = ranks(2).run(load_other_model, str(tmp_path), "fsdp2", 2)
    for sentence in sentences:
        assert "belongs to another model" in sentence
        assert "should have shape [" in sentence and "the checkpoint has [" in sentence


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(str(tmp_path), "none", 1, False)
    return tmp_path


def test_damage_is_found_before_anything_is_loaded(saved: Path) -> None:
    data = next((saved / "step-000002").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged: .* does not match its checksum"):
        load(str(saved), "none", 1, False)
    data.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"has \d+ bytes, expected \d+"):
        load(str(saved), "none", 1, False)
    data.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load(str(saved), "none", 1, False)


def test_half_written_folder_is_never_the_latest(saved: Path) -> None:
    (saved / "step-000009").mkdir()
    (saved / ".step-000010.tmp").mkdir()
    assert checkpoint.latest(saved) == saved / "step-000002"
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        checkpoint.read_facts(saved / "step-000009")


def test_unknown_format_is_refused(saved: Path) -> None:
    manifest = saved / "step-000002" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="has format 99, expected 1"):
        checkpoint.read_facts(saved / "step-000002")


def test_failed_save_leaves_earlier_checkpoints_and_no_part(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "publish", full)
    with pytest.raises(CheckpointError, match=r"could not be written to .*: .*No space left on device"):
        save(str(saved), "none", 1, False)
    assert sorted(path.name for path in saved.iterdir()) == ["step-000002"]
    monkeypatch.undo()
    state, _ = load(str(saved), "none", 1, False)
    assert all(torch.isfinite(value).all() for value in state.values())


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    model, optimizer = torch.nn.Linear(2, 2), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, model, optimizer, {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000005"]
