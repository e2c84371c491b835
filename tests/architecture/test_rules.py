"""The rules catch what they are for: every planted fault is reported, every near miss is not."""

import shutil
from pathlib import Path

import import_rules
import pytest
import source_rules
from lean_import import lean_import_faults
from repository_rules import text_faults
from source_tree import PACKAGE, Module, load_modules

ROOT = Path(__file__).parents[2]


def plant(root: Path, planted: dict[str, str]) -> dict[str, Module]:
    """Write `planted` {path below the package: source} under `root` and parse the package."""
    for path, source in planted.items():
        file = root / PACKAGE / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    return load_modules(root)


WRONG_IMPORTS = {
    "layer_up": ("direction", {"formats/planted.py": "import moe_runtime.nn"}, "formats may not import moe_runtime.nn"),
    "kernel_sees_tensor": (
        "direction",
        {"kernels/planted.py": "from moe_runtime.tensor import GroupedTensor"},
        "kernels may not import moe_runtime.tensor",
    ),
    "relative": ("direction", {"core/planted.py": "from ..comm import x"}, "core may not import moe_runtime.comm"),
    "relative_package": ("direction", {"ep/planted/__init__.py": "from ...nn import x"}, "ep may not import"),
    "for_types_only": (
        "direction",
        {"comm/planted.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import moe_runtime.ep.plan"},
        "comm may not import moe_runtime.ep.plan",
    ),
    "cli_is_the_top": (
        "direction",
        {"train/planted.py": "import moe_runtime.cli"},
        "train may not import moe_runtime.cli",
    ),
    "the_root": ("direction", {"nn/planted.py": "import moe_runtime as mr"}, "nn may not import moe_runtime"),
    "unknown_package": (
        "direction",
        {"attic/planted.py": "import moe_runtime.nn"},
        "'attic' is not in the import table",
    ),
    "in_function": (
        "function_import",
        {"nn/planted.py": "def f():\n    if True:\n        from moe_runtime.core import env"},
        "import of moe_runtime.core",
    ),
    "in_method": (
        "function_import",
        {"nn/planted.py": "class A:\n    async def f(self):\n        from . import x"},
        "import of moe_runtime.nn",
    ),
    "by_name": (
        "function_import",
        {"cli/planted.py": "import importlib\nx = importlib.import_module('moe_runtime.train')"},
        "by name",
    ),
    "by_computed_name": (
        "function_import",
        {"cli/planted.py": "import importlib\ndef f(name):\n    return importlib.import_module(name)"},
        "computed name",
    ),
    "lazy_and_up": (
        "direction",
        {"__init__.py": "HOME = {'f': 'moe_runtime.cli'}", "cli/__init__.py": ""},
        "may not import",
    ),
    "framework_by_name": (
        "third_party",
        {"train/planted.py": "from importlib import import_module\nx = import_module('peft')"},
        "peft may be imported only by",
    ),
    "framework": ("third_party", {"nn/planted.py": "import transformers"}, "transformers may be imported only by"),
    "framework_in_function": (
        "third_party",
        {"train/planted.py": "def f():\n    from megatron.core import parallel_state"},
        "megatron may be imported only by integrations.megatron",
    ),
    "framework_of_another_leaf": (
        "third_party",
        {"integrations/peft.py": "import apex.optimizers"},
        "apex may be imported",
    ),
    "torch_submodule": (
        "third_party",
        {"core/planted.py": "from torch.utils.tensorboard import SummaryWriter"},
        "torch.utils.tensorboard may be imported only by train",
    ),
    "homeless": ("third_party", {"nn/planted.py": "import einops"}, "einops has no home"),
    "cycle_of_two": (
        "cycle",
        {"core/a.py": "from moe_runtime.core import b", "core/b.py": "from .a import x"},
        "moe_runtime.core.a <-> moe_runtime.core.b",
    ),
    "cycle_of_three": (
        "cycle",
        {
            "ep/a.py": "import moe_runtime.ep.b",
            "ep/b.py": "from . import c",
            "ep/c.py": "from moe_runtime.ep.a import x",
        },
        "moe_runtime.ep.a <-> moe_runtime.ep.b <-> moe_runtime.ep.c",
    ),
    "cycle_through_the_package": (
        "cycle",
        {"attic/__init__.py": "from .a import x", "attic/a.py": "from moe_runtime.attic import y"},
        "moe_runtime.attic <-> moe_runtime.attic.a",
    ),
}
RIGHT_IMPORTS = {
    "down": {"nn/planted.py": "from moe_runtime.core import env\nimport moe_runtime.tensor"},
    "sideways": {"ep/planted.py": "from . import planted2", "ep/planted2.py": '"""Nothing."""'},
    "optional_framework": {
        "integrations/peft.py": "def f():\n    try:\n        import peft\n    except ImportError:\n        raise",
    },
    "framework_name_of_ours": {"nn/planted.py": "import os.path\nimport torch.nn as nn\nfrom collections import abc"},
    "native_extension": {
        "kernels/planted.py": "import importlib\ndef f():\n    importlib.import_module('moe_runtime._C')"
    },
    "entry_point": {"__main__.py": "from moe_runtime.cli import main"},
    "top_composes": {"cli/planted.py": "import moe_runtime.train\nimport typer"},
    "shared_dependency": {"ep/a.py": "from . import b, c", "ep/b.py": "from . import c", "ep/c.py": "x = 1"},
}


IMPORT_RULES = ("direction", "function_import", "third_party", "cycle")


@pytest.mark.parametrize(("rule", "planted", "expected"), WRONG_IMPORTS.values(), ids=WRONG_IMPORTS)
def test_a_wrong_import_is_reported(rule: str, planted: dict[str, str], expected: str, tmp_path: Path):
    faults = getattr(import_rules, f"{rule}_faults")(plant(tmp_path, planted))
    assert len(faults) == 1 and expected in faults[0], faults


@pytest.mark.parametrize("planted", RIGHT_IMPORTS.values(), ids=RIGHT_IMPORTS)
def test_a_right_import_is_not_reported(planted: dict[str, str], tmp_path: Path):
    modules = plant(tmp_path, planted)
    assert [fault for rule in IMPORT_RULES for fault in getattr(import_rules, f"{rule}_faults")(modules)] == []


def test_wrong_imports_are_reported_in_a_copy_of_the_package(tmp_path: Path):
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    modules = load_modules(tmp_path)
    before = {rule: set(getattr(import_rules, f"{rule}_faults")(modules)) for rule in IMPORT_RULES}
    for rule, name in [
        ("direction", "layer_up"),
        ("function_import", "in_function"),
        ("third_party", "framework"),
        ("cycle", "cycle_of_two"),
    ]:
        _, planted, expected = WRONG_IMPORTS[name]
        found = set(getattr(import_rules, f"{rule}_faults")(plant(tmp_path, planted))) - before[rule]
        assert len(found) == 1 and expected in found.pop()


FAULTY = {
    "long_file": ("file_length", "x = 1\n" * 601),
    "long_function": ("function", "def f():\n" + "    x = 1\n" * 80),
    "long_method": ("function", "class A:\n    def forward(self):\n" + "        x = 1\n" * 80),
    "nine_arguments": ("function", "def f(a, b, c, d, *, e, f, g, h, i): ..."),
    "nine_with_variadic": ("function", "def f(self, a, b, c, d, e, f, g, *h, **i): ..."),
    "environ": ("environment", "import os\nx = os.environ.get('A')"),
    "getenv": ("environment", "import os\ndef f():\n    return os.getenv('A')"),
    "environ_by_name": ("environment", "from os import environ"),
    "computed_variable": (
        "unnamed_variable",
        "from moe_runtime.core import env\ndef f(name):\n    return env.get(name)",
    ),
    "module_dict": ("state", "cache = {}"),
    "module_list_typed": ("state", "_jobs: list[int] = []"),
    "module_call": ("state", "import collections\npending = collections.deque()"),
    "module_under_if": ("state", "if True:\n    seen = set()"),
    "class_dict": ("state", "class A:\n    instances = {}"),
    "constant_item_set": ("state", "TABLE = {}\ndef f():\n    TABLE['a'] = 1"),
    "constant_appended": ("state", "TABLE = []\ndef f():\n    TABLE.append(1)"),
    "constant_extended": ("state", "TABLE = [1]\ndef f(x):\n    x.TABLE += [2]"),
    "imported_constant_changed": ("state", "from moe_runtime.core.table import TABLE\ndel TABLE['a']"),
    "bare_except": ("exception", "try:\n    x = 1\nexcept:\n    raise"),
    "except_exception": ("exception", "try:\n    x = 1\nexcept Exception:\n    raise"),
    "except_in_tuple": ("exception", "try:\n    x = 1\nexcept (OSError, Exception) as e:\n    x = 2"),
    "swallowed_base_exception": ("exception", "try:\n    x = 1\nexcept BaseException:\n    x = 2"),
    "suppress": ("exception", "import contextlib\nwith contextlib.suppress(Exception):\n    x = 1"),
    "global": ("global", "x = 1\ndef f():\n    global x\n    x = 2"),
    "no_docstring": ("docstring", "x = 1"),
}
FAULTLESS = {
    "full_file": ("file_length", "x = 1\n" * 600),
    "full_function": ("function", "def f():\n" + "    x = 1\n" * 79),
    "eight_arguments": ("function", "class A:\n    def f(self, a, b, c, d, *, e, f, g, h): ..."),
    "kernel": ("function", "import triton\n@triton.jit\ndef k(a, b, c, d, e, f, g, h, i): ..."),
    "op_schema": ("function", "import torch\n@torch.library.custom_op('a::b')\ndef k(a, b, c, d, e, f, g, h, i): ..."),
    "environ_of_ours": ("environment", "from moe_runtime.core import env\nenviron = env.environment()"),
    "named_variable": ("unnamed_variable", "from moe_runtime.core import env\ndef f():\n    return env.get('A_B')"),
    "plain_get": ("unnamed_variable", "def f(options, name):\n    return options.get(name)"),
    "constant": ("state", "TABLE = {'a': 1}\ndef f():\n    return TABLE['a'], sorted(TABLE)"),
    "frozen": ("state", "import types\ntable = types.MappingProxyType({})\nnames = ('a',)"),
    "final": ("state", "from typing import Final\ntable: Final[dict[str, int]] = {}"),
    "exports": ("state", "__all__ = ['a']"),
    "local_state": ("state", "def f():\n    R = [1]\n    seen = {}\n    R.append(2)\n    seen['a'] = 1"),
    "annotation": ("state", "class A:\n    names: list[str]"),
    "clean_up": ("exception", "try:\n    x = 1\nexcept BaseException:\n    x = 2\n    raise"),
    "named_exception": ("exception", "try:\n    x = 1\nexcept (OSError, ValueError):\n    x = 2"),
    "nonlocal": ("global", "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2"),
    "empty": ("docstring", ""),
    "documented": ("docstring", '"""What it is for."""\nx = 1'),
}


@pytest.mark.parametrize(("rule", "source"), FAULTY.values(), ids=FAULTY)
def test_a_faulty_file_is_reported(rule: str, source: str, tmp_path: Path):
    faults = getattr(source_rules, f"{rule}_faults")(plant(tmp_path, {"nn/planted.py": source}))
    assert len(faults) == 1 and faults[0].startswith("moe_runtime/nn/planted.py:"), faults


@pytest.mark.parametrize(("rule", "source"), FAULTLESS.values(), ids=FAULTLESS)
def test_a_faultless_file_is_not_reported(rule: str, source: str, tmp_path: Path):
    assert getattr(source_rules, f"{rule}_faults")(plant(tmp_path, {"nn/planted.py": source})) == []


def test_an_op_without_reference_is_reported(tmp_path: Path):
    planted = {"kernels/op/__init__.py": '"""Op."""', "kernels/op/_torch.py": '"""Backend."""'}
    assert len(source_rules.reference_faults(plant(tmp_path, planted))) == 1
    assert source_rules.reference_faults(plant(tmp_path, {"kernels/op/_reference.py": '"""Reference."""'})) == []


READS = {
    "nn/planted.py": "from moe_runtime.core import env\nx = env.get('READ_A')\ny = env.environment().get('READ_B')\n"
    "z = env.environment()['READ_C']\nother = {}.get('NOT_READ')",
    "comm/bootstrap.py": "KEYS = ('READ_D', 'RANK')\ndef f(values):\n    return values['READ_E'], 'NCCL', 'gloo'",
}


def test_every_variable_read_is_found(tmp_path: Path):
    found = source_rules.environment_variables(plant(tmp_path, READS))
    assert set(found) == {"RANK", *(f"READ_{letter}" for letter in "ABCDE")}
    assert found["READ_E"] == "moe_runtime/comm/bootstrap.py:3: READ_E"


HEAVY_IMPORT = """
import colorsys, os, torch
from moe_runtime.core import env
a = os.environ["PATH"]
b = os.environ.get("ABSENT_B")
c = os.getenv("ABSENT_C")
d = "ABSENT_D" in os.environ
e = env.environment()
f = torch.cuda.is_available()
def __getattr__(name):
    if name == "public":
        return os.getenv("ABSENT_G")
    raise AttributeError(name)
def __dir__():
    return ["public"]
"""


def test_a_heavy_import_is_reported(tmp_path: Path):
    reader = (ROOT / PACKAGE / "core" / "env.py").read_text(encoding="utf-8")
    plant(tmp_path, {"__init__.py": HEAVY_IMPORT, "core/env.py": reader})
    faults = lean_import_faults(tmp_path, ["colorsys", "wave"])
    variables = ["PATH", *(f"ABSENT_{letter}" for letter in "BCDG")]
    expected = {f"import moe_runtime reads the environment variable {name}" for name in variables}
    expected |= {f"import moe_runtime {what}" for what in ("calls torch.cuda.is_available", "imports colorsys")}
    assert expected <= set(faults) and any("whole environment" in fault for fault in faults), faults


def test_a_package_that_cannot_be_imported_is_reported(tmp_path: Path):
    plant(tmp_path, {"__init__.py": "raise RuntimeError('no')"})
    assert lean_import_faults(tmp_path, []) == ["import moe_runtime fails: RuntimeError: no"]


SLASH = "/"  # the samples below must not make this file a fault of its own
FORBIDDEN_TEXT = [
    f"run it from {SLASH}root/project",
    f"cd '{SLASH}home/someone/x'",
    f"{SLASH}work/main",
    f"see {SLASH}tmp/bash_jobs.0/x",
    "https://py" + "pi.org/simple",
    "pip install --extra-index" + "-url x",
    "# TO" + "DO: later",
    "// FIX" + "ME",
]
ALLOWED_TEXT = [
    "data/home/x and ./work/y and ~/root/z",
    "a https link: example.org/work/page",
    "# TO" + "DO(#12): drop when fixed",
    "# TO" + "DO(torch>=2.15): drop the fallback",
    "method, homework/, network/",
]


def test_forbidden_text_is_reported_line_by_line(tmp_path: Path):
    (tmp_path / "page.md").write_text("\n".join(FORBIDDEN_TEXT))
    (tmp_path / "blob.bin").write_bytes(b"\xff\xfe\x00")
    places = [fault.split(": ")[0] for fault in text_faults(tmp_path, [Path("page.md"), Path("blob.bin")])]
    assert places == [f"page.md:{number}" for number in range(1, len(FORBIDDEN_TEXT) + 1)]


def test_allowed_text_is_not_reported(tmp_path: Path):
    (tmp_path / "page.md").write_text("\n".join(ALLOWED_TEXT))
    assert text_faults(tmp_path, [Path("page.md")]) == []
