"""Builds moe_runtime._C, the CPU kernels of csrc/, when torch and g++ allow it.

The kernels are optional: where they cannot be compiled, one line on standard error says why and the install is pure
Python. Everything else about the project is in pyproject.toml.
"""

import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    BuildExtension, CppExtension = None, None
    WITHOUT_TORCH = f"torch is not importable ({error}); install it first and pass --no-build-isolation"

# -ffp-contract=off: a * b + c rounds twice on every machine, so a result does not depend on which vector width ran.
# -fno-math-errno -fno-trapping-math: let comparisons and divisions vectorize; neither changes a value.
# TORCH_TARGET_VERSION: the stable ABI of torch 2.11, which later versions keep.
CXX_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
    "-DTORCH_STABLE_ONLY",
]

# Errors are C++ exceptions that torch catches, so both must share one libstdc++; a toolchain that would link its static
# copy (for want of the development link, or by -static-libstdc++) finds every symbol in the shared one first.
LINK_FLAGS = ["-l:libstdc++.so.6"] if sys.platform == "linux" else []


def report_unbuilt(reason: object) -> None:
    """One line on standard error: why this install has no native kernels."""
    line = " ".join(str(reason).split())
    if len(line) > 200:  # a failed command: it and its output were printed above
        line = f"{line[:80]} ... {line[-80:]}"
    print(f"moe_runtime: native CPU kernels not built: {line}", file=sys.stderr)


def optional(command: type[build_ext]) -> type[build_ext]:
    """`command`, but a failed build leaves no extension module behind and does not fail the install."""

    class OptionalBuildExt(command):
        def run(self) -> None:
            try:
                super().run()
            except (BaseError, CCompilerError, OSError, RuntimeError, subprocess.SubprocessError) as error:
                self._give_up(error)

        def _give_up(self, reason: object) -> None:
            report_unbuilt(reason)
            package = Path(__file__).parent / "moe_runtime"
            for output in [*map(Path, self.get_outputs()), *package.glob("_C.*.so"), *package.glob("_C.so")]:
                output.unlink(missing_ok=True)  # one of older sources would be worse than none
            self.extensions = []

    return OptionalBuildExt


def native_extensions() -> list[Extension]:
    """The one extension module, or none without torch."""
    if CppExtension is None:
        report_unbuilt(WITHOUT_TORCH)
        return []
    return [
        CppExtension(
            "moe_runtime._C",
            sorted(str(path) for folder in ("cpu", "bindings") for path in Path("csrc", folder).glob("*.cpp")),
            depends=sorted(str(path) for path in Path("csrc").rglob("*.h")),
            include_dirs=["csrc/include"],
            extra_compile_args={"cxx": CXX_FLAGS},
            extra_link_args=LINK_FLAGS,
            py_limited_api=True,
        )
    ]


setup(
    ext_modules=native_extensions(),
    cmdclass={"build_ext": optional(BuildExtension.with_options(use_ninja=False))} if BuildExtension else {},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
