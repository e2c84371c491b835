"""Which modules of a Hugging Face model are experts and routers, how theirs are laid out, and ours in their place."""

# T tokens   E experts   K top-k   D model width   F expert width

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import moe as hf_moe

from moe_runtime.core.errors import UnsupportedError
from moe_runtime.functional import Activation
from moe_runtime.nn import RoutedExperts, RoutedExpertsConfig, Router, RouterConfig

TEMPLATE = "initialization_template"
"""Where a model keeps the untouched copy, on meta, that knows how its classes initialize."""

# Activation of a gated experts class by the name of its elementwise function, and of an ungated one.
_GATED: Mapping[str, Activation] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
}
_UNGATED: Mapping[str, Activation] = {"relu2": "relu2"}

# Softmax top-k routers whose forward `Router` reproduces, and whether they normalize where no attribute says so.
_SOFTMAX_ROUTERS: Mapping[str, bool] = {
    "MixtralTopKRouter": True,
    "Qwen2MoeTopKRouter": False,
    "Qwen3MoeTopKRouter": False,
    "Qwen3NextTopKRouter": False,
    "OlmoeTopKRouter": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsLayout:
    """How a Hugging Face experts class lays its parameters out: the flags that transformers gives most of them."""

    has_gate: bool = True
    has_bias: bool = False
    is_transposed: bool = False
    is_concatenated: bool = True

    @property
    def up_name(self) -> str:
        """Of the parameter that multiplies first."""
        return "gate_up_proj" if self.has_gate else "up_proj"


# Classes without the flags: Llama 4 hands its experts every token once for each expert, scaled by the routing weight.
_UNFLAGGED: Mapping[str, ExpertsLayout] = {"Llama4TextExperts": ExpertsLayout(is_transposed=True)}
_GATES_ON_INPUT = "Llama4TextMoe"


def experts_layout(module: nn.Module) -> ExpertsLayout:
    """Of a Hugging Face experts module."""
    known = _UNFLAGGED.get(type(module).__name__)
    if known is not None:
        return known
    flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
    return ExpertsLayout(**{flag: bool(getattr(module, flag)) for flag in flags})


def is_experts(module: nn.Module) -> bool:
    """Whether this is an experts module, ours or Hugging Face's (flagged in transformers 5.17 and later)."""
    flagged = all(hasattr(module, flag) for flag in ("has_gate", "is_concatenated"))
    return isinstance(module, RoutedExperts) or flagged or type(module).__name__ in _UNFLAGGED


def is_told_ids(module: nn.Module) -> bool:
    """Whether an experts module is called with the ids of the chosen experts."""
    return isinstance(module, RoutedExperts) or type(module).__name__ not in _UNFLAGGED


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Experts modules by name, ours or Hugging Face's, in forward order."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def router_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Router modules by name, in forward order: the class that the model records `router_logits` from, or ours."""
    recorder = router_recorder(model)
    target = getattr(recorder, "target_class", recorder)
    classes = (Router, target) if isinstance(target, type) else (Router,)
    return {name: module for name, module in model.named_modules() if isinstance(module, classes)}


def router_recorder(model: nn.Module) -> Any:
    """What the model's class says it records `router_logits` from; None where it does not."""
    for module in model.modules():
        recorded = getattr(module, "_can_record_outputs", None)
        if recorded and "router_logits" in recorded:
            return recorded["router_logits"]
    return None


def replace_experts(
    model: PreTrainedModel, *, dtype: torch.dtype | None, single_grouped_weight: bool, delay_wgrad_compute: bool
) -> None:
    """Put RoutedExperts on meta in place of every experts module of `model`."""
    for name, source in experts_modules(model).items():
        around_name = name.rpartition(".")[0]
        around = model.get_submodule(around_name)
        on_input = type(around).__name__ == _GATES_ON_INPUT
        config = _config(source, model.config, on_input=on_input)
        routed = RoutedExperts(
            RoutedExpertsConfig(
                **config, single_grouped_weight=single_grouped_weight, delay_wgrad_compute=delay_wgrad_compute
            ),
            dtype=dtype,
            device="meta",
        )
        model.set_submodule(name, routed)
        if on_input:
            model.set_submodule(around_name, InputGatedMoE(around, routed))


class InputGatedMoE(nn.Module):
    """out = shared(x) + sum_k expert[ids[t, k]](x[t] * sigmoid(logits[t, ids[t, k]])): Llama 4's mixture.

    It stands in place of the Hugging Face module, whose router and shared expert it keeps under their names.
    """

    def __init__(self, source: nn.Module, experts: RoutedExperts) -> None:
        super().__init__()
        self.experts = experts
        self.router = source.get_submodule("router")
        self.shared_expert = source.get_submodule("shared_expert")

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """(..., D) -> (T, D), and the router's logits (T, E)."""
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores_TE, logits_TE = self.router(x_TD)
        ids_TK = logits_TE.topk(int(self.router.top_k), dim=1).indices  # pyright: ignore[reportArgumentType]
        gates_TK = scores_TE.gather(1, ids_TK)
        return self.experts(x_TD, ids_TK, gates_TK, beside=lambda: self.shared_expert(x_TD)), logits_TE


def _config(source: nn.Module, model_config: Any, *, on_input: bool) -> dict[str, Any]:
    name, layout = type(source).__name__, experts_layout(source)
    up, down = source.get_parameter(layout.up_name), source.get_parameter("down_proj")
    if getattr(source, "has_post_expert_norm", False):
        raise UnsupportedError(f"{name} normalizes each expert's output, which RoutedExperts does not")
    num_experts, first, second = down.shape
    width, hidden = (first, second) if layout.is_transposed else (second, first)
    expected = width * (2 if layout.has_gate else 1)
    if up.shape[2 if layout.is_transposed else 1] != expected:
        raise UnsupportedError(
            f"{name}.{layout.up_name} should have {expected} features for expert width {width}, "
            f"got shape {tuple(up.shape)}"
        )
    return {
        "num_experts": num_experts,
        "hidden_size": hidden,
        "intermediate_size": width,
        "activation": _activation(source, getattr(source, "config", model_config)),
        "gate_up_layout": "concatenated" if layout.is_concatenated else "interleaved",
        "bias": layout.has_bias,
        "gates_on": "input" if on_input else "output",
    }


def _activation(source: nn.Module, config: Any) -> Activation:
    name, has_gate = type(source).__name__, experts_layout(source).has_gate
    plain_gate = name in _UNFLAGGED or getattr(type(source), "_apply_gate", None) is hf_moe._default_apply_gate
    if has_gate and not plain_gate:
        if name == "GptOssExperts" and (source.alpha, source.limit) == (1.702, 7.0):
            return "swiglu_clamped"
        raise UnsupportedError(f"{name} has a gate function of its own, which RoutedExperts does not know")
    names = (getattr(config, key, None) for key in ("hidden_act", "hidden_activation", "mlp_hidden_act"))
    act_name = next((found for found in names if found), None)
    known = _GATED if has_gate else _UNGATED
    if act_name is None or act_name not in known:
        raise UnsupportedError(f"{name}: activation must be one of {', '.join(known)}; got {act_name!r}")
    return known[act_name]


def biased_router(source: nn.Module, dtype: torch.dtype | None) -> Router:
    """Ours, with a selection bias, in place of a softmax router; UnsupportedError for another class."""
    name = type(source).__name__
    if name not in _SOFTMAX_ROUTERS:
        raise UnsupportedError(
            f"router.bias_update_rate needs a router with a selection bias; {name} has none and is not one of "
            f"{', '.join(_SOFTMAX_ROUTERS)}, which can be replaced: use router.aux_loss_coefficient"
        )
    num_experts, hidden = source.get_parameter("weight").shape
    config = RouterConfig(
        num_experts=num_experts,
        hidden_size=hidden,
        top_k=int(source.top_k),  # pyright: ignore[reportArgumentType]
        norm_topk_prob=bool(getattr(source, "norm_topk_prob", _SOFTMAX_ROUTERS[name])),
        expert_bias=True,
    )
    return Router(config, dtype=dtype, device="meta")
