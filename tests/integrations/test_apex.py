"""apex as an optimizer backend: NVIDIA's is taken, its absence and another project of that name are refused."""

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch

import moe_runtime as mr
from moe_runtime.core.errors import UnsupportedError
from moe_runtime.integrations.apex import fused_adam


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages before all others; what was imported from it is forgotten."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("apex", "amp_C")]:
        del sys.modules[name]


def write(folder: Path, name: str, text: str = "") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    importlib.invalidate_caches()


def test_a_missing_apex_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PathFinder, "find_spec", lambda *_, **__: None)
    with pytest.raises(UnsupportedError, match="needs apex, which is not installed: build NVIDIA's from source"):
        fused_adam()


def test_another_project_of_that_name_is_refused_without_importing_it(packages: Path):
    write(packages, "apex/__init__.py", "raise SystemExit('imported')")
    write(packages, "apex/scaffold.py")
    with pytest.raises(UnsupportedError, match=r"at .*apex/__init__\.py, is another project of that name"):
        fused_adam()


def test_an_apex_without_kernels_is_refused(packages: Path):
    write(packages, "apex/__init__.py")
    write(packages, "apex/optimizers/__init__.py", "raise ImportError('no kernels')")
    with pytest.raises(UnsupportedError, match=r"without its CUDA kernels \(no module amp_C\)"):
        fused_adam()


def test_nvidias_apex_steps_masters(packages: Path):
    write(packages, "amp_C.py")
    write(packages, "apex/__init__.py")
    write(packages, "apex/optimizers/__init__.py", "from torch.optim import AdamW as FusedAdam")
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = mr.optim.MasterWeights(fused_adam(), [weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.9] * 4, rel=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fused_adam_takes_torchs_steps():
    if importlib.util.find_spec("amp_C") is None:
        pytest.skip("needs NVIDIA's apex, built from source")
    results = []
    for make in (torch.optim.AdamW, fused_adam()):
        torch.manual_seed(0)
        layer = mr.GroupedLinear(4, 64, 32, dtype=torch.bfloat16, device="cuda")
        optimizer = mr.optim.MasterWeights(make, layer.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(5):
            x = torch.randn(
                40, 64, dtype=torch.bfloat16, device="cuda", generator=torch.Generator("cuda").manual_seed(step)
            )
            layer(x, [10, 0, 20, 10]).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(optimizer.state[layer.weight]["master"])
    assert torch.allclose(*results, rtol=0, atol=1e-6)
