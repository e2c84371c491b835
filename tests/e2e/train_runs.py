"""Runs of the real command on a tiny model and a tiny text, with the launcher that users have."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

TINY = """
[run]
seed = 3
[data]
source = "{source}"
cache_dir = "{cache}"
vocab_size = 300
seq_length = 32
[model]
model_type = "qwen3_moe"
vocab_size = 304
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
num_experts = 4
num_experts_per_tok = 2
norm_topk_prob = true
moe_intermediate_size = 32
max_position_embeddings = 64
[router]
aux_loss_coefficient = 0.01
[train]
steps = 20
global_batch_size = 8
microbatches = 2
validate_every = 10
validation_batches = 2
checkpoint_every = 0
[optim]
name = "adamw"
lr = 0.01
warmup_steps = 4
[parallel]
data = "none"
[log]
tensorboard = false
"""


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration file whose data are forty generated documents."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "text").mkdir()
    rng = random.Random(0)
    words = ["expert", "router", "token", "gate", "weight", "rank", "shard", "batch", "loss", "step"]
    for index in range(40):
        text = " ".join(rng.choice(words) for _ in range(400))
        (folder / "text" / f"{index}.txt").write_text(text)
    path = folder / "tiny.toml"
    path.write_text(TINY.format(source=folder / "text", cache=folder / "cache"))
    return path


def arguments(config: Path, run_dir: Path, overrides: Sequence[str], resume: str = "") -> list[str]:
    """The train command's words."""
    words = ["train", str(config), "--set", f"run.dir={run_dir}"]
    for override in overrides:
        words += ["--set", override]
    return words + (["--resume", resume] if resume else [])


def command(num_ranks: int, words: Sequence[str]) -> list[str]:
    """What to run: the module alone, or under torchrun."""
    if num_ranks == 1:
        return [sys.executable, "-m", "moe_runtime", *words]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [*launcher, "-m", "moe_runtime", *words]


def child_environment() -> dict[str, str]:
    """One thread a rank, as torchrun has it, for one process too."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


Train = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def train(tiny_config: Path) -> Train:
    """train(run_dir, *overrides, ranks=1, resume="", config=None) -> the finished process."""

    def run(
        run_dir: Path, *overrides: str, ranks: int = 1, resume: str = "", config: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        words = arguments(config or tiny_config, run_dir, overrides, resume)
        return subprocess.run(
            command(ranks, words), capture_output=True, text=True, timeout=200, env=child_environment(), check=False
        )

    return run


def rows(run_dir: Path) -> list[dict[str, float]]:
    """The run's metrics without what depends on the clock or the process."""
    timed = {"tokens_per_second", "step_seconds", "memory_bytes"}
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in timed} for line in lines]
