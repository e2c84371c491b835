"""One pool of ranks for each world size, shared by every test of the session."""

from collections.abc import Callable, Iterator

import pytest

from moe_runtime.testing.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """ranks(n): the pool of n gloo ranks."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool
    for started in pools.values():
        started.stop()
