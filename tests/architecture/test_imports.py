"""Imports go one way: see docs/architecture.md for the table and why."""

from graphlib import TopologicalSorter
from pathlib import Path

import import_rules
import pytest
from lean_import import lean_import_faults
from source_tree import PACKAGE, Module, load_modules

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return load_modules(ROOT)


def test_the_table_is_acyclic():
    table = {package: set(allowed.split()) for package, allowed in import_rules.MAY_IMPORT.items()}
    assert next(TopologicalSorter(table).static_order()) == "core"


def test_every_package_is_in_the_table():
    folders = {path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")}
    assert folders and folders <= set(import_rules.MAY_IMPORT)


@pytest.mark.parametrize("rule", ["direction", "function_import", "third_party", "cycle"])
def test_no_import_breaks_the(rule: str, modules: dict[str, Module]):
    faults = getattr(import_rules, f"{rule}_faults")(modules)
    assert not faults, "\n".join(faults)


def test_importing_the_package_is_lean():
    heavy = [name for name in import_rules.HOMES if name not in ("torch.utils.tensorboard", "triton")]
    faults = lean_import_faults(ROOT, heavy)
    assert not faults, "\n".join(faults)
