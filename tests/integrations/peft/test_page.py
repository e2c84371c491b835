"""The example of docs/lora.md runs as it stands."""

import re
from pathlib import Path

import pytest
import torch

from moe_runtime.checkpoint import hf as folders
from moe_runtime.integrations import transformers as hf

PAGE = Path(__file__).parents[3] / "docs" / "lora.md"
FIELDS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = hf.build(hf.load_config(model_type="qwen3_moe", fields=FIELDS), dtype=torch.bfloat16)
    hf.initialize(model, seed=0, device=torch.device("cpu"))
    base = folders.save(model, tmp_path / "base")
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    exec(example, {"base": base, "adapter": tmp_path / "adapter", "ids": torch.arange(12)[None]})
    said = capsys.readouterr().out
    assert "2 layers adapted" in said and "mxfp8 rowwise" in said
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
