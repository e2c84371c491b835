"""The slow modules of the command line, imported when a command needs them and never before.

They bring torch and transformers, seconds that `--help` or a misspelt key should not wait for.
"""

import importlib
import sys
from types import ModuleType

_MODULES = {
    "train": "moe_runtime.cli.train",
    "job": "moe_runtime.cli.job",
    "doctor": "moe_runtime.cli.doctor",
    "convert": "moe_runtime.cli.convert",
    "cluster": "moe_runtime.cli.cluster",
}


def load(name: str) -> ModuleType:
    """The module that does the work of `name`."""
    return importlib.import_module(_MODULES[name])


def package_version() -> str:
    """The version in the package's root, which Python has imported before any of its parts."""
    return sys.modules["moe_runtime"].__version__
