"""Weight gradients on a stream of their own: the same bits as without, no race that the sanitizer sees, no growth.

The sanitizer knows aten ops only, so its runs are in fp32, where every product is one; its children are this file.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_runtime as mr

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPLITS = [300, 0, 5, 207]
SCHEDULES = ["late", "deferred"]


class Model(nn.Module):
    """Two blocks of experts, one after the other."""

    def __init__(self, schedule: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            mr.GroupedMLP(4, 64, 128, delay_wgrad_compute=schedule == "deferred", dtype=dtype, device="cuda")
            for _ in range(2)
        )

    def forward(self, x_RD: Tensor) -> Tensor:
        for block in self.blocks:
            x_RD = x_RD + block(x_RD, SPLITS)
        return x_RD


def made(schedule: Any, *, side_stream: bool, dtype: torch.dtype) -> tuple[Model, mr.WgradCoordinator]:
    model = Model(schedule, dtype)
    return model, mr.WgradCoordinator(schedule, side_stream=side_stream).attach(model)


def train(model: Model, coordinator: mr.WgradCoordinator, steps: int, *, microbatches: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        for microbatch in range(microbatches):
            generator = torch.Generator("cuda").manual_seed(10 * step + microbatch)
            x_RD = torch.randn(sum(SPLITS), 64, generator=generator, device="cuda").to(dtype).requires_grad_()
            model(x_RD).float().square().mean().backward()
        coordinator.flush()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_same_weights_with_and_without_a_side_stream_and_inline(schedule: str, dtype: torch.dtype) -> None:
    runs = []
    for name, side_stream in ((schedule, True), (schedule, False), ("inline", True)):
        model, coordinator = made(name, side_stream=side_stream, dtype=dtype)
        train(model, coordinator, 5)
        runs.append([parameter.detach().clone() for parameter in model.parameters()])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_does_not_grow(schedule: str) -> None:
    model, coordinator = made(schedule, side_stream=True, dtype=torch.bfloat16)
    train(model, coordinator, 20)
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    train(model, coordinator, 200)
    torch.cuda.synchronize()
    # A new optimizer holds no state; what the allocator keeps must not grow with steps.
    assert torch.cuda.memory_allocated() == allocated and torch.cuda.memory_reserved() == reserved


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_sanitizer_sees_no_race(schedule: str) -> None:
    done = _sanitized(schedule, "as it is")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fault", ["no wait before", "no wait after"])
def test_the_sanitizer_sees_a_missing_wait(schedule: str, fault: str) -> None:
    done = _sanitized(schedule, fault)
    assert done.returncode != 0 and "CSAN detected a possible data race" in done.stdout + done.stderr


def _sanitized(schedule: str, fault: str) -> subprocess.CompletedProcess[str]:
    child = os.environ | {"TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, __file__, schedule, fault]
    return subprocess.run(command, env=child, capture_output=True, text=True, timeout=240, check=False)


def child(schedule: str, fault: str) -> None:
    """One sanitized run; `fault` takes away a wait of the coordinator's stream."""
    if fault == "no wait before":
        torch.cuda.Stream.wait_event = lambda self, event: None  # type: ignore[method-assign]
    elif fault == "no wait after":
        torch.cuda.Stream.wait_stream = lambda self, stream: None  # type: ignore[method-assign]
    model, coordinator = made(schedule, side_stream=True, dtype=torch.float32)
    train(model, coordinator, 2)
    torch.cuda.synchronize()


if __name__ == "__main__":
    child(*sys.argv[1:])
