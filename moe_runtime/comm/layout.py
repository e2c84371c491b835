"""Where this process stands: the rank layout as a frozen value, built once and handed down.

Expert parallelism borrows ranks from data parallelism: world = replicate x shard, and `expert` divides shard. Ranks of
one expert group are neighbors: rank = replica * shard + expert_data * expert + expert_rank.
"""

# E experts over the whole group

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

_ATTRIBUTE = "parallel_layout"


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Degrees, meshes and which parameters are experts'.

    dense_mesh   ("replicate", "shard"), or None in one process
    expert_mesh  ("replicate", "expert", "expert_data"), or None in one process
    data         how gradients of replicas meet: "fsdp2", "ddp" or "none"
    expert_parameters  full names, in the model they were found in, of parameters sharded over the expert axis
    """

    data: str = "none"
    replicate: int = 1
    shard: int = 1
    expert: int = 1
    dense_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    expert_parameters: frozenset[str] = frozenset()

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different tokens: all of them. Every gradient is divided by this."""
        return self.world

    @property
    def rank(self) -> int:
        """This process's rank, 0 when there is no process group."""
        return dist.get_rank() if self.dense_mesh is not None else 0

    @property
    def expert_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the other experts of this rank's tokens; None at expert degree 1."""
        return None if self.expert_mesh is None or self.expert == 1 else self.expert_mesh.get_group("expert")

    @property
    def expert_rank(self) -> int:
        """Which slice of the experts this rank holds."""
        return 0 if self.expert_mesh is None else self.expert_mesh.get_local_rank("expert")


def build_meshes(device_type: str, *, replicate: int, shard: int, expert: int) -> tuple[DeviceMesh, DeviceMesh]:
    """The dense mesh ("replicate", "shard") and the expert mesh ("replicate", "expert", "expert_data") over all ranks.

    The expert axis stands before expert_data, so that a tensor sharded by dim 0 on both is split into experts' groups
    first: the order in which checkpoints count experts.
    """
    ranks = torch.arange(replicate * shard, dtype=torch.int)
    dense = DeviceMesh(device_type, ranks.view(replicate, shard), mesh_dim_names=("replicate", "shard"))
    by_expert = ranks.view(replicate, shard // expert, expert).transpose(1, 2)
    names = ("replicate", "expert", "expert_data")
    return dense, DeviceMesh(device_type, by_expert.contiguous(), mesh_dim_names=names)


def attach_layout(model: nn.Module, layout: ParallelLayout) -> None:
    """Remember on the model how it was distributed, for clipping and checkpoints."""
    setattr(model, _ATTRIBUTE, layout)


def layout_of(model: nn.Module) -> ParallelLayout:
    """How the model was distributed; one process if it never was."""
    return getattr(model, _ATTRIBUTE, None) or ParallelLayout()
