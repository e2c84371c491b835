"""Router: score every expert for every token, choose top-k, weigh the chosen.

    x_TD --(jitter)--> logits_TE --> scores_TE --+--> ids_TK      by score + bias, inside the best groups
                                                 +--> gates_TK    scores of the chosen, normalized, scaled

The parts are in nn/routing; a router keeps parameters and the selection bias, and nothing of a forward.
"""

# T tokens   D model width   E experts   K top-k

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_runtime.functional.topk import topk
from moe_runtime.nn.routing.config import RouterConfig
from moe_runtime.nn.routing.losses import BatchScope, RouterLosses, router_losses
from moe_runtime.nn.routing.record import RoutingChoice
from moe_runtime.nn.routing.scores import choose, round_robin, scores_of, weigh
from moe_runtime.nn.routing.sinkhorn import sinkhorn

__all__ = ["Router", "RouterConfig"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Router(nn.Module):
    """(T, D) -> logits (T, E), gates (T, K), ids (T, K): what Hugging Face's top-k routers return, in that order.

    Scores and selection are fp32 (fp64 on request) whatever the dtype of x; among equal scores the lowest id wins, on
    every device. NaN in a token's logits shows in its weights; it disturbs no other token and never an index.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=dtype, device=device))
        linear_bias_E = torch.empty(config.num_experts, dtype=dtype, device=device) if config.linear_bias else None
        self.bias = None if linear_bias_E is None else nn.Parameter(linear_bias_E)
        bias_E = torch.zeros(config.num_experts, dtype=torch.float32, device=device) if config.expert_bias else None
        self.register_buffer("expert_bias", bias_E)
        if self.weight.device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights normal with std 0.02, both biases zero."""
        with torch.no_grad():
            self.weight.normal_(0.0, 0.02)
            for bias_E in (self.bias, self.expert_bias):
                if bias_E is not None:
                    bias_E.zero_()

    def forward(
        self,
        x_TD: Tensor,
        *,
        padding_T: Tensor | None = None,
        replay: RoutingChoice | None = None,
        jitter_seed: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (T, E), gates (T, K) fp32 (their gradient reaches the router), ids (T, K) int64.

        padding_T    bool (T,), True for padding: its ids are -1, its gates 0; it may hold anything
        replay       what to choose, in place of choosing
        jitter_seed  seed of this forward's noise, one for each layer and microbatch. Without one the noise is drawn
                     from torch's generator, whose state `torch.utils.checkpoint` restores by default
        """
        if x_TD.dim() < 2 or x_TD.shape[-1] != self.config.hidden_size:
            raise ValueError(f"tokens must have shape (..., {self.config.hidden_size}), got {tuple(x_TD.shape)}")
        x_TD = x_TD.reshape(-1, self.config.hidden_size)
        if padding_T is not None:
            padding_T = padding_T.reshape(-1)
            if padding_T.dtype != torch.bool or padding_T.shape != x_TD.shape[:1]:
                raise ValueError(
                    f"padding must be bool ({x_TD.shape[0]},), one a token; got {padding_T.dtype} "
                    f"{tuple(padding_T.shape)}"
                )
            x_TD = x_TD.masked_fill(padding_T[:, None], 0)
        logits_TE = self._logits(x_TD, jitter_seed)
        scores_TE = scores_of(logits_TE, self.config.score)
        ids_TK = (
            self._replayed(replay, len(x_TD)) if replay is not None else self._choose(logits_TE, scores_TE, padding_T)
        )
        if padding_T is not None:
            ids_TK = ids_TK.masked_fill(padding_T[:, None], -1)
        if replay is not None and replay.gates_TK is not None:
            return logits_TE, replay.gates_TK.float(), ids_TK
        gates_TK = weigh(self.config, logits_TE, scores_TE, ids_TK.clamp(min=0)).float()
        if padding_T is not None or replay is not None:
            gates_TK = gates_TK.masked_fill(ids_TK < 0, 0)
        return logits_TE, gates_TK, ids_TK

    def losses(
        self, logits_TE: Tensor, ids_TK: Tensor, *, scope: BatchScope | None = None, num_sequences: int | None = None
    ) -> RouterLosses:
        """The auxiliary losses of `config.aux_losses` for what `forward` returned; see `router_losses`."""
        scope = BatchScope() if scope is None else scope
        return router_losses(self.config, logits_TE, ids_TK, scope=scope, num_sequences=num_sequences)

    def _logits(self, x_TD: Tensor, jitter_seed: int | None) -> Tensor:
        dtype = _DTYPES[self.config.dtype]
        # Autocast would multiply in bf16, and near ties would fall either way.
        with torch.autocast(x_TD.device.type, enabled=False):
            x_TD = x_TD.to(dtype)
            if self.config.jitter and self.training:
                x_TD = x_TD * _noise(x_TD, self.config.jitter, jitter_seed)
            return F.linear(x_TD, self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))

    def _choose(self, logits_TE: Tensor, scores_TE: Tensor, padding_T: Tensor | None) -> Tensor:
        config = self.config
        if config.selection == "round_robin":
            return round_robin(len(logits_TE), config.top_k, config.num_experts, logits_TE.device)
        if config.selection == "sinkhorn" and self.training:
            keep_T = None if padding_T is None else ~padding_T
            assigned_TE = sinkhorn(logits_TE.detach(), config.sinkhorn_iterations, keep_T)
            return topk(assigned_TE, config.top_k).ids_TK
        return choose(config, logits_TE, scores_TE, self.expert_bias)

    def _replayed(self, replay: RoutingChoice, num_tokens: int) -> Tensor:
        expected = (num_tokens, self.config.top_k)
        shapes = [tuple(value.shape) for value in replay if value is not None]
        if any(shape != expected for shape in shapes) or replay.ids_TK.dtype != torch.int64:
            raise ValueError(
                f"the routing to replay must have int64 ids and gates of shape {expected}, "
                f"got {replay.ids_TK.dtype} and {', '.join(map(str, shapes))}"
            )
        return replay.ids_TK

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key = f"{prefix}expert_bias"
        if key in state_dict:
            state_dict[key] = state_dict[key].float()  # assign=True would take the file's dtype
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The bias moves with the module but keeps fp32: one step of 1e-3 vanishes in bf16.
        bias_E, self.expert_bias = self.expert_bias, None
        super()._apply(fn, recurse)
        if bias_E is not None:
            device = fn(bias_E).device
            self.expert_bias = torch.zeros_like(bias_E, device=device) if bias_E.is_meta else bias_E.to(device)
        return self


def _noise(x_TD: Tensor, jitter: float, seed: int | None) -> Tensor:
    """Uniform in [1 - jitter, 1 + jitter], of x's shape and dtype; the same for the same seed."""
    generator = None if seed is None else torch.Generator(x_TD.device).manual_seed(seed)
    uniform_TD = torch.rand(x_TD.shape, generator=generator, dtype=x_TD.dtype, device=x_TD.device)
    return 1 + jitter * (2 * uniform_TD - 1)
