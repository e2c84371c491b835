"""The slow modules of the command line, imported when a command needs them and never before.

They bring torch and transformers, seconds that `--help` or a misspelt key should not wait for.
"""

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

_MODULES = {
    "train": "moe_runtime.cli.train",
    "finetune": "moe_runtime.cli.finetune",
    "finetune_job": "moe_runtime.cli.finetune_job",
    "job": "moe_runtime.cli.job",
    "doctor": "moe_runtime.cli.doctor",
    "convert": "moe_runtime.cli.convert",
    "cluster": "moe_runtime.cli.cluster",
}


BENCHMARKS = {
    "checkpoint": "moe_runtime.bench.checkpoint",
    "cpu": "moe_runtime.bench.rows",
    "frozen": "moe_runtime.bench.frozen",
    "gemm": "moe_runtime.bench.gemm",
    "layer": "moe_runtime.bench.layer",
    "lora": "moe_runtime.bench.lora",
    "overlap": "moe_runtime.bench.overlap",
    "parity": "moe_runtime.bench.parity",
    "quantize": "moe_runtime.bench.quantize",
    "recipes": "moe_runtime.bench.recipes",
    "step": "moe_runtime.bench.step",
    "storage": "moe_runtime.bench.storage",
}


def run_benchmark(name: str, arguments: Sequence[str]) -> None:
    """`python -m moe_runtime.bench.<module>` with these arguments; each parses its own."""
    module = importlib.import_module(BENCHMARKS[name])
    sys.argv = [f"moe_runtime bench {name}", *arguments]
    module.main()


def load(name: str) -> ModuleType:
    """The module that does the work of `name`."""
    return importlib.import_module(_MODULES[name])


def package_version() -> str:
    """The version in the package's root, which Python has imported before any of its parts."""
    return sys.modules["moe_runtime"].__version__
