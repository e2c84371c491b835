"""Quantized tensors spread over two ranks as DTensors, by torch's own calls."""

# E experts   R rows   C columns

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import moe_runtime as mr
from moe_runtime.formats import MXFP8, NVFP4, Float8, Format
from moe_runtime.testing.ranks import RankPool

FORMATS: dict[str, Format] = {"mxfp8": MXFP8(), "nvfp4": NVFP4(), "float8": Float8()}


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with RankPool(2, timeout_seconds=60) as pool:
        yield pool


def packed(name: str, experts: int, seed: int) -> Any:
    dense_ERC = torch.randn(experts, 32, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return mr.GroupedTensor.pack(dense_ERC, mr.Quantizer(format=FORMATS[name]))


def plain(tensor: Any) -> dict[str, Tensor]:
    return {part: t.clone() for part, t in tensor.records.tensors().items()}


def spread(name: str, sharded: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """What this rank holds of rank 0's tensor, the whole again, and the whole after a redistribution."""
    mesh = init_device_mesh("cpu", (2,))
    source = packed(name, 4, dist.get_rank())  # rank 1 has another one, which must not be seen
    held = distribute_tensor(source, mesh, [Shard(0) if sharded else Replicate()])
    again = held.redistribute(mesh, [Replicate()])
    return plain(held.to_local()), plain(held.full_tensor()), plain(again.to_local())


def uneven(name: str, experts: int) -> str:
    """The sentence of this rank; nobody waits for another."""
    mesh = init_device_mesh("cpu", (2,))
    try:
        distribute_tensor(packed(name, experts, 0), mesh, [Shard(0)])
    except NotImplementedError as error:
        return str(error)
    return ""


def whole_of_local(name: str) -> tuple[dict[str, Tensor], bool]:
    """Two shards made apart, gathered; and whether a write to the DTensor reached both directions of the local one."""
    mesh = init_device_mesh("cpu", (2,))
    local = packed(name, 2, dist.get_rank())
    held = DTensor.from_local(local, mesh, [Shard(0)])
    whole = plain(held.full_tensor())
    held.zero_()
    return whole, not any(t.any() for part, t in plain(local).items() if "payload" in part)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[part], theirs[part]) for part in ours)


@pytest.mark.parametrize("sharded", [True, False], ids=["shard", "replicate"])
@pytest.mark.parametrize("name", FORMATS)
def test_distributed_and_gathered_bit_by_bit(name: str, sharded: bool, two: RankPool) -> None:
    source = packed(name, 4, 0)
    for rank, (local, whole, again) in enumerate(two.run(spread, name, sharded)):
        mine = source[2 * rank : 2 * rank + 2] if sharded else source
        assert same(local, plain(mine)) and same(whole, plain(source)) and same(again, plain(source))


@pytest.mark.parametrize("experts", [1, 3, 5])
def test_experts_that_ranks_do_not_divide_are_refused_on_both(experts: int, two: RankPool) -> None:
    for sentence in two.run(uneven, "mxfp8", experts):
        assert "shards take whole experts: expected a number of experts that the ranks divide, got" in sentence


@pytest.mark.parametrize("name", FORMATS)
def test_shards_made_apart(name: str, two: RankPool) -> None:
    expected = [plain(packed(name, 2, rank)) for rank in range(2)]
    for whole, written in two.run(whole_of_local, name):
        assert same(whole, {part: torch.cat([shard[part] for shard in expected]) for part in whole}) and written
