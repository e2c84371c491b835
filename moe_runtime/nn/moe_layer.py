"""MoELayer: a router, the experts it routes to, and the experts that every token visits.

    x --> router ----> ids, gates --> dispatch --> experts --> combine --+--> y
      |        |                         ~ exchange ~                    |
      |        +-----> logits, ids --> losses                            |
      +--------------------------------> shared experts -----------------+

The shared experts are computed between the two halves of dispatch, so that they overlap the exchange, in backward too.
"""

# B sequences   S tokens of a sequence   T tokens (= B * S)   D model width   E experts   K top-k

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_runtime.nn.balance import expert_counts
from moe_runtime.nn.routed_experts import RoutedExperts, RoutedExpertsConfig
from moe_runtime.nn.router import Router
from moe_runtime.nn.routing.config import RouterConfig
from moe_runtime.nn.routing.losses import BatchScope, RouterLosses
from moe_runtime.nn.routing.record import RoutingChoice
from moe_runtime.nn.shared_experts import SharedExperts, SharedExpertsConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """The configurations of a layer's parts, which must agree on the model width and the number of experts."""

    router: RouterConfig
    experts: RoutedExpertsConfig
    shared: SharedExpertsConfig | None = None

    def __post_init__(self) -> None:
        if self.router.num_experts != self.experts.num_experts:
            raise ValueError(
                f"the router chooses among {self.router.num_experts} experts, but there are {self.experts.num_experts}"
            )
        widths = {"router": self.router.hidden_size, "experts": self.experts.hidden_size}
        if self.shared is not None:
            widths["shared"] = self.shared.hidden_size
        if len(set(widths.values())) > 1:
            given = ", ".join(f"{name}={width}" for name, width in widths.items())
            raise ValueError(f"hidden_size must be the same in every part, got {given}")


class MoEOutput(NamedTuple):
    """What a layer returns; nothing of a forward stays on a module.

    A tuple, not a dataclass: wrappers such as FSDP2 look for tensors in a module's output, and look into tuples.
    """

    y: Tensor  # the shape and dtype of x
    losses: RouterLosses  # parts of the auxiliary losses; add losses.total to the training loss
    logits_TE: Tensor  # the router's logits
    ids_TK: Tensor  # int64: what the router chose, before a capacity dropped anything; -1 for padding
    gates_TK: Tensor  # fp32 routing weights
    counts_E: Tensor  # int64: slots of this call that chose each expert, before a capacity dropped anything


class MoELayer(nn.Module):
    """y = sum_k gates[t, k] * expert[ids[t, k]](x[t]) + shared(x[t]), and the auxiliary losses."""

    def __init__(
        self,
        config: MoEConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config.router, dtype=dtype, device=device)
        self.experts = RoutedExperts(config.experts, dtype=dtype, device=device)
        self.shared = None if config.shared is None else SharedExperts(config.shared, dtype=dtype, device=device)

    def forward(
        self,
        x: Tensor,
        *,
        padding: Tensor | None = None,
        scope: BatchScope | None = None,
        replay: RoutingChoice | None = None,
        jitter_seed: int | None = None,
    ) -> MoEOutput:
        """(B, S, D) or (T, D) tokens.

        padding      bool, x's shape without D, True for padding: it visits no routed expert and is in no loss
        scope        the batch that this call is a part of; by default it is all of it
        replay       a routing to follow, see `RoutingRecord.replay`
        jitter_seed  see `Router.forward`
        """
        x_TD = x.reshape(-1, x.shape[-1])
        logits_TE, gates_TK, ids_TK = self.router(
            x_TD, padding_T=_flat_padding(padding, x), replay=replay, jitter_seed=jitter_seed
        )
        shared = self.shared
        y_TD = self.experts(x_TD, ids_TK, gates_TK, beside=None if shared is None else lambda: shared(x_TD))
        losses = self.router.losses(logits_TE, ids_TK, scope=scope, num_sequences=x.shape[0] if x.dim() == 3 else None)
        counts_E = expert_counts(ids_TK, self.config.router.num_experts)
        # FSDP2 warns of views, so none is made where none is needed.
        y = y_TD if x.dim() == 2 else y_TD.view(x.shape)
        return MoEOutput(y, losses, logits_TE, ids_TK, gates_TK, counts_E)


def _flat_padding(padding: Tensor | None, x: Tensor) -> Tensor | None:
    if padding is None:
        return None
    if padding.shape != x.shape[:-1]:
        raise ValueError(
            f"padding must have shape {tuple(x.shape[:-1])}, x's without its width; got {tuple(padding.shape)}"
        )
    return padding.reshape(-1)
