"""The example of docs/huggingface.md runs as it stands."""

import re
from pathlib import Path

import pytest
import torch
from tiny_models import folder_of, reference
from transformers import AutoModelForCausalLM

PAGE = Path(__file__).parents[3] / "docs" / "huggingface.md"


def test_the_pages_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = reference("qwen3_moe")
    folder_of(theirs, tmp_path / "folder")
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(PAGE), "exec"), {})
    assert re.search(r"^\d+ tensors, 0\.\d MB$", capsys.readouterr().out, re.MULTILINE)
    exported = AutoModelForCausalLM.from_pretrained("exported")
    for name, value in theirs.state_dict().items():
        assert torch.equal(exported.state_dict()[name], value.bfloat16()), name
