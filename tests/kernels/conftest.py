"""Every test of a row kernel runs on the reference and, where it is built, on the native backend."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_runtime.kernels.select import native_status


@pytest.fixture(scope="session", params=["reference", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        _need_native()
    return request.param


@pytest.fixture(scope="session")
def native_ops() -> Any:
    """torch.ops.moe_runtime, where the native kernels are built."""
    _need_native()
    return torch.ops.moe_runtime


@pytest.fixture
def at_thread_counts() -> Iterator[Callable[[Callable[[], Any]], list[Any]]]:
    """Calls a function at 1, 2 and 3 threads and returns the three results."""
    before = torch.get_num_threads()

    def run(function: Callable[[], Any]) -> list[Any]:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(function())
        return results

    yield run
    torch.set_num_threads(before)


def _need_native() -> None:
    if not native_status().available:
        pytest.skip(native_status().reason)
