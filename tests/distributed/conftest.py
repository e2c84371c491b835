"""One pool of ranks for each world size, shared by every test of a file."""

from collections.abc import Callable, Iterator

import pytest

from moe_runtime.testing.ranks import RankPool


# Not for the session: every mesh a case makes leaves threads of gloo behind that wake a hundred times a second.
@pytest.fixture(scope="module")
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
