"""One pool of ranks for each world size, shared by every test of the folder: importing megatron takes seconds."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mcore_ranks import on_rank

from moe_runtime.testing.ranks import RankPool


@pytest.fixture(scope="package")
def mcore() -> Iterator[Callable[..., list[Any]]]:
    """mcore(world_size, "module.function", *args): what the function returns on each rank."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("needs megatron-core, which has no wheel for this Python")
    pools: dict[int, RankPool] = {}

    def run(world_size: int, function: str, *args: Any) -> list[Any]:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size].run(on_rank, *function.split("."), *args)

    yield run
    for pool in pools.values():
        pool.stop()
