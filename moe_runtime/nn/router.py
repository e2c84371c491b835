"""Router: score every expert for every token, choose top-k, weigh the chosen."""

# T tokens   D model width   E experts   K top-k

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """How tokens choose experts.

    score           "softmax" over experts, or an independent "sigmoid" each
    norm_topk_prob  divide the chosen scores by their sum
    scaling_factor  multiplies the weights of the routed experts, after normalization
    expert_bias     add a per-expert bias to the scores for selection only (DeepSeek-V3, arXiv:2412.19437 section 2.1.2)
    """

    num_experts: int
    hidden_size: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = False
    scaling_factor: float = 1.0
    expert_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k must be in [1, num_experts={self.num_experts}], got {self.top_k}")
        if self.score not in ("softmax", "sigmoid"):
            raise ValueError(f"score must be 'softmax' or 'sigmoid', got {self.score!r}")


class Router(nn.Module):
    """(T, D) -> logits (T, E), gates (T, K), ids (T, K): what Hugging Face's top-k routers return, in that order.

    Scores and selection are fp32 whatever the dtype of x; among equal scores the lowest id wins, on every device.
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
        bias_E = torch.zeros(config.num_experts, dtype=torch.float32, device=device) if config.expert_bias else None
        self.register_buffer("expert_bias", bias_E)
        if self.weight.device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights normal with std 0.02, the selection bias zero."""
        with torch.no_grad():
            self.weight.normal_(0.0, 0.02)
            if self.expert_bias is not None:
                self.expert_bias.zero_()

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (T, E) fp32, gates (T, K) fp32 (their gradient reaches the router), ids (T, K) int64."""
        if x_TD.dim() < 2 or x_TD.shape[-1] != self.config.hidden_size:
            raise ValueError(f"tokens must have shape (..., {self.config.hidden_size}), got {tuple(x_TD.shape)}")
        x_TD = x_TD.reshape(-1, self.config.hidden_size)
        # Autocast would multiply in bf16, and near ties would fall either way.
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.float(), self.weight.float())
        scores_TE = logits_TE.softmax(-1) if self.config.score == "softmax" else logits_TE.sigmoid()
        ids_TK = self._select(scores_TE.detach())
        gates_TK = scores_TE.gather(1, ids_TK)
        if self.config.norm_topk_prob:
            # Far below any softmax sum; sigmoids may all be 0, and 0 / 0 is no weight.
            gates_TK = gates_TK / (gates_TK.sum(-1, keepdim=True) + 1e-20)
        return logits_TE, gates_TK * self.config.scaling_factor, ids_TK

    def _select(self, scores_TE: Tensor) -> Tensor:
        if self.expert_bias is not None:
            scores_TE = scores_TE + self.expert_bias
        # A stable sort, for topk promises no order among equal scores.
        return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, : self.config.top_k].contiguous()

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
