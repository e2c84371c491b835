"""The C++ sources on their own: the same bits at every vector width, no invalid access, and builds that fail softly."""

import ast
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
KERNELS = sorted(map(str, CSRC.glob("cpu/*.cpp")))
GXX = shutil.which("g++")

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")


def shipped_flags() -> list[str]:
    """setup.py's CXX_FLAGS but for those that only torch's headers read."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CXX_FLAGS":
            return [flag for flag in ast.literal_eval(node.value) if not flag.startswith("-DTORCH")]
    raise AssertionError("setup.py sets no CXX_FLAGS")


def run_program(folder: Path, source: str, *flags: str) -> str:
    """What csrc/tests/<source> prints when it is built with the shipped flags and `flags`."""
    program = folder / "program"
    command = [str(GXX), *shipped_flags(), f"-I{CSRC / 'include'}", "-Wall", "-Wextra", "-Werror", *flags]
    sources = [str(CSRC / "tests" / source), *(KERNELS if source == "digest.cpp" else [])]
    subprocess.run([*command, *sources, "-o", str(program)], check=True, timeout=120)
    return subprocess.run([program], check=True, timeout=60, capture_output=True, text=True).stdout


@functools.cache
def cpu_flags() -> frozenset[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


@pytest.fixture(scope="module")
def dispatched_digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the kernels as they are shipped: this CPU's widest vectors."""
    return run_program(tmp_path_factory.mktemp("dispatched"), "digest.cpp")


def test_the_baseline_gives_the_same_bits(tmp_path: Path, dispatched_digest: str) -> None:
    assert len(dispatched_digest.splitlines()) == 3 + 5 * (2 * 2 + 4 * 3)
    assert run_program(tmp_path, "digest.cpp", "-DMOE_RUNTIME_BASELINE_ONLY") == dispatched_digest


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx2", "avx512bw"])
def test_every_width_gives_the_same_bits(tmp_path: Path, dispatched_digest: str, isa: str) -> None:
    if not {isa, "fma"} <= cpu_flags():
        pytest.skip(f"this CPU lacks {isa} or fma")
    flags = ("-DMOE_RUNTIME_BASELINE_ONLY", f"-m{isa}", "-mfma")
    assert run_program(tmp_path, "digest.cpp", *flags) == dispatched_digest


def test_no_invalid_access_and_no_undefined_behaviour(tmp_path: Path, dispatched_digest: str) -> None:
    flags = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DMOE_RUNTIME_BASELINE_ONLY")
    assert run_program(tmp_path, "digest.cpp", *flags) == dispatched_digest


def test_exp_is_within_one_ulp(tmp_path: Path) -> None:
    words = run_program(tmp_path, "exp_error.cpp").split()
    assert words[0] == "half_exp" and float(words[1]) <= 1.0  # measured: 0.94
    assert words[2] == "sigmoid" and float(words[3]) <= 2.5  # measured: 2.42
    assert words[4:] == ["special", "values:", "ok"]


def build(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    return subprocess.run(
        command, cwd=tree, env={**os.environ, **environment}, timeout=120, capture_output=True, text=True
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what setup.py needs, with a native module of older sources in place."""
    (tmp_path / "moe_runtime").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "moe_runtime/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(CSRC, tmp_path / "csrc")
    (tmp_path / "moe_runtime" / "_C.abi3.so").touch()
    return tmp_path


@pytest.mark.parametrize("fault", ["source", pytest.param("compiler", marks=pytest.mark.slow)])
def test_a_failed_build_leaves_a_pure_python_install(tree: Path, fault: str) -> None:
    environment = {}
    if fault == "source":
        (tree / "csrc" / "bindings" / "combine.cpp").write_text('#error "broken on purpose"\n')
        reason = "exit "  # setuptools says status or code
    else:
        environment["CXX"] = "no-such-compiler"
        reason = "no-such-compiler"
    result = build(tree, **environment)
    assert result.returncode == 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("moe_runtime:")]
    assert len(lines) == 1
    assert lines[0].startswith("moe_runtime: native CPU kernels not built: ") and reason in lines[0]
    assert not list(tree.rglob("*.so"))


def test_without_torch_the_install_is_pure_python(tree: Path) -> None:
    (tree / "torch.py").write_text("raise ImportError('no torch here')\n")
    result = build(tree, PYTHONPATH=str(tree))
    assert result.returncode == 0
    assert "native CPU kernels not built: torch is not importable (no torch here)" in result.stderr
