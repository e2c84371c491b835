"""Budgets and habits of single files, each a rule of source_rules.py."""

import re
from pathlib import Path

import pytest
import source_rules
from source_tree import Module, load_modules

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return load_modules(ROOT)


@pytest.mark.parametrize(
    "rule",
    [
        "file_length",
        "function",
        "environment",
        "unnamed_variable",
        "state",
        "exception",
        "global",
        "docstring",
        "reference",
    ],
)
def test_no_file_breaks_the_rule_on(rule: str, modules: dict[str, Module]):
    faults = getattr(source_rules, f"{rule}_faults")(modules)
    assert not faults, "\n".join(faults)


def test_native_files_are_within_their_budget():
    files = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".cpp", ".h", ".cu", ".cuh"}]
    long = [path.name for path in files if len(path.read_text().splitlines()) > source_rules.MAX_KERNEL_FILE_LINES]
    assert long == []


def test_every_environment_variable_is_documented(modules: dict[str, Module]):
    read = source_rules.environment_variables(modules)
    page = ROOT / "docs" / "environment.md"
    documented = set(re.findall(r"`([A-Z][A-Z0-9_]+)", page.read_text(encoding="utf-8"))) if page.exists() else set()
    missing = [place for name, place in read.items() if name not in documented]
    assert not missing, "\n".join(missing)
