"""The finetune command from start to end: what a run leaves, resume, every layout, every kind of base, and refusals."""

import hashlib
import json
import random
import subprocess
from pathlib import Path

import pytest
from train_runs import child_environment, command, rows

from moe_runtime import checkpoint
from moe_runtime.cli import main

CONFIG = """
[run]
seed = 5
[base]
path = "{base}"
[data]
source = "{data}"
seq_length = 32
validation_fraction = 0.1
[lora]
rank = 4
alpha = 16.0
[train]
steps = 12
global_batch_size = 8
microbatches = 2
validate_every = 6
validation_batches = 1
checkpoint_every = 6
[optim]
lr = 0.02
warmup_steps = 2
weight_decay = 0.0
[parallel]
data = "none"
[log]
tensorboard = false
"""
WORDS = ["expert", "router", "token", "gate", "weight", "rank", "shard", "batch", "loss", "step"]
SGD = ("optim.name=sgd", "optim.lr=1.0", "train.validate_every=0")


@pytest.fixture(scope="module")
def base(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a tiny model."""
    folder = tmp_path_factory.mktemp("base") / "run"
    assert main(["train", str(tiny_config), "--set", f"run.dir={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def config(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose task is to swap two words."""
    folder = tmp_path_factory.mktemp("finetune")
    rng = random.Random(0)
    with (folder / "pairs.jsonl").open("w") as file:
        for _ in range(300):
            first, second = rng.choice(WORDS), rng.choice(WORDS)
            file.write(json.dumps({"prompt": f"{first} {second} =", "completion": f" {second} {first}"}) + "\n")
    path = folder / "swap.toml"
    path.write_text(CONFIG.format(base=base, data=folder / "pairs.jsonl"))
    return path


def words(config: Path, run_dir: Path, *overrides: str, resume: str = "") -> list[str]:
    found = ["finetune", str(config), "--set", f"run.dir={run_dir}"]
    for override in overrides:
        found += ["--set", override]
    return found + (["--resume", resume] if resume else [])


def finetuned(config: Path, run_dir: Path, *overrides: str, resume: str = "") -> list[dict[str, float]]:
    assert main(words(config, run_dir, *overrides, resume=resume)) == 0
    return rows(run_dir)


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def largest_gap(one: list[dict[str, float]], other: list[dict[str, float]], key: str = "loss") -> float:
    assert [row["step"] for row in one] == [row["step"] for row in other]
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(one, other, strict=True))


def test_a_run_learns_and_leaves_adapters_alone(
    config: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digest(base)
    found = finetuned(config, tmp_path / "run", "train.steps=40")
    assert digest(base) == before
    assert found[-1]["loss"] < found[0]["loss"] - 0.5
    outcome = json.loads((tmp_path / "run" / "finetune.json").read_text())
    assert outcome["held_out_loss_after"] < 0.85 * outcome["held_out_loss_before"]  # 0.82 when this was written
    assert outcome["reduction"] == pytest.approx(1 - outcome["held_out_loss_after"] / outcome["held_out_loss_before"])
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"metrics.jsonl", "report.png", "config.toml", "model.json", "tokenizer.json", "checkpoints"} <= left
    shapes = checkpoint.verify(tmp_path / "run" / "checkpoints" / "step-000040")
    saved = {name for name in shapes if not name.startswith("random.")}
    assert saved and all(".lora." in name for name in saved)
    printed = capsys.readouterr().err
    assert printed.index("planned memory of a rank") < printed.index("memory of rank 0: measured peak")
    assert outcome["planned_bytes"] > 0 and outcome["measured_bytes"] > 0
    described = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["base_model_name_or_path"]) == (4, str(base / "checkpoints" / "step-000020"))
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").stat().st_size > 4 * 5120


def test_resumed_equals_undisturbed_to_the_bit(config: Path, tmp_path: Path) -> None:
    whole = finetuned(config, tmp_path / "whole")
    start = tmp_path / "whole" / "checkpoints" / "step-000006"
    rest = finetuned(config, tmp_path / "rest", resume=str(start))
    assert rest == whole[6:]
    outcomes = [json.loads((tmp_path / name / "finetune.json").read_text()) for name in ("whole", "rest")]
    for key in ("held_out_loss_before", "held_out_loss_after"):
        assert outcomes[0][key] == outcomes[1][key]
    again = finetuned(tmp_path / "whole" / "config.toml", tmp_path / "again")
    assert again == whole


def test_microbatches_do_not_change_what_is_learned(config: Path, tmp_path: Path) -> None:
    # Rows hold different numbers of learned tokens, so a mean of means would differ in the first step.
    one = finetuned(config, tmp_path / "one", *SGD, "train.microbatches=1")
    eight = finetuned(config, tmp_path / "eight", *SGD, "train.microbatches=8")
    assert largest_gap(one, eight) < 1e-5 and largest_gap(one, eight, "grad_norm") < 1e-4
    assert one[-1]["loss"] < one[0]["loss"] - 0.02


@pytest.mark.parametrize(
    ("expert", "data"),
    [
        (2, "fsdp2"),
        pytest.param(1, "fsdp2", marks=pytest.mark.slow),
        pytest.param(1, "ddp", marks=pytest.mark.slow),
    ],
)
def test_ranks_learn_what_one_process_does(config: Path, tmp_path: Path, expert: int, data: str) -> None:
    alone = finetuned(config, tmp_path / "alone", *SGD)
    layout = (f"parallel.expert={expert}", f"parallel.data={data}")
    done = run_ranks(words(config, tmp_path / "split", *SGD, *layout))
    assert done.returncode == 0, done.stderr
    assert largest_gap(rows(tmp_path / "split"), alone) < 1e-5
    assert largest_gap(rows(tmp_path / "split"), alone, "grad_norm") < 1e-4
    exported = [
        (tmp_path / name / "adapter" / "adapter_model.safetensors").stat().st_size for name in ("alone", "split")
    ]
    assert exported[0] == exported[1]
    # What two ranks saved, one opens.
    start = tmp_path / "split" / "checkpoints" / "step-000006"
    rest = finetuned(config, tmp_path / "rest", *SGD, resume=str(start))
    assert largest_gap(rest, alone[6:]) < 1e-5


def run_ranks(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(2, arguments), capture_output=True, text=True, timeout=200, env=child_environment(), check=False
    )


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_quantized_base_learns_too(config: Path, tmp_path: Path, recipe: str) -> None:
    stored = (f"recipe.name={recipe}", "recipe.backward_override=dequantized")
    found = finetuned(config, tmp_path / "row", *stored, "recipe.omit_columnwise_weights=true")
    assert found[-1]["loss"] < found[0]["loss"] - 0.1
    # Which directions are stored changes no bit of a backward that reads dequantized values.
    assert found == finetuned(config, tmp_path / "both", *stored)


def test_a_hugging_face_folder_is_as_good_a_base(config: Path, base: Path, tmp_path: Path) -> None:
    assert main(["convert", str(base), str(tmp_path / "hf")]) == 0
    from_run = finetuned(config, tmp_path / "a")
    with_tokenizer = ("base.path=" + str(tmp_path / "hf"), f"data.tokenizer={base / 'tokenizer.json'}")
    assert finetuned(config, tmp_path / "b", *with_tokenizer) == from_run


def test_conversations_are_learned_by_their_template(config: Path, tmp_path: Path) -> None:
    rng = random.Random(1)
    with (tmp_path / "chat.jsonl").open("w") as file:
        for _ in range(120):
            turns = [{"role": role, "content": rng.choice(WORDS)} for role in ("user", "assistant")]
            file.write(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    data = (f"data.source={tmp_path / 'chat.jsonl'}", f"data.chat_template={tmp_path / 'chat.jinja'}")
    found = finetuned(config, tmp_path / "run", *data)
    assert found[-1]["loss"] < found[0]["loss"]


@pytest.mark.parametrize(
    ("overrides", "code", "sentence"),
    [
        (["lora.rank=0"], 2, "lora.rank must be at least 1, got 0"),
        (["lora.rank=40"], 2, "[lora] rank must be at most min(in, out) = 32 of model.layers.0"),
        (["lora.target_modules=['gate_upp']"], 2, "[lora] target_modules must name layers among"),
        (["lora.target_modules=['gate_upp']"], 2, "got 'gate_upp'; did you mean 'gate_up'?"),
        (["recipe.name=mxfp8", "recipe.omit_columnwise_weights=true"], 2, "needs recipe.backward_override"),
        (["base.path=nowhere"], 2, "base.path must be a Hugging Face folder with a config.json"),
        (["data.source=nowhere"], 2, "data.source must be 'stdlib', a .jsonl file, or a folder of them, got 'nowhere'"),
        (["data.seq_length=2"], 2, "data.seq_length must hold every sample to train on, got 2"),
        (["data.seq_length=4096"], 2, "data.seq_length must be at most model.max_position_embeddings = 64, got 4096"),
        (["router.bias_update_rate=0.1"], 2, "unknown key 'router'"),
        (["lora.share_outer=true", "lora.rank=33"], 2, "[lora] rank must be at most min(in, out) = 32"),
    ],
)
def test_what_cannot_be_is_refused_before_memory_is_filled(
    config: Path,
    tmp_path: Path,
    overrides: list[str],
    code: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("moe_runtime.train.loop.run", lambda *a, **k: pytest.fail("the loop was entered"))
    assert main(words(config, tmp_path / "run", *overrides)) == code
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("moe_runtime: ")]
    assert len(printed) == 1 and sentence in printed[0], printed
    assert not (tmp_path / "run").exists()


def test_adapters_of_another_base_or_in_other_data_are_not_resumed(
    config: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finetuned(config, tmp_path / "run", "train.steps=2", "optim.warmup_steps=1")
    other = tmp_path / "other"
    assert main(["train", str(tiny_config), "--set", f"run.dir={other}", "--set", "run.seed=4"]) == 0
    monkeypatch.setattr("moe_runtime.train.loop.run", lambda *a, **k: pytest.fail("the loop was entered"))
    capsys.readouterr()
    start = str(tmp_path / "run" / "checkpoints" / "step-000002")
    assert main(words(config, tmp_path / "again", f"base.path={other}", resume=start)) == 1
    assert f"{start} belongs to another base: expected adapters of {other}" in capsys.readouterr().err
    assert main(words(config, tmp_path / "again", "data.packing=false", resume=start)) == 1
    assert f"{start} stands at a position in other data" in capsys.readouterr().err
    whole = str(other / "checkpoints" / "step-000020")
    assert main(words(config, tmp_path / "again", resume=whole)) == 1
    assert "got no adapters of a fine-tuning run" in capsys.readouterr().err
