"""SharedExperts: the experts that every token visits, as one dense MLP."""

# T tokens   D model width   F expert width   H columns of the up-projection (2F, or F without a gated half)

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_runtime.functional import Activation, Layout, activate, check_activation
from moe_runtime.functional.activation import UNGATED


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpertsConfig:
    """Sizes of the shared experts; several of them are one of their summed width.

    gate  multiply the output by sigmoid(x @ w), a number for each token (Qwen2-MoE)
    """

    hidden_size: int
    intermediate_size: int
    activation: Activation = "swiglu"
    gate_up_layout: Layout = "concatenated"
    bias: bool = False
    gate: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_activation(self.activation, self.gate_up_layout)


class SharedExperts(nn.Module):
    """y = sigmoid(gate(x)) * down(act(gate_up(x))); routing weights and their scaling factor do not reach it."""

    def __init__(
        self,
        config: SharedExpertsConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        width, up_features = config.hidden_size, config.intermediate_size * (1 if config.activation in UNGATED else 2)
        self.gate_up = nn.Linear(width, up_features, bias=config.bias, dtype=dtype, device=device)
        self.down = nn.Linear(config.intermediate_size, width, bias=config.bias, dtype=dtype, device=device)
        self.gate = nn.Linear(width, 1, bias=False, dtype=dtype, device=device) if config.gate else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As torch initializes its linear layers."""
        for linear in (self.gate_up, self.down, self.gate):
            if linear is not None:
                linear.reset_parameters()

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) tokens -> (T, D), x's dtype (autocast's under autocast)."""
        h_TH = self.gate_up(x_TD)
        a_TF = activate(h_TH, None, activation=self.config.activation, layout=self.config.gate_up_layout)
        y_TD = self.down(a_TF)
        return y_TD if self.gate is None else torch.sigmoid(self.gate(x_TD)) * y_TD
