"""GroupedMLP: up-projection, activation, down-projection for E experts at once."""

# T tokens   R routed rows   D model width   F expert width   E local experts

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moe_runtime.functional import Activation, HeldWeight, Layout, TokenRows, activate, check_activation, moe_mlp
from moe_runtime.functional.activation import UNGATED
from moe_runtime.nn.grouped_linear import GroupedLinear
from moe_runtime.tensor import QuantizedTensor


class GroupedMLP(nn.Module):
    """y = down(gate * act(gate_up(x))) per expert; children `gate_up` (D -> 2F, or F ungated) and `down` (F -> D)."""

    linear_class = GroupedLinear  # a framework's protocol may need more of it

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = "swiglu",
        gate_up_layout: Layout = "concatenated",
        bias: bool = False,
        single_grouped_weight: bool = True,
        delay_wgrad_compute: bool = False,
        fuse_wgrad_accumulation: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_activation(activation, gate_up_layout)
        self.activation: Activation = activation
        self.gate_up_layout: Layout = gate_up_layout
        up_features = intermediate_size * (1 if activation in UNGATED else 2)

        def linear(in_features: int, out_features: int) -> GroupedLinear:
            return self.linear_class(
                num_experts,
                in_features,
                out_features,
                bias=bias,
                dtype=dtype,
                device=device,
                single_grouped_weight=single_grouped_weight,
                delay_wgrad_compute=delay_wgrad_compute,
                fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            )

        self.gate_up = linear(hidden_size, up_features)
        self.down = linear(intermediate_size, hidden_size)

    def forward(self, x_RD: Tensor, splits: Tensor | Sequence[int], gate_R: Tensor | None = None) -> Tensor:
        """(R, D) rows sorted by expert -> (R, D).

        splits  rows of each expert, as for GroupedLinear
        gate_R  optional routing weight of each row, applied after the activation; its gradient is returned
        """
        if gate_R is not None and gate_R.shape != x_RD.shape[:1]:
            raise ValueError(f"gate must have shape ({x_RD.shape[0]},), one weight a row; got {tuple(gate_R.shape)}")
        return self.forward_ends(x_RD, self.gate_up.ends(x_RD, splits), gate_R)

    def take_weights(self) -> tuple[HeldWeight, HeldWeight]:
        """Both weights for one forward: where a late schedule's nodes are made."""
        return self.gate_up.take_weight(), self.down.take_weight()

    def forward_ends(
        self,
        x_RD: Tensor,
        ends_E: Tensor,
        gate_R: Tensor | None = None,
        weights: tuple[HeldWeight, HeldWeight] | None = None,
    ) -> Tensor:
        """The experts for rows whose ends are known, with weights that `take_weights` gave earlier in this forward."""
        gate_up, down = weights = weights or self.take_weights()
        if self.is_one_function(weights):
            return moe_mlp(x_RD, gate_R, ends_E, gate_up, down, layout=self.gate_up_layout)
        h_RH = self.gate_up.forward_ends(x_RD, ends_E, held=gate_up)
        a_RF = activate(h_RH, gate_R, activation=self.activation, layout=self.gate_up_layout)
        return self.down.forward_ends(a_RF, ends_E, gate_R, held=down)

    def forward_tokens(
        self,
        x_TD: Tensor,
        gate_R: Tensor,
        ends_E: Tensor,
        tokens: TokenRows,
        weights: tuple[HeldWeight, HeldWeight],
    ) -> Tensor:
        """(T, D) tokens -> (T, D), the sum of each token's rows; for weights of which `is_one_function` is true."""
        gate_up, down = weights
        return moe_mlp(x_TD, gate_R, ends_E, gate_up, down, tokens=tokens, layout=self.gate_up_layout)

    def is_one_function(self, weights: tuple[HeldWeight, HeldWeight]) -> bool:
        """Whether `functional.moe_mlp` computes these experts: SwiGLU, no bias, high precision, no adapter."""
        return (
            self.activation == "swiglu"
            and not self.gate_up.use_bias
            and not any(held.adapter is not None for held in weights)
            and not any(held.recipe.quantizes or isinstance(held.value, QuantizedTensor) for held in weights)
        )

    def keep_experts(self, start: int, stop: int) -> None:
        """Drop every expert but start <= e < stop."""
        self.gate_up.keep_experts(start, stop)
        self.down.keep_experts(start, stop)
