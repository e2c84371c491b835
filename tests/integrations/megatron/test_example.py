"""The program of docs/megatron.md runs, is short, and learns; its page is in step with the code."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mcore = Callable[..., list[Any]]
PAGE = (Path(__file__).parents[3] / "docs" / "megatron.md").read_text(encoding="utf-8")


def test_the_program_of_the_page_learns(mcore: Mcore):
    program = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[0]
    assert len(program.splitlines()) <= 60
    first, second = mcore(2, "example_cases.run", program)
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", first)]
    assert len(losses) == 2 and losses[0] > 3.5 and losses[1] < 1.5
    assert second == ""


def test_the_page_has_every_attribute():
    source = Path(__file__).parents[3] / "moe_runtime" / "integrations" / "megatron" / "attributes.py"
    names = re.findall(r"^    (\w+): (?:bool|int)", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(names) == 5
    assert [name for name in names if f"`{name}`" not in PAGE] == []
