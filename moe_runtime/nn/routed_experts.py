"""RoutedExperts: dispatch, experts, combine. What a Hugging Face model gets in place of its experts module."""

# T tokens   D model width   F expert width   K top-k   R routed rows   E experts over the whole group

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_runtime.comm.watch import CollectiveWatch, Site
from moe_runtime.ep import AllToAllDispatcher, Capacity, Dispatcher, LocalDispatcher
from moe_runtime.functional import Activation, HeldWeight, Layout, TokenRows, check_activation
from moe_runtime.nn.grouped_mlp import GroupedMLP


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedExpertsConfig:
    """Sizes and layout of one set of routed experts; `num_experts` counts them over all ranks.

    capacity  bounds the rows of each expert; None takes every row
    gates_on  "output": an expert's output times the routing weight; "input": its input, before the expert (Llama 4)
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: Activation = "swiglu"
    gate_up_layout: Layout = "concatenated"
    bias: bool = False
    single_grouped_weight: bool = True
    delay_wgrad_compute: bool = False
    fuse_wgrad_accumulation: bool = False
    capacity: Capacity | None = None
    gates_on: Literal["output", "input"] = "output"

    def __post_init__(self) -> None:
        if self.gates_on not in ("output", "input"):
            raise ValueError(f"gates_on must be 'output' or 'input', got {self.gates_on!r}")
        for name in ("num_experts", "hidden_size", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_activation(self.activation, self.gate_up_layout)


class RoutedExperts(nn.Module):
    """out[t] = sum_k gates[t, k] * expert[ids[t, k]](x[t])"""

    def __init__(
        self,
        config: RoutedExpertsConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.first_expert = 0
        self.dispatcher: Dispatcher = LocalDispatcher(num_experts=config.num_experts, capacity=config.capacity)
        self.experts = GroupedMLP(
            config.num_experts,
            config.hidden_size,
            config.intermediate_size,
            activation=config.activation,
            gate_up_layout=config.gate_up_layout,
            bias=config.bias,
            single_grouped_weight=config.single_grouped_weight,
            delay_wgrad_compute=config.delay_wgrad_compute,
            fuse_wgrad_accumulation=config.fuse_wgrad_accumulation,
            dtype=dtype,
            device=device,
        )

    def forward(
        self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, *, beside: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """(T, D) tokens -> (T, D).

        ids_TK    int expert ids over all ranks; -1 drops the slot
        gates_TK  routing weights; a gradient flows back to them
        beside    computes (T, D) that is added to the result, while the exchange is under way in either direction
        """
        if x_TD.dim() != 2 or ids_TK.shape != gates_TK.shape or ids_TK.shape[:1] != x_TD.shape[:1]:
            raise ValueError(
                "expected tokens (T, D), ids (T, K) and gates (T, K), "
                f"got {tuple(x_TD.shape)}, {tuple(ids_TK.shape)} and {tuple(gates_TK.shape)}"
            )
        # A late weight gradient runs in backward between launching the exchange and waiting for it; with none, last.
        exchanges = isinstance(self.dispatcher, AllToAllDispatcher)
        weights = None if exchanges else self.experts.take_weights()
        if weights is not None and self._rows_stay_inside(weights):
            out_TD = self._forward_tokens(x_TD, ids_TK, gates_TK, weights)
            return out_TD if beside is None else out_TD + beside()
        pending = self.dispatcher.start(x_TD, ids_TK, gates_TK)
        added_TD = None if beside is None else beside()
        weights = weights or self.experts.take_weights()
        rows = self.dispatcher.wait(pending)
        x_RD, gate_R = rows.x_RD, rows.gate_R
        if self.config.gates_on == "input":
            x_RD, gate_R = (x_RD * gate_R[:, None]).to(x_RD.dtype), None
        y_RD = self.experts.forward_ends(x_RD, rows.plan.ends_E, gate_R, weights)
        out_TD = self.dispatcher.combine(y_RD, rows.plan)
        return out_TD if added_TD is None else out_TD + added_TD

    def _rows_stay_inside(self, weights: tuple[HeldWeight, HeldWeight]) -> bool:
        """Whether one function goes from tokens to tokens, so that no row in expert order is written to memory."""
        padded = self.config.capacity is not None and self.config.capacity.pad
        return self.config.gates_on == "output" and not padded and self.experts.is_one_function(weights)

    def _forward_tokens(
        self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, weights: tuple[HeldWeight, HeldWeight]
    ) -> Tensor:
        assert isinstance(self.dispatcher, LocalDispatcher)
        plan, gate_R = self.dispatcher.plan(ids_TK, gates_TK)
        tokens = TokenRows(plan.token_R, plan.local.row_TK)
        return self.experts.forward_tokens(x_TD, gate_R, plan.ends_E, tokens, weights)

    def shard_experts(self, group: dist.ProcessGroup) -> None:
        """Keep this rank's slice of the experts, in id order over `group`, and exchange tokens from now on."""
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        if not isinstance(self.dispatcher, LocalDispatcher):
            raise ValueError("these experts are split over a group already")
        if self.config.num_experts % size:
            raise ValueError(f"{self.config.num_experts} experts cannot be split evenly over {size} ranks")
        count = self.config.num_experts // size
        self.first_expert = rank * count
        self.experts.keep_experts(self.first_expert, self.first_expert + count)
        self.dispatcher = AllToAllDispatcher(
            num_experts=self.config.num_experts, group=group, capacity=self.config.capacity
        )

    def extra_repr(self) -> str:
        last = self.first_expert + self.experts.gate_up.num_gemms - 1
        return f"experts {self.first_expert}..{last} of {self.config.num_experts}"


def watch_exchanges(model: nn.Module, watch: CollectiveWatch, *, group: dist.ProcessGroup | None = None) -> None:
    """Name the layers of all experts of `model` in their exchanges, and have `watch` hear of these.

    group  takes the place of the group that the experts are split over; it has the same ranks in the same order
    """
    experts = {name: module for name, module in model.named_modules() if isinstance(module, RoutedExperts)}
    layers = tuple(experts)
    for index, module in enumerate(experts.values()):
        if isinstance(module.dispatcher, AllToAllDispatcher):
            site = Site(layers=layers, index=index, watch=watch)
            module.dispatcher = replace(module.dispatcher, site=site, group=group or module.dispatcher.group)
