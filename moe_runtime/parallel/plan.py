"""ParallelPlan: how many ranks share what, checked against the world before any collective."""

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelPlan:
    """World = replicate x shard; experts split over `expert` of the shard ranks.

    expert     ranks that share one set of experts; divides shard
    data       "fsdp2": parameters sharded over `shard`, replicated over `replicate`; "ddp": replicated over all ranks
               but the experts over `expert`; "none": one process
    shard      None: world / replicate
    param_dtype, reduce_dtype  FSDP2's mixed precision: compute and reduction dtypes; None leaves them
    reshard_after_forward      FSDP2: free gathered parameters between forward and backward
    """

    expert: int = 1
    data: Literal["fsdp2", "ddp", "none"] = "none"
    shard: int | None = None
    replicate: int = 1
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        if self.data not in ("fsdp2", "ddp", "none"):
            raise ValueError(f"data must be 'fsdp2', 'ddp' or 'none', got {self.data!r}")
        for name in ("expert", "replicate", "shard"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.data != "fsdp2" and (self.param_dtype or self.reduce_dtype):
            raise ValueError(f"param_dtype and reduce_dtype are FSDP2's; data is {self.data!r}")

    def shard_degree(self, world: int) -> int:
        """`shard` for a world of this size. Raises ValueError, with the numbers, for a plan that does not fit it."""
        shard = self.shard if self.shard is not None else world // self.replicate
        if self.replicate * shard != world:
            raise ValueError(
                f"replicate * shard must be the {world} ranks of the world, got {self.replicate} * {shard}"
            )
        if shard % self.expert:
            raise ValueError(f"expert must divide the shard degree {shard}, got expert={self.expert}")
        if self.data == "none" and world != 1:
            raise ValueError(f"data='none' is for one process, got {world} ranks; choose 'fsdp2' or 'ddp'")
        return shard
