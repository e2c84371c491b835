"""GroupedLinear: E linear layers whose rows arrive sorted by expert, with one packed weight or E separate ones."""

# R routed rows   D in features   F out features   E local experts

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from moe_runtime.functional import add_expert_bias, ends_from_splits, grouped_linear
from moe_runtime.tensor import GroupedTensor


class GroupedLinear(nn.Module):
    """y[r] = x[r] @ weight[e(r)].T + bias[e(r)], where expert e owns splits[e] consecutive rows.

    Parameters: `weight` (E, F, D) and `bias` (E, F); with `single_grouped_weight=False`, `weight0` ... `weight{E-1}` of
    shape (F, D) and `bias0` ... of shape (F,). Both layouts compute the same bits and load each other's state dict.
    """

    weight: Tensor
    bias: Tensor

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        single_grouped_weight: bool = True,
    ) -> None:
        super().__init__()
        for name, value in (("num_gemms", num_gemms), ("in_features", in_features), ("out_features", out_features)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.single_grouped_weight = single_grouped_weight
        self.use_bias = bias
        weight_EFD = torch.empty(num_gemms, out_features, in_features, dtype=dtype, device=device)
        bias_EF = torch.empty(num_gemms, out_features, dtype=dtype, device=device) if bias else None
        self._register("weight", weight_EFD)
        self._register("bias", bias_EF)
        if weight_EFD.device.type != "meta":
            self.reset_parameters()

    def _register(self, name: str, stacked: Tensor | None) -> None:
        if self.single_grouped_weight or stacked is None:
            self.register_parameter(name, None if stacked is None else nn.Parameter(stacked))
            return
        for e in range(self.num_gemms):
            # A copy: separate parameters must not share one storage, or resizing one would take the others along.
            self.register_parameter(f"{name}{e}", nn.Parameter(stacked[e].clone()))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Every way to attach a parameter comes through here; a stacked weight becomes a GroupedTensor."""
        if name == "weight" and param is not None and type(param) in (nn.Parameter, Tensor):
            if param.shape != (self.num_gemms, self.out_features, self.in_features):
                raise ValueError(
                    f"weight must have shape ({self.num_gemms}, {self.out_features}, {self.in_features}), "
                    f"(experts, out, in); got {tuple(param.shape)}"
                )
            param = nn.Parameter(GroupedTensor.pack(param.detach()), requires_grad=param.requires_grad)
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Each expert as nn.Linear initializes itself: uniform in +-1/sqrt(in_features)."""
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-bound, bound)

    def forward(self, x_RD: Tensor, splits: Tensor | Sequence[int]) -> Tensor:
        """(R, in_features) rows sorted by expert -> (R, out_features).

        splits  rows of each expert: an int tensor (E,) on the rows' device (no host wait), on the CPU, or a list.
        Rows past the last expert's come out as 0 and get gradient 0, whatever they held.
        """
        return self.forward_ends(x_RD, self.ends(x_RD, splits))

    def ends(self, x_RD: Tensor, splits: Tensor | Sequence[int]) -> Tensor:
        """int32 (E,) end row of each expert, after checking x and splits."""
        if x_RD.dim() != 2 or x_RD.shape[1] != self.in_features:
            raise ValueError(f"rows must have shape (R, {self.in_features}), got {tuple(x_RD.shape)}")
        return ends_from_splits(splits, num_experts=self.num_gemms, num_rows=x_RD.shape[0], device=x_RD.device)

    def forward_ends(self, x_RD: Tensor, ends_E: Tensor, gate_R: Tensor | None = None) -> Tensor:
        """The layer for rows whose ends are known; `gate_R` scales the bias when the rows came scaled by it."""
        y_RF = grouped_linear(x_RD, self.stacked_weight(), ends_E)
        bias_EF = self.stacked_bias()
        return y_RF if bias_EF is None else add_expert_bias(y_RF, bias_EF, ends_E, gate_R)

    def stacked_weight(self) -> Tensor:
        """(E, F, D) with history: the parameter itself, or the E separate ones stacked."""
        return self.weight if self.single_grouped_weight else self._stack("weight")

    def stacked_bias(self) -> Tensor | None:
        """(E, F) with history, or None."""
        if not self.use_bias:
            return None
        return self.bias if self.single_grouped_weight else self._stack("bias")

    def _stack(self, name: str) -> Tensor:
        return torch.stack([getattr(self, f"{name}{e}") for e in range(self.num_gemms)])

    def keep_experts(self, start: int, stop: int) -> None:
        """Drop every expert but start <= e < stop. Works on meta and on real storage; parameters are new objects."""
        if not 0 <= start < stop <= self.num_gemms:
            raise ValueError(f"expected 0 <= start < stop <= {self.num_gemms} experts, got {start} and {stop}")
        with torch.no_grad():
            kept = {
                name: value for name in ("weight", "bias") if (value := getattr(self, f"stacked_{name}")()) is not None
            }
        for name in list(self._parameters):
            del self._parameters[name]
        self.num_gemms = stop - start
        for name in ("weight", "bias"):
            self._register(name, kept[name].detach()[start:stop].clone() if name in kept else None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        # to_empty and a change of device type put plain parameters in place of packed ones.
        weight = self._parameters.get("weight")
        if type(weight) is nn.Parameter:
            del self._parameters["weight"]
            self.register_parameter("weight", weight)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept the other layout's names: stack `weight0`, `weight1`, ... or take `weight` apart."""
        for name in ("weight", "bias"):
            members = [f"{prefix}{name}{e}" for e in range(self.num_gemms)]
            if self.single_grouped_weight and all(key in state_dict for key in members):
                state_dict[prefix + name] = torch.stack([state_dict.pop(key) for key in members])
            elif not self.single_grouped_weight and prefix + name in state_dict:
                stacked = state_dict.pop(prefix + name)
                if stacked.shape[0] != self.num_gemms:
                    raise ValueError(f"{prefix}{name} must hold {self.num_gemms} experts, got {stacked.shape[0]}")
                state_dict.update(zip(members, stacked.unbind(0), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, single_grouped_weight={self.single_grouped_weight}"
        )
