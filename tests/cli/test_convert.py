"""The convert command: what it writes opens where it should, and every mistake is a sentence and an exit code."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import COMMON, config_of, folder_of, randomize, reference
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from moe_runtime import checkpoint
from moe_runtime.checkpoint import hf as folders
from moe_runtime.cli import main
from moe_runtime.core.config import to_toml
from moe_runtime.integrations import transformers as hf
from moe_runtime.train import setup
from moe_runtime.train.config import load as load_config

RUN = """
[model]
model_type = "qwen3_moe"
num_experts = 6
[train]
steps = 4
global_batch_size = 4
[optim]
lr = 1e-2
[parallel]
data = "none"
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folder_of(reference("qwen3_moe"), tmp_path / "theirs")


def _state(folder: Path | str) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def _assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_folder_to_the_other_style(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "theirs", "fused", "--style", "fused", "--dtype", "bfloat16", "--shard-gb", "2e-5"]) == 0
    assert capsys.readouterr().out == "fused\n"
    weights = json.loads(Path("fused/model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.1.mlp.experts.gate_up_proj" in weights and len(set(weights.values())) > 3
    _assert_same(_state("fused"), {key: value.bfloat16() for key, value in _state(source).items()})


def test_upcycle(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {**COMMON, "intermediate_size": 48, "head_dim": 8}
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **fields)).eval()
    randomize(dense, 1)
    folder_of(dense, Path("dense"))
    assert main(["convert", "dense", "moe", "--upcycle", "granularity=2,expansion=3,top_k=4"]) == 0
    mixture = AutoModelForCausalLM.from_pretrained("moe").eval()
    assert (mixture.config.num_experts, mixture.config.num_experts_per_tok) == (6, 4)
    ids = torch.arange(20).view(1, 20)
    expected = dense(input_ids=ids).logits
    assert (mixture(input_ids=ids).logits - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize(
    "overrides",
    [
        ["experts.single_grouped_weight=false"],
        ["train.dtype=bfloat16"],
        ["recipe.name=fp8_block", "recipe.quantized_weights=true"],
    ],
    ids=["discrete", "bf16", "quantized"],
)
def test_run_to_folder(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(RUN)
    config = load_config(Path("config.toml"), overrides)
    fields = {"hidden_size": 128, "moe_intermediate_size": 128} if "recipe" in overrides[0] else {}
    trainee = setup.build(config, config_of("qwen3_moe", **fields), torch.device("cpu"))
    ids = torch.arange(24).view(1, 24)
    trainee.model(input_ids=ids, use_cache=False).logits.square().mean().backward()
    trainee.optimizer.step()
    checkpoint.save(tmp_path / "run" / "checkpoints", 1, trainee.model, trainee.optimizer, {})
    (tmp_path / "run" / "config.toml").write_text(RUN)
    config_of("qwen3_moe", **fields).to_json_file(tmp_path / "run" / "model.json")
    assert main(["convert", "run", "ours"]) == 0
    assert main(["convert", "run/checkpoints/step-000001", "fused", "--style", "fused"]) == 0
    found = AutoModelForCausalLM.from_pretrained("ours")
    _assert_same(_state("fused"), found.state_dict())
    # Back into a model of ours, the weights are the masters where there are some, and the parameters where not.
    ours = hf.build(config_of("qwen3_moe", **fields), single_grouped_weight=config.experts.single_grouped_weight)
    folders.load(ours, "ours")
    state = trainee.optimizer.state
    for (name, value), parameter in zip(ours.named_parameters(), trainee.inner.parameters(), strict=True):
        expected = state[parameter].get("master", parameter)
        assert torch.equal(value.detach(), expected.detach().float()), name


@pytest.mark.parametrize(
    "overrides",
    [[], ["train.dtype=bfloat16"], ["parallel.data=fsdp2"], ["recipe.name=mxfp8"]],
    ids=["fp32", "bf16", "fsdp2", "quantized"],
)
def test_folder_to_a_run_and_back(overrides: list[str], source: Path, tmp_path: Path) -> None:
    if "recipe" in "".join(overrides):
        source = folder_of(reference("qwen3_moe", moe_intermediate_size=32), tmp_path / "wide")
    Path("mine.toml").write_text(RUN)
    Path("mine.toml").write_text(to_toml(load_config(Path("mine.toml"), overrides)))
    assert main(["convert", source.name, "run", "--config", "mine.toml"]) == 0
    saved = load_config(Path("run/config.toml"))
    assert saved.run.dir == "run" and saved.model.config_file.endswith("run/model.json")
    step = checkpoint.latest(Path("run/checkpoints"))
    assert step is not None and step.name == "step-000000"
    entries = checkpoint.verify(step)
    moments = [name for name in entries if name.endswith(("exp_avg", "exp_avg_sq", ".step"))]
    assert moments and not any(value.any() for value in checkpoint.read_entries(step, moments).values())
    assert any(name.endswith(".master") for name in entries) == (overrides not in ([], ["parallel.data=fsdp2"]))
    assert main(["convert", "run", "back"]) == 0
    _assert_same(_state("back"), _state(source))


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["theirs"], 2, "Missing argument 'DST'."),
        (["none", "out"], 2, "expected a Hugging Face folder, a run or a checkpoint to convert, got 'none'"),
        (["theirs", "out", "--style", "v4"], 2, "--style must be one of per_expert, fused, got 'v4'"),
        (["theirs", "out", "--dtype", "fp8"], 2, "--dtype must be one of float32, bfloat16, float16, got 'fp8'"),
        (["theirs", "out", "--shard-gb", "0"], 2, "--shard-gb must be positive, got 0.0"),
        (["theirs", "out", "--ignore", "("], 2, "--ignore must be a regular expression, got '('"),
        (["theirs", "out", "--upcycle", "expansion"], 2, "--upcycle must read key=value,key=value, got 'expansion'"),
        (["theirs", "out", "--upcycle", "copies=2"], 2, "unknown key '--upcycle.copies'"),
        (["theirs", "out", "--upcycle", "expansion=two"], 2, "--upcycle expansion must be a number, got 'two'"),
        (["theirs", "out", "--upcycle", "expansion=2"], 1, "a dense model must be one of llama, mistral, qwen3"),
        (["theirs", "out", "--config", "none.toml"], 2, "cannot read the config file none.toml"),
        (["theirs", "out", "--config", "c", "--upcycle", "expansion=2"], 2, "--upcycle writes a Hugging Face folder"),
        (["theirs", "theirs"], 1, "theirs exists already and is not empty"),
        (["empty", "out"], 2, "expected a Hugging Face folder with a config.json, got 'empty'"),
        (["run", "out"], 1, "nothing to convert: run/checkpoints holds no whole checkpoint"),
    ],
)
def test_mistakes_are_sentences(
    arguments: list[str], code: int, sentence: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    Path("run/checkpoints").mkdir(parents=True)
    assert main(["convert", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith(f"moe_runtime: {sentence}") and captured.err.count("\n") == 1
    assert captured.out == "" and not Path("out").exists()


def test_a_damaged_or_foreign_checkpoint_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text(RUN)
    assert main(["convert", "theirs", "run", "--config", "mine.toml"]) == 0
    config_of("qwen3_moe", num_hidden_layers=1).to_json_file(tmp_path / "run" / "model.json")
    capsys.readouterr()
    assert main(["convert", "run", "out"]) == 1
    assert "belongs to another model: it holds model.model.layers.1." in capsys.readouterr().err
    data = next(Path("run/checkpoints/step-000000").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    assert main(["convert", "run", "out"]) == 1
    assert "is damaged" in capsys.readouterr().err
    assert not Path("out").exists()


def test_left_over_keys_are_ignored_only_when_named(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "mtp.weight": torch.ones(2)}, source / "model.safetensors", metadata={"format": "pt"})
    assert main(["convert", "theirs", "out"]) == 1
    assert "holds mtp.weight, which belongs to no tensor" in capsys.readouterr().err
    assert main(["convert", "theirs", "out", "--ignore", "^mtp"]) == 0
