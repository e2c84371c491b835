"""A fine-tuning configuration: what it refuses, what the loop sees of it, and which base it means."""

import json
import os
from pathlib import Path

import pytest

from moe_runtime.core.config import to_toml
from moe_runtime.core.errors import ConfigError
from moe_runtime.train.finetune_config import FinetuneConfig, as_training, config_text, find_base, load

GOOD = """
[base]
path = "base"
[data]
seq_length = 64
[lora]
rank = 4
[train]
steps = 3
global_batch_size = 2
[optim]
lr = 1e-3
"""


def config(tmp_path: Path, *overrides: str) -> FinetuneConfig:
    (tmp_path / "c.toml").write_text(GOOD)
    return load(tmp_path / "c.toml", list(overrides))


def run_folder(path: Path, *steps: int) -> Path:
    path.mkdir(parents=True)
    (path / "model.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    for step in steps:
        (path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        (path / "checkpoints" / f"step-{step:06d}" / "manifest.json").write_text(json.dumps({"files": {}}))
    return path


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["lora.rank=0"], "lora.rank must be at least 1, got 0"),
        (["lora.alpha=0"], "lora.alpha must be positive, got 0.0"),
        (["lora.dropout=1"], "lora.dropout must be at least 0 and below 1, got 1.0"),
        (["lora.target_modules=[]"], "lora.target_modules must name a module, got none"),
        (["lora.rnk=3"], "unknown key 'lora.rnk'; did you mean 'lora.rank'?"),
        (["base.run=quickstart"], "expected exactly one of base.path and base.run, got 'base' and 'quickstart'"),
        (["base.path="], "expected exactly one of base.path and base.run, got neither"),
        (
            ["recipe.name=mxfp8", "recipe.omit_columnwise_weights=true"],
            "recipe.omit_columnwise_weights needs recipe.backward_override and recipe.quantized_weights, got ''",
        ),
        (["optim.warmup_steps=9"], "optim.warmup_steps must be at most train.steps = 3, got 9"),
        (["train.microbatches=3"], "train.global_batch_size must be a multiple of train.microbatches = 3, got 2"),
        (["router.bias_update_rate=1"], "unknown key 'router'"),
    ],
)
def test_what_cannot_run_is_one_sentence(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, *overrides)
    assert str(caught.value).startswith(sentence)


def test_the_loop_sees_the_same_tables(tmp_path: Path) -> None:
    given = config(tmp_path, "recipe.name=mxfp8", "recipe.backward_override=dequantized", "parallel.data=none")
    seen = as_training(given, tmp_path / "model.json")
    assert (seen.train, seen.optim, seen.recipe, seen.parallel) == (
        given.train,
        given.optim,
        given.recipe,
        given.parallel,
    )
    assert seen.data.seq_length == 64 and seen.model.config_file == str(tmp_path / "model.json")
    assert seen.run.name == "c"


def test_a_run_a_checkpoint_and_a_hugging_face_folder_are_bases(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 50, 100)
    newest = run / "checkpoints" / "step-000100"
    base = find_base(config(tmp_path, f"base.path={run}").base)
    assert (base.folder, base.checkpoint, base.config_file) == (run, newest, run / "model.json")
    assert base.tokenizer == run / "tokenizer.json"
    chosen = run / "checkpoints" / "step-000050"
    assert find_base(config(tmp_path, f"base.path={chosen}").base).checkpoint == chosen
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    base = find_base(config(tmp_path, f"base.path={folder}").base)
    assert (base.checkpoint, base.config_file, base.tokenizer) == (None, folder / "config.json", None)
    (folder / "tokenizer_config.json").write_text("{}")
    assert find_base(config(tmp_path, f"base.path={folder}").base).tokenizer == folder


def test_a_name_means_its_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = config(tmp_path, "base.path=", "base.run=quick").base
    with pytest.raises(
        ConfigError, match=r"base\.run 'quick' must name a run with a checkpoint, got no such folder runs/quick-<n>"
    ):
        find_base(named)
    for number in (1, 2, 10):
        run_folder(tmp_path / "runs" / f"quick-{number}", 5)
    os.utime(tmp_path / "runs" / "quick-2", (2e9, 2e9))
    os.utime(run_folder(tmp_path / "runs" / "quick-3"), (3e9, 3e9))  # stopped before its first checkpoint
    assert find_base(named).folder == Path("runs/quick-2")


def test_what_is_no_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"base\.path must be a Hugging Face folder with a config\.json, a run's folder"
    ):
        find_base(config(tmp_path, f"base.path={tmp_path / 'nothing'}").base)
    with pytest.raises(ConfigError, match="must hold a checkpoint, got none in"):
        find_base(config(tmp_path, f"base.path={run_folder(tmp_path / 'run')}").base)


def test_the_run_folders_config_does_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "runs" / "quick-1", 5)
    given = config(tmp_path, "base.path=", "base.run=quick", "run.resume=latest", "lora.rank=7")
    base = find_base(given.base)
    (tmp_path / "again.toml").write_text(config_text(given, base, tmp_path / "out"))
    again = load(tmp_path / "again.toml")
    assert find_base(again.base).checkpoint == base.checkpoint
    assert (again.run.dir, again.run.resume, again.lora) == (str(tmp_path / "out"), "", given.lora)
    assert to_toml(again.train) == to_toml(given.train)
