"""GroupedLinear: E linear layers whose rows arrive sorted by expert, with one packed weight or E separate ones."""

# R routed rows   D in features   F out features   E local experts

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_runtime.functional import (
    HeldAdapter,
    HeldWeight,
    add_expert_bias,
    add_lora_update,
    check_weight,
    ends_from_splits,
    grouped_linear,
    stack_experts,
)
from moe_runtime.precision import InitPolicy, Recipe, current_compute, current_init, recipes
from moe_runtime.runtime import (
    JobKey,
    MainGrad,
    WgradCoordinator,
    WgradSlot,
    check_main_grad,
    in_backward,
    late_node,
)
from moe_runtime.tensor import GroupedTensor, QuantizedTensor, Quantizer


class Adapter(Protocol):
    """What a layer asks of the module that learns beside its weight: `GroupedLoRA`."""

    def take(self) -> HeldAdapter | None:
        """Its factors for one forward, where a late schedule's nodes are made; None: it changes nothing now."""
        ...

    def keep_experts(self, start: int, stop: int) -> None:
        """As `GroupedLinear.keep_experts`."""
        ...

    def backward_dw(self) -> None:
        """As `GroupedLinear.backward_dw`."""
        ...


class GroupedLinear(nn.Module):
    """y[r] = x[r] @ weight[e(r)].T + bias[e(r)], where expert e owns splits[e] consecutive rows.

    Parameters: `weight` (E, F, D) and `bias` (E, F); with `single_grouped_weight=False`, `weight0` ... `weight{E-1}` of
    shape (F, D) and `bias0` ... of shape (F,). Both layouts compute the same bits and load each other's state dict.
    Built under `quantized_model_init`, weights are stored quantized; called under `autocast`, products are quantized.

    delay_wgrad_compute      the weight gradient waits for `backward_dw`, or for a coordinator's flush
    fuse_wgrad_accumulation  it is added to `main_grad` of the weight, which a reducer puts there, and not to `.grad`:
                             Megatron's protocol, see runtime/main_grad. A bias has its gradient in `.grad`.
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
        delay_wgrad_compute: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("num_gemms", num_gemms), ("in_features", in_features), ("out_features", out_features)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.single_grouped_weight = single_grouped_weight
        self.use_bias = bias
        self.delay_wgrad_compute = delay_wgrad_compute
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self._main_grad = MainGrad(self) if fuse_wgrad_accumulation else None
        self._coordinator: WgradCoordinator | None = None
        self._wgrad_name = ""
        self._last_recipe: Recipe = recipes.HighPrecision()
        self.lora: Adapter | None = None  # a GroupedLoRA registers itself here, as a child
        self.init_policy: InitPolicy | None = current_init()
        self._quantizer = _quantizer_of(self.init_policy)
        if delay_wgrad_compute:
            WgradCoordinator("deferred", side_stream=False).adopt("", self)
        weight_EFD = self._empty_weight(dtype, device)
        bias_EF = torch.empty(num_gemms, out_features, dtype=dtype, device=device) if bias else None
        self._register("weight", weight_EFD)
        self._register("bias", bias_EF)
        if weight_EFD.device.type != "meta":
            self.reset_parameters()

    def _empty_weight(self, dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
        shape = (self.num_gemms, self.out_features, self.in_features)
        if self._quantizer is None:
            return torch.empty(shape, dtype=dtype, device=device)
        # By way of meta, so that no high-precision weight is ever held.
        packed = self._quantized(torch.empty(shape, dtype=dtype, device="meta"))
        return torch.empty_like(packed, device=device or torch.get_default_device())

    def _quantized(self, weight: Tensor) -> Tensor:
        """A high-precision weight, stacked or one expert's, as `quantized_model_init` said when this was built."""
        assert self._quantizer is not None and self.init_policy is not None
        keep = self.init_policy.preserve_high_precision_init_val
        if weight.dim() == 2:
            return QuantizedTensor.quantized(weight, self._quantizer, keep_init=keep)
        return GroupedTensor.pack(weight, self._quantizer, keep_init=keep)

    def _register(self, name: str, stacked: Tensor | None) -> None:
        if self.single_grouped_weight or stacked is None:
            self.register_parameter(name, None if stacked is None else nn.Parameter(stacked))
            return
        for e in range(self.num_gemms):
            # A copy: separate parameters must not share one storage, or resizing one would take the others along.
            self.register_parameter(f"{name}{e}", nn.Parameter(stacked[e].clone()))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Every way to attach a parameter comes through here; a stacked weight becomes a GroupedTensor, and any weight
        of a module that was built to store them so is quantized."""
        if name == "weight" and param is not None and not isinstance(param, DTensor):
            if param.shape != (self.num_gemms, self.out_features, self.in_features):
                raise ValueError(
                    f"weight must have shape ({self.num_gemms}, {self.out_features}, {self.in_features}), "
                    f"(experts, out, in); got {tuple(param.shape)}"
                )
            if not isinstance(param, GroupedTensor):
                param = nn.Parameter(GroupedTensor.pack(param.detach()), requires_grad=param.requires_grad)
        quantizes = self.__dict__.get("_quantizer") is not None and name.startswith("weight")
        if quantizes and param is not None and not isinstance(param, DTensor | QuantizedTensor):
            param = nn.Parameter(self._quantized(param.detach()), requires_grad=param.requires_grad)
        if param is not None and name.startswith("weight") and self.__dict__.get("delay_wgrad_compute", False):
            # Before any reducer looks: its own hook would fire when backward ends, and the gradient comes later.
            param.skip_backward_post_hook = True  # pyright: ignore[reportAttributeAccessIssue]
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Each expert as nn.Linear initializes itself: uniform in +-1/sqrt(in_features)."""
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            for parameter in self.parameters(recurse=False):
                if isinstance(parameter, QuantizedTensor):
                    values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                    parameter.copy_(values.uniform_(-bound, bound))
                else:
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

    def forward_ends(
        self, x_RD: Tensor, ends_E: Tensor, gate_R: Tensor | None = None, held: HeldWeight | None = None
    ) -> Tensor:
        """The layer for rows whose ends are known.

        gate_R  scales the bias when the rows came scaled by it
        held    the weight as `take_weight` gave it earlier in this forward
        """
        held = held or self.take_weight()
        y_RF = grouped_linear(x_RD, held.value, ends_E, held.slot, held.recipe)
        if held.adapter is not None:
            y_RF = add_lora_update(y_RF, x_RD, held.adapter, ends_E)
        bias_EF = self.stacked_bias()
        return y_RF if bias_EF is None else add_expert_bias(y_RF, bias_EF, ends_E, gate_R)

    def take_weight(self) -> HeldWeight:
        """The weight for one forward. A late schedule's node is made here: take it where the gradient may be late."""
        recipe = self._recipe()
        weight_EFD = self.stacked_weight()
        if isinstance(weight_EFD, QuantizedTensor):
            check_weight(weight_EFD, recipe, self.described())
        coordinator = self._coordinator
        slot = None
        if coordinator is not None and weight_EFD.requires_grad:
            slot = coordinator.slot(self._wgrad_name, "weight")
        if self._main_grad is not None and weight_EFD.requires_grad:
            check_main_grad(self, self._wgrad_name)
            slot = slot or WgradSlot(None, JobKey(self._wgrad_name, "weight", 0, 0))
            slot.main_grad = self._main_grad
        if slot is not None and slot.coordinator is not None and slot.coordinator.schedule == "late":
            weight_EFD = late_node(weight_EFD, slot)
        return HeldWeight(weight_EFD, slot, recipe, None if self.lora is None else self.lora.take())

    def described(self) -> str:
        name = f"{self._wgrad_name} = " if self._wgrad_name else ""
        built = "" if self.init_policy is None else f", built by {self.init_policy.recipe}"
        return f"{name}{type(self).__name__}({self.extra_repr()}){built}"

    def _recipe(self) -> Recipe:
        """What `autocast` asks for now; a forward that is recomputed must see what its first run saw."""
        compute = current_compute()
        quantizes = self._last_recipe.quantizes or compute.recipe.quantizes
        if quantizes and not compute.recomputing and in_backward():
            raise RuntimeError(
                f"a quantized layer, {self.described()}, runs its forward inside a backward, where the "
                f"recipe of its first run ({self._last_recipe}) cannot be seen: pass "
                "context_fn=moe_runtime.recompute_context_fn to torch.utils.checkpoint.checkpoint"
            )
        if compute.recipe.quantizes or torch.is_grad_enabled():
            # An evaluation in high precision, between a forward and its backward, must not hide what that forward saw.
            self._last_recipe = compute.recipe
        return compute.recipe

    def own_wgrad(self, coordinator: WgradCoordinator, name: str) -> None:
        """Hand weight gradients to `coordinator` from now on, under this full name."""
        self._coordinator, self._wgrad_name = coordinator, name

    def wgrad_parameters(self, parameter: str) -> list[nn.Parameter]:
        """What a gradient called `parameter` belongs to: the stacked parameter, or the E separate ones in id order."""
        names = [parameter] if self.single_grouped_weight else [f"{parameter}{e}" for e in range(self.num_gemms)]
        return [self.get_parameter(name) for name in names]

    def need_backward_dw(self) -> bool:
        """Whether `backward_dw` must be called after each backward: Megatron's protocol."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Compute and accumulate the weight gradient of the oldest backward that waits; does nothing unless delayed.

        With an adapter, which alone is trained, the adapter's.
        """
        if self.lora is not None:
            self.lora.backward_dw()
        elif self.delay_wgrad_compute and self._coordinator is not None:
            self._coordinator.run_oldest(self._wgrad_name)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Call `hook()` after the last waiting weight gradient was accumulated: Megatron's protocol."""
        if self._coordinator is None or not self.delay_wgrad_compute:
            raise RuntimeError("hooks for delayed weight gradients need delay_wgrad_compute=True, got False")
        self._coordinator.add_hook(self._wgrad_name, "weight", hook)

    def train(self, mode: bool = True) -> Self:
        """As nn.Module; leaving training with weight gradients pending raises, naming them."""
        if not mode and self._coordinator is not None:
            self._coordinator.check_nothing_pending("eval()")
        return super().train(mode)

    def stacked_weight(self) -> Tensor:
        """(E, F, D) with history: the parameter itself, or the E separate ones stacked."""
        return self.weight if self.single_grouped_weight else self._stack("weight")

    def stacked_bias(self) -> Tensor | None:
        """(E, F) with history, or None."""
        if not self.use_bias:
            return None
        return self.bias if self.single_grouped_weight else self._stack("bias")

    def _stack(self, name: str) -> Tensor:
        return stack_experts([getattr(self, f"{name}{e}") for e in range(self.num_gemms)])

    def keep_experts(self, start: int, stop: int) -> None:
        """Drop every expert but start <= e < stop. Works on meta and on real storage; parameters are new objects."""
        if not 0 <= start < stop <= self.num_gemms:
            raise ValueError(f"expected 0 <= start < stop <= {self.num_gemms} experts, got {start} and {stop}")
        with torch.no_grad():
            # Packed by hand where they are separate: what computes with them drops their initial values.
            separate = [parameter.detach() for parameter in self.wgrad_parameters("weight")]
            kept = {"weight": self.weight if self.single_grouped_weight else GroupedTensor.pack(separate)}
            if (bias_EF := self.stacked_bias()) is not None:
                kept["bias"] = bias_EF
        trained = {name: self.wgrad_parameters(name)[0].requires_grad for name in kept}
        for name in list(self._parameters):
            del self._parameters[name]
        self.num_gemms = stop - start
        for name in ("weight", "bias"):
            self._register(name, kept[name].detach()[start:stop].clone() if name in kept else None)
            for parameter in self.wgrad_parameters(name) if name in kept else ():
                parameter.requires_grad_(trained[name])
        if self.lora is not None:
            self.lora.keep_experts(start, stop)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        marked = [name for name, p in self._parameters.items() if getattr(p, "skip_backward_post_hook", False)]
        super()._apply(fn, recurse)
        # to_empty and a change of device type put plain parameters in place of packed ones, without their marks.
        weight = self._parameters.get("weight")
        if type(weight) is nn.Parameter:
            packed = nn.Parameter(GroupedTensor.pack(weight.detach()), requires_grad=weight.requires_grad)
            if torch.__future__.get_swap_module_params_on_conversion():
                torch.utils.swap_tensors(weight, packed)  # the object stays the one that optimizers hold
            else:
                self._parameters["weight"] = packed
        for name in marked:
            self.get_parameter(name).skip_backward_post_hook = True  # pyright: ignore[reportAttributeAccessIssue]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept the other layout's names: stack `weight0`, `weight1`, ... or take `weight` apart."""
        for name in ("weight", "bias"):
            members = [f"{prefix}{name}{e}" for e in range(self.num_gemms)]
            if self.single_grouped_weight and all(key in state_dict for key in members):
                values = [state_dict.pop(key) for key in members]
                quantized = all(isinstance(value, QuantizedTensor) for value in values)
                state_dict[prefix + name] = GroupedTensor.pack(values) if quantized else torch.stack(values)
            elif not self.single_grouped_weight and prefix + name in state_dict:
                stacked = state_dict.pop(prefix + name)
                if stacked.shape[0] != self.num_gemms:
                    raise ValueError(f"{prefix}{name} must hold {self.num_gemms} experts, got {stacked.shape[0]}")
                # Copies: with assign=True they become the parameters, which must not share one storage.
                state_dict.update(zip(members, (member.clone() for member in stacked.unbind(0)), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, single_grouped_weight={self.single_grouped_weight}"
            + (f", weight={self._quantizer.format.name}" if self._quantizer is not None else "")
        )


def _quantizer_of(policy: InitPolicy | None) -> Quantizer | None:
    """Of a weight built now: columnwise too, unless that is left out or nothing will ever need it."""
    if policy is None:
        return None
    columnwise = torch.is_grad_enabled() and not policy.omit_columnwise_primary_weight_storage
    return Quantizer(format=policy.recipe.weight, columnwise=columnwise)
