"""The run configuration: sections, the whole, and the checks against ranks, model and machine."""

import dataclasses
import importlib.metadata
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.core.config import from_mapping, to_toml
from moe_runtime.core.errors import ConfigError
from moe_runtime.train.config import (
    Config,
    check_environment,
    check_model,
    check_world,
    claim_run_dir,
    load,
)

QUICKSTART = Path(__file__).parents[2] / "launch" / "configs" / "quickstart.toml"


def write(folder: Path, text: str = "") -> Path:
    path = folder / "small.toml"
    path.write_text(
        '[model]\nmodel_type = "qwen3_moe"\n[train]\nsteps = 10\nglobal_batch_size = 8\n[optim]\nlr = 1e-3\n' + text
    )
    return path


def config(tmp_path: Path, *overrides: str) -> Config:
    return load(write(tmp_path), overrides)


def test_the_quickstart_is_valid_for_its_two_ranks():
    quickstart = load(QUICKSTART)
    check_world(quickstart, 2)
    assert (quickstart.parallel.expert, quickstart.parallel.data, quickstart.run.name) == (2, "fsdp2", "quickstart")
    assert quickstart.model.fields["vocab_size"] >= quickstart.data.vocab_size
    explained = [line for line in QUICKSTART.read_text().splitlines() if " = " in line and not line.startswith("#")]
    assert sum("#" in line for line in explained) > len(explained) / 2


def test_the_saved_config_loads_to_an_equal_one(tmp_path: Path):
    original = load(QUICKSTART, ["model.rope_parameters.rope_theta=5e5", 'log.wandb_project=a "b" \\ ü'])
    (tmp_path / "config.toml").write_text(to_toml(original), encoding="utf-8")
    assert load(tmp_path / "config.toml") == original


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_every_section_survives_the_round_trip(data: st.DataObject):
    original = load(QUICKSTART)
    changed = dataclasses.replace(
        original,
        run=dataclasses.replace(original.run, dir=data.draw(st.text()), seed=data.draw(st.integers(0, 2**63 - 1))),
        model=dataclasses.replace(
            original.model,
            fields=data.draw(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.integers())),
        ),
        optim=dataclasses.replace(original.optim, lr=data.draw(st.floats(min_value=1e-300, max_value=1e300))),
    )
    assert from_mapping(Config, tomllib.loads(to_toml(changed))) == changed


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.step=3", "unknown key 'train.step'; did you mean 'train.steps'?"),
        ("train.lr=3", "unknown key 'train.lr'; did you mean 'optim.lr'?"),
        ("train.steps=0", "train.steps must be finite and at least 1, got 0"),
        ("train.dtype=float16", "train.dtype must be one of 'float32', 'bfloat16', got 'float16'"),
        ("train.validate_every=-1", "train.validate_every must be finite and at least 0, got -1"),
        ("train.microbatches=3", "train.global_batch_size must be a multiple of train.microbatches = 3, got 8"),
        ("run.seed=-1", "run.seed must be in [0, 9223372036854775807], got -1"),
        ("run.name=a/b", "run.name must be a plain name without '/', got 'a/b'; run.dir takes a path"),
        ("run.dir=12", "run.dir must be a string, got 12 (an integer)"),
        ("optim.lr=nan", "optim.lr must be a positive number, got nan"),
        ("optim.lr=inf", "optim.lr must be a positive number, got inf"),
        ("optim.lr=0", "optim.lr must be a positive number, got 0.0"),
        ("optim.beta2=1", "optim.beta2 must be at least 0 and below 1, got 1.0"),
        ("optim.clip_norm=inf", "optim.clip_norm must be finite and at least 0, got inf"),
        ("optim.min_lr_ratio=1.5", "optim.min_lr_ratio must be in [0.0, 1.0], got 1.5"),
        ("optim.momentum=0.9", "optim.momentum is read by optim.name = 'sgd' only, got 0.9 with 'adamw'"),
        ("optim.warmup_steps=11", "optim.warmup_steps must be at most train.steps = 10, got 11"),
        ("router.aux_loss_coefficient=-0.1", "router.aux_loss_coefficient must be finite and at least 0.0, got -0.1"),
        ("router.bias_update_rate=nan", "router.bias_update_rate must be finite and at least 0.0, got nan"),
        ("parallel.data=fsdp", "parallel.data must be one of 'fsdp2', 'ddp', 'none', got 'fsdp'"),
        ("parallel.expert=0", "parallel.expert must be finite and at least 1, got 0"),
        (
            "recipe.name=mx",
            "recipe.name must be one of 'high_precision', 'float8', 'fp8_block', 'mxfp8', 'nvfp4', got 'mx'",
        ),
        (
            "recipe.backward_override=dequantized",
            "recipe.backward_override is read by recipes that quantize, got recipe.name = 'high_precision'",
        ),
        ("recipe.disable_rht=true", "recipe.disable_rht is read by recipe.name = 'nvfp4' only, got 'high_precision'"),
        ("wgrad.schedule=later", "wgrad.schedule must be one of 'inline', 'late', 'deferred', got 'later'"),
        ("wgrad.budget_mb=-1", "wgrad.budget_mb must be finite and at least 0, got -1"),
        ("wgrad.budget_mb=5", "wgrad.budget_mb is read by wgrad.schedule = 'deferred' only, got 5 with 'inline'"),
        ("checkpoint.keep=-1", "checkpoint.keep must be finite and at least 0, got -1"),
        (
            "model.config_file=c.json",
            "expected exactly one of model.config_file and model.model_type, got 'c.json' and",
        ),
        (
            "model.model_type=",
            "expected one of model.config_file, model.model_type and model.checkpoint, got none",
        ),
    ],
)
def test_a_bad_value_is_one_sentence(tmp_path: Path, override: str, sentence: str):
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, override)
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["experts.backend=hf", "parallel.expert=2"], "parallel.expert must be 1 with experts.backend = 'hf'"),
        (["parallel.data=none", "parallel.expert=2"], "parallel.expert must be 1 with parallel.data = 'none', got 2"),
        (
            ["parallel.data=ddp", "parallel.replicate=2"],
            "parallel.replicate applies to parallel.data = 'fsdp2' and must",
        ),
        (
            ["profile.enabled=true", "profile.start_step=9"],
            "profile.start_step + profile.num_steps - 1 must be at most",
        ),
    ],
)
def test_values_that_exclude_each_other(tmp_path: Path, overrides: Sequence[str], sentence: str):
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, *overrides)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        (["parallel.data=none"], 1),
        (["parallel.expert=2"], 4),
        (["parallel.expert=2", "parallel.replicate=2"], 4),
        (["parallel.data=ddp", "parallel.expert=4"], 4),
        (["train.microbatches=4"], 2),
    ],
)
def test_worlds_that_fit(tmp_path: Path, overrides: Sequence[str], world_size: int):
    check_world(config(tmp_path, *overrides), world_size)


@pytest.mark.parametrize(
    ("overrides", "world_size", "sentence"),
    [
        (["parallel.data=none"], 2, "parallel.data = 'none' runs on 1 rank, got 2 ranks"),
        (["parallel.expert=2"], 1, "the number of ranks must be a multiple of parallel.expert = 2, got 1 rank"),
        (
            ["parallel.data=ddp", "parallel.expert=2"],
            3,
            "the number of ranks must be a multiple of parallel.expert = 2, got 3",
        ),
        (["parallel.replicate=3"], 4, "the number of ranks must be a multiple of parallel.replicate = 3, got 4 ranks"),
        (
            ["parallel.replicate=2", "parallel.expert=4"],
            4,
            "the number of ranks / parallel.replicate must be a multiple of parallel.expert = 4, "
            "got 4 ranks / parallel.replicate = 2",
        ),
        (
            ["train.microbatches=2"],
            8,
            "train.global_batch_size must be a multiple of train.microbatches x ranks = 2 x 8 = 16, got 8",
        ),
    ],
)
def test_worlds_that_do_not_fit(tmp_path: Path, overrides: Sequence[str], world_size: int, sentence: str):
    with pytest.raises(ConfigError) as caught:
        check_world(config(tmp_path, *overrides), world_size)
    assert str(caught.value).startswith(sentence)


class FakeConfig:
    """A Hugging Face config class in miniature: unknown keyword arguments become attributes."""

    attribute_map: ClassVar = {"num_local_experts": "num_experts"}

    def __init__(
        self, num_experts: Any = 8, num_experts_per_tok: Any = 2, hidden_size: int = 4, **extra: object
    ) -> None:
        self.num_experts, self.num_experts_per_tok, self.hidden_size = num_experts, num_experts_per_tok, hidden_size
        extra.pop("rope_theta", None)  # converted
        vars(self).update(max_position_embeddings=1024, model_type="fake", **extra)


def test_models_that_fit(tmp_path: Path):
    check_model(config(tmp_path, "parallel.expert=4"), FakeConfig())
    check_model(config(tmp_path), FakeConfig(num_experts_per_tok=[2, 4], num_experts=[8, 4]))
    check_model(config(tmp_path), SimpleNamespace(n_routed_experts=4, moe_topk=4))
    composite = SimpleNamespace(get_text_config=lambda: FakeConfig())
    check_model(config(tmp_path, "parallel.expert=8"), composite)


@pytest.mark.parametrize(
    ("hf_config", "overrides", "sentence"),
    [
        (FakeConfig(num_experts_per_tok=9), [], "model.num_experts_per_tok must be in [1, num_experts = 8], got 9"),
        (FakeConfig(num_experts_per_tok=0), [], "model.num_experts_per_tok must be in [1, num_experts = 8], got 0"),
        (
            FakeConfig(num_experts_per_tok=[1, 5], num_experts=[8, 4]),
            [],
            "model.num_experts_per_tok must be in [1, num_exp",
        ),
        (FakeConfig(), ["parallel.expert=3"], "model.num_experts must be a multiple of parallel.expert = 3, got 8"),
        (
            FakeConfig(),
            ["data.seq_length=2048"],
            "data.seq_length must be at most model.max_position_embeddings = 1024, g",
        ),
        (SimpleNamespace(model_type="llama"), [], "expected a mixture-of-experts model with one of num_experts, "),
    ],
)
def test_models_that_do_not_fit(tmp_path: Path, hf_config: object, overrides: Sequence[str], sentence: str):
    with pytest.raises(ConfigError) as caught:
        check_model(config(tmp_path, *overrides), hf_config)
    assert str(caught.value).startswith(sentence)


def test_unknown_model_fields_are_refused_with_the_nearest(tmp_path: Path):
    fields = {"hidden_size": 8, "num_local_experts": 8, "head_dim": 2, "rope_theta": 1e4}
    overrides = [f"model.{name}={value}" for name, value in fields.items()]
    check_model(config(tmp_path, *overrides), FakeConfig(hidden_size=8, head_dim=2, rope_theta=1e4))
    with pytest.raises(ConfigError, match=r"unknown key 'model.hiden_size'; did you mean 'model.hidden_size'\?"):
        check_model(config(tmp_path, *overrides, "model.hiden_size=8"), FakeConfig(hiden_size=8))


def test_fields_of_the_config_file_are_known(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"odd": 1}')
    overrides = ["model.model_type=", f"model.config_file={tmp_path / 'config.json'}", "model.odd=2"]
    check_model(config(tmp_path, *overrides), FakeConfig(odd=2))
    with pytest.raises(ConfigError, match=r"unknown key 'model.ood'"):
        check_model(config(tmp_path, *overrides, "model.ood=2"), FakeConfig(odd=2, ood=2))


def test_a_checkpoint_brings_its_config_unless_another_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"odd": 1}')
    folder = f"model.checkpoint={tmp_path}"
    alone = config(tmp_path, "model.model_type=", folder, "model.odd=2")
    assert alone.model.config_json == str(tmp_path / "config.json")
    check_environment(alone)
    check_model(alone, FakeConfig(odd=2))
    assert config(tmp_path, folder).model.config_json == ""
    assert config(tmp_path, "model.model_type=", folder, "model.config_file=a.json").model.config_json == "a.json"
    # A run that goes on needs the weights no more.
    (tmp_path / "run").mkdir()
    check_environment(config(tmp_path, "model.checkpoint=gone", f"run.resume={tmp_path / 'run'}"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["model.model_type=", "model.config_file=no.json"],
            "model.config_file must be an existing config.json, got 'no.json'",
        ),
        (["model.checkpoint=gone"], "model.checkpoint must be an existing folder, got 'gone'"),
        (
            ["model.model_type=", "model.checkpoint=wandb"],
            "expected the model's config at wandb/config.json, where no file is; name it in model.config_file",
        ),
        (["run.resume=no/where"], "run.resume must be 'latest' or an existing folder, got 'no/where'"),
        (["run.resume=latest"], "nothing to resume: no folder runs/small-<n> exists"),
        (["run.resume=latest", "run.dir=gone"], "nothing to resume: the run folder 'gone' does not exist"),
        (["log.wandb=true"], "log.wandb = true needs the wandb package, which is not installed"),
    ],
)
def test_what_the_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: Sequence[str], sentence: str
):
    monkeypatch.chdir(tmp_path)
    # W&B leaves such a folder behind; Python would import it as an empty package.
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("importlib.metadata.version", _not_installed)
    with pytest.raises(ConfigError) as caught:
        check_environment(config(tmp_path, *overrides))
    assert str(caught.value).startswith(sentence)


def _not_installed(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_run_folders_are_numbered_from_the_first_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    small = config(tmp_path)
    assert [claim_run_dir(small) for _ in range(3)] == [Path(f"runs/small-{n}") for n in (1, 2, 3)]
    Path("runs/small-2").rmdir()
    assert claim_run_dir(small) == Path("runs/small-2")
    assert claim_run_dir(config(tmp_path, "run.name=other")) == Path("runs/other-1")
    assert claim_run_dir(config(tmp_path, "run.dir=a/b")) == Path("a/b") and Path("a/b").is_dir()


def test_a_run_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    chosen = config(tmp_path, "run.dir=mine")
    check_environment(chosen)
    claim_run_dir(chosen)
    check_environment(chosen)  # an empty folder is nobody's run
    Path("mine/metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"run.dir 'mine' already holds a run; resume it"):
        check_environment(chosen)
    check_environment(config(tmp_path, "run.dir=mine", "run.resume=latest"))


def test_resume_finds_the_folder_that_was_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for number, written in ((1, 300), (2, 200), (10, 100)):
        folder = Path(f"runs/small-{number}")
        (folder / "checkpoints" / "step-5").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("")
        os.utime(folder / "metrics.jsonl", (written, written))
    Path("runs/small-other-7").mkdir()
    Path("runs/small-x").mkdir()
    latest = config(tmp_path, "run.resume=latest")
    check_environment(latest)
    assert claim_run_dir(latest) == Path("runs/small-1")
    assert claim_run_dir(config(tmp_path, "run.resume=runs/small-10")) == Path("runs/small-10")
    # From a single checkpoint a new run starts: the old one stays as it is.
    assert claim_run_dir(config(tmp_path, "run.resume=runs/small-2/checkpoints/step-5")) == Path("runs/small-3")


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot create the run folder '.*file.*': Not a directory"):
        claim_run_dir(config(tmp_path, f"run.dir={tmp_path / 'file' / 'inside'}"))
