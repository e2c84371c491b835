"""GroupedLoRA: what is learned beside the frozen weights of a GroupedLinear."""

# E local experts   D in features   F out features   r rank

import hashlib
import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moe_runtime.functional import HeldAdapter
from moe_runtime.nn.grouped_linear import GroupedLinear
from moe_runtime.nn.lora_config import LoRAConfig
from moe_runtime.precision import Recipe, quantized_model_init, recipes

__all__ = ["FactorName", "GroupedLoRA"]

FactorName = Literal["a", "b"]


class _Factor(GroupedLinear):
    """A factor of the update: in high precision, whatever the layer beside it is stored and multiplied in."""

    def _recipe(self) -> Recipe:
        return recipes.HighPrecision()


class GroupedLoRA(nn.Module):
    """y[r] += scale * B[e(r)] A[e(r)] dropout(x[r]), for the rows of a GroupedLinear: its child `lora`.

    Children `a` (E, r, D) and `b` (E, F, r) are grouped layers of their own, so that what holds for weights holds for
    them: gradients computed late, sharding, checkpoints, clipping. They have the layer's nominal dtype.

    base    frozen from now on; it keeps its parameters and their names
    shared  the factor that all experts have in common, (1, r, D) or (1, F, r)
    Raises ValueError for a rank above min(D, F) and for a layer that has an adapter. `initialize` fills it.
    """

    def __init__(self, base: GroupedLinear, config: LoRAConfig, *, shared: FactorName | None = None) -> None:
        super().__init__()
        sizes = base.in_features, base.out_features
        if config.rank > min(sizes):
            raise ValueError(f"rank must be at most min(in, out) = {min(sizes)} of {base.described()}: {config.rank}")
        if base.lora is not None:
            raise ValueError(f"{base.described()} has an adapter already: merge or remove it first")
        self.config, self.shared = config, shared
        self.merged = False  # whether the base holds the update already
        like = base.wgrad_parameters("weight")[0]
        num_experts = base.num_gemms

        def factor(name: FactorName, in_features: int, out_features: int) -> _Factor:
            return _Factor(
                1 if shared == name else num_experts,
                in_features,
                out_features,
                dtype=like.dtype,
                device=like.device,
                delay_wgrad_compute=base.delay_wgrad_compute,
            )

        with quantized_model_init(enabled=False):
            self.a = factor("a", base.in_features, config.rank)
            self.b = factor("b", config.rank, base.out_features)
        with torch.no_grad():
            self.b.weight.zero_()
        base.requires_grad_(False)
        base.lora = self

    def take(self) -> HeldAdapter | None:
        """The factors for one forward, where a late schedule's nodes are made; None where the base holds the update."""
        if self.merged:
            if self.training and torch.is_grad_enabled():
                raise RuntimeError("the adapters are merged, and would not learn: unmerge_lora(model) before training")
            return None
        dropout = self.config.dropout if self.training else 0.0
        return HeldAdapter(self.a.take_weight(), self.b.take_weight(), self.config.scale, dropout)

    def backward_dw(self) -> None:
        """Compute and accumulate the oldest gradients that wait; does nothing unless delayed."""
        self.b.backward_dw()
        self.a.backward_dw()

    def keep_experts(self, start: int, stop: int) -> None:
        """Drop every expert but start <= e < stop. ValueError for a factor that experts share."""
        if self.shared is not None:
            raise ValueError(
                f"experts that share factor {self.shared} of their adapter cannot be split over ranks: expected "
                "share_outer=False with expert > 1, got share_outer=True"
            )
        self.a.keep_experts(start, stop)
        self.b.keep_experts(start, stop)

    @torch.no_grad()
    def initialize(self, name: str, *, first_expert: int = 0) -> None:
        """Fill A, each expert's from a seed of its own, uniform in +-1/sqrt(in), and B with 0. Parameters are real.

        name          of this module in the model; with the expert's id over all ranks it makes the seed
        first_expert  id of the first expert here
        """
        bound = 1 / math.sqrt(self.a.in_features)
        weight = self.a.weight
        local, (first, row) = weight, (0, 0)
        if isinstance(weight, DTensor):
            local = weight.to_local()
            _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
            first, row = offset[:2]
        if self.shared != "a":
            first += first_expert
        for e, target_rD in enumerate(local.unbind(0)):
            generator = torch.Generator().manual_seed(_seed(self.config.seed, name, first + e))
            values_rD = torch.empty(self.a.weight.shape[1:]).uniform_(-bound, bound, generator=generator)
            target_rD.copy_(values_rD[row : row + target_rD.shape[0]])
        local_of_b: Tensor = self.b.weight.to_local() if isinstance(self.b.weight, DTensor) else self.b.weight
        local_of_b.zero_()

    def extra_repr(self) -> str:
        return f"rank={self.config.rank}, scale={self.config.scale:g}, dropout={self.config.dropout:g}" + (
            f", shared={self.shared}" if self.shared else ""
        )


def _seed(seed: int, name: str, expert: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/{expert}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
