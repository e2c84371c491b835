"""Experts in Megatron's distributed checkpoints: one global tensor for each kind of weight, the experts its first axis.

The keys and cuts are those of Megatron's SequentialMLP, so each reads the other's checkpoints, whatever the layout and
the number of ranks. A stacked weight is one factory over all of a rank's experts: Megatron finds the optimizer's state
of a parameter by the parameter itself, and cuts that state as the factory cuts the weight.
"""

# E local experts

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor

from moe_runtime.integrations.megatron.linear import ExpertLinear
from moe_runtime.tensor import QuantizedTensor

__all__ = ["ExpertsPlace", "sharded_entries"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsPlace:
    """Which experts of the model a rank holds.

    first, total     global id of its first expert, and how many there are on all ranks
    replica_id       Megatron's (pipeline, tensor, data) triple: all zero on the one replica that is written
    sharded_offsets  axes that enclosing modules have put before the experts'
    singleton        write each expert under a key of its own, without an expert axis
    """

    first: int
    total: int
    replica_id: tuple[int, int, int]
    sharded_offsets: tuple[Any, ...] = ()
    singleton: bool = False

    def of_expert(self, key: str, index: int, value: Tensor, replica_id: Any, halves: bool) -> Any:
        """What is written of local expert `index`; two tensors, gate and up, if it holds two `halves`."""
        offsets = self.sharded_offsets
        if self.singleton:
            before, name = key.rsplit("experts.", 1)
            key = f"{before}experts.{self.first + index}.{name}"
        else:
            offsets = (*offsets, (len(offsets), self.first + index, self.total))
        tensor = ShardedTensor.from_rank_offsets(
            key, value, *offsets, replica_id=replica_id, prepend_axis_num=len(offsets)
        )
        return apply_swiglu_sharded_factory(tensor, offsets, self.singleton) if halves else tensor


def sharded_entries(linear: ExpertLinear, key: str, place: ExpertsPlace, halves: bool) -> dict[str, Any]:
    """Own parameter name -> what Megatron writes of it, under `key`.weight and `key`.bias."""
    entries = {}
    for name in ("weight", "bias") if linear.use_bias else ("weight",):
        parameters = linear.wgrad_parameters(name)
        if linear.single_grouped_weight:
            entries[name] = _stacked(f"{key}.{name}", parameters[0], place, halves)
            continue
        for e, parameter in enumerate(parameters):
            if isinstance(parameter, QuantizedTensor):
                entries[f"{name}{e}"] = _stacked(f"{key}.{name}", parameter, place, halves, only=e)
            else:
                entries[f"{name}{e}"] = place.of_expert(f"{key}.{name}", e, parameter, place.replica_id, halves)
    return entries


def _stacked(
    key: str, parameter: Tensor, place: ExpertsPlace, halves: bool, only: int | None = None
) -> ShardedTensorFactory:
    """One factory for a parameter that is written in several pieces, or not as it is stored.

    only  the parameter is this expert's alone
    """

    @torch.no_grad()
    def build(key: str, values: Tensor, replica_id: Any, flattened_range: slice | None) -> list[Any]:
        if flattened_range is not None:
            raise ValueError(
                f"{key}: a flat range of an expert's optimizer state cannot be cut by experts; save with "
                "distrib_optim_sharding_type='fully_reshardable'"
            )
        plain = values.dequantize() if isinstance(values, QuantizedTensor) else values.detach().as_subclass(Tensor)
        members = list(plain.unbind(0)) if only is None else [plain]
        built = []
        for e, member in enumerate(members, start=only or 0):
            entry = place.of_expert(key, e, member, replica_id, halves)
            built.append(entry.build() if halves else entry)
        return built

    made: Any = build  # Megatron's own factories build lists too
    return ShardedTensorFactory(key, parameter, made, _merge(halves, only), place.replica_id)


def _merge(halves: bool, only: int | None) -> Callable[[Any], Tensor]:
    @torch.no_grad()
    def merge(loaded: Any) -> Tensor:
        members = [torch.cat(list(member)) if halves else member for member in loaded]
        return torch.stack(members) if only is None else members[0]

    return merge
