"""The slow checks come in their order, and the report is drawn by rank 0 after the loop."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_runtime.cli import job as job_module
from moe_runtime.cli.job import Job, prepare_job
from moe_runtime.comm.bootstrap import Launch
from moe_runtime.core.errors import ConfigError
from moe_runtime.train.config import Config, load

MODEL = """
[model]
model_type = "qwen3_moe"
vocab_size = 300
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
num_experts = 4
num_experts_per_tok = 2
rope_parameters = { rope_type = "default", rope_theta = 1e4 }
[train]
steps = 1
global_batch_size = 1
[optim]
lr = 0.1
"""


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the data was prepared with; nothing is read or tokenized."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(job_module, "prepare", lambda config, **options: calls.append(options) or "tokens")
    monkeypatch.setattr(job_module.log, "configure", lambda rank: None)
    return calls


def config(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "c.toml").write_text(MODEL)
    return load(tmp_path / "c.toml", overrides)


def test_the_data_is_prepared_for_the_models_vocabulary(tmp_path: Path, prepared: list[dict[str, Any]]):
    given = config(tmp_path)
    job = prepare_job(given, Launch())
    assert prepared == [{"model_vocab_size": 300}]
    assert job.hf_config.num_experts == 4 and job.data == "tokens"
    assert given.model.fields["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.num_experts_per_tok=5", "model.num_experts_per_tok must be in [1, num_experts = 4], got 5"),
        ("model.hiden_size=8", "unknown key 'model.hiden_size'"),
        ("model.model_type=gpt7", "model.model_type must be one that transformers knows, got 'gpt7'"),
    ],
)
def test_a_bad_model_is_found_before_the_data(
    tmp_path: Path, prepared: list[dict[str, Any]], override: str, sentence: str
):
    with pytest.raises(ConfigError) as caught:
        prepare_job(config(tmp_path, override), Launch())
    assert str(caught.value).startswith(sentence) and prepared == []


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int, report: Any) -> list[Path]:
    drawn: list[Path] = []

    def draw(folder: Path) -> Path:
        drawn.append(folder)
        if report is not None:
            raise report
        return folder / "report.png"

    monkeypatch.setattr(job_module, "loop", SimpleNamespace(run=lambda *arguments: tmp_path / "run"))
    monkeypatch.setattr(job_module, "write_report", draw)
    tokens: Any = "tokens"
    Job(config=config(tmp_path), launch=Launch(rank=rank, world_size=2), hf_config=None, data=tokens).run()
    return drawn


def test_rank_zero_draws_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert run(monkeypatch, tmp_path, 0, None) == [tmp_path / "run"]
    assert run(monkeypatch, tmp_path, 1, None) == []


@pytest.mark.parametrize("error", [ImportError("needs matplotlib"), ValueError("no steps"), OSError("disk full")])
def test_a_report_that_cannot_be_drawn_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, error: BaseException
):
    run(monkeypatch, tmp_path, 0, error)
    assert [record.getMessage() for record in caplog.records] == [f"no report: {error}"]
