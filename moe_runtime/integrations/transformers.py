"""Hugging Face MoE models with our experts in place of theirs. The only file that imports transformers.

Building goes in four steps, so that no step holds more than one module's full values:

    build       the model on meta, each experts module replaced by RoutedExperts (no class is patched)
    distribute  (by the caller) split experts, shard parameters
    initialize  materialize, and fill every module as its Hugging Face class would, from a seed of its own
    observe     hooks that record which experts were chosen, for balancing and metrics
"""

# T tokens   E experts   K top-k   D model width   F expert width

import copy
import difflib
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moe_runtime.core.errors import ConfigError, UnsupportedError
from moe_runtime.functional import Activation
from moe_runtime.nn import RoutedExperts, RoutedExpertsConfig, Router, RouterConfig
from moe_runtime.precision import recompute_context_fn

try:
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
    from transformers.integrations import moe as hf_moe
except ImportError as error:
    raise ImportError("moe_runtime.integrations.transformers needs: pip install 'moe-runtime[train]'") from error

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


_TEMPLATE = "initialization_template"


def load_config(
    *, config_file: str = "", model_type: str = "", fields: Mapping[str, Any] | None = None
) -> PretrainedConfig:
    """The Hugging Face config of a config.json, or of a model type with some fields set.

    Raises ConfigError for an unknown type and for values that the config class refuses. Names of fields are not checked
    here: transformers keeps a misspelled one as an attribute that nothing reads.
    """
    if not config_file and model_type not in transformers.CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, transformers.CONFIG_MAPPING.keys(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"model.model_type must be one that transformers knows, got {model_type!r}{hint}")
    try:
        if config_file:
            return AutoConfig.from_pretrained(config_file, **dict(fields or {}))
        return AutoConfig.for_model(model_type, **dict(fields or {}))
    except (StrictDataclassError, ValueError, TypeError, AttributeError) as error:
        source = config_file or model_type
        raise ConfigError(f"[model] does not make a config of {source!r}: {' '.join(str(error).split())}") from error


def build(
    config: PretrainedConfig,
    *,
    experts_backend: str = "grouped",
    single_grouped_weight: bool = True,
    balance_bias: bool = False,
    delay_wgrad_compute: bool = False,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """The causal language model of `config` on meta.

    experts_backend  "grouped": RoutedExperts in place of every experts module; "hf": Hugging Face's own grouped_mm path
    delay_wgrad_compute  the experts' weight gradients are computed after backward, by a deferred coordinator
    balance_bias     routers get a selection bias for auxiliary-loss-free balancing, where their class has none
    Raises UnsupportedError, naming the class, for experts or routers that cannot be replaced.
    """
    template, model = (_from_config(config, dtype or torch.float32) for _ in range(2))
    # How the classes initialize is asked of an untouched copy, which costs no memory on meta.
    model.__dict__[_TEMPLATE] = template
    if not experts_modules(model):
        raise UnsupportedError(f"{type(model).__name__} has no experts module that this version knows how to find")
    if experts_backend == "grouped":
        for name, module in experts_modules(model).items():
            routed = _routed_experts(module, dtype, single_grouped_weight, delay_wgrad_compute)
            model.set_submodule(name, routed)
    if balance_bias:
        for name, module in router_modules(model).items():
            if not hasattr(module, "e_score_correction_bias"):
                model.set_submodule(name, _biased_router(module, dtype))
    return model


def _from_config(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm", dtype=dtype)
        except ValueError as error:
            raise UnsupportedError(
                f"no mixture of experts is made of a {config.model_type!r} config: {error}"
            ) from error


def enable_activation_checkpointing(model: PreTrainedModel) -> None:
    """Recompute each block's activations in backward instead of keeping them."""
    # transformers renamed it; the older name warns in newer versions.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": recompute_context_fn})


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Experts modules by name: ours, or Hugging Face's (they carry the layout flags of transformers 5.17 and later)."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, RoutedExperts) or all(hasattr(module, flag) for flag in ("has_gate", "is_concatenated"))
    }


def router_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Router modules by name, in forward order: the class that the model records `router_logits` from, or ours."""
    recorder = _router_recorder(model)
    target = getattr(recorder, "target_class", recorder)
    classes = (Router, target) if isinstance(target, type) else (Router,)
    return {name: module for name, module in model.named_modules() if isinstance(module, classes)}


def _router_recorder(model: nn.Module) -> Any:
    for module in model.modules():
        recorded = getattr(module, "_can_record_outputs", None)
        if recorded and "router_logits" in recorded:
            return recorded["router_logits"]
    return None


def _routed_experts(
    source: nn.Module, dtype: torch.dtype | None, single_grouped_weight: bool, delay_wgrad_compute: bool
) -> RoutedExperts:
    up_name, down = _up_name(source), source.get_parameter("down_proj")
    up = source.get_parameter(up_name)
    if getattr(source, "has_post_expert_norm", False):
        raise UnsupportedError(f"{type(source).__name__} normalizes each expert's output, which RoutedExperts does not")
    num_experts, first, second = down.shape
    width, hidden = (first, second) if source.is_transposed else (second, first)
    expected = width * (2 if source.has_gate else 1)
    if up.shape[2 if source.is_transposed else 1] != expected:
        raise UnsupportedError(
            f"{type(source).__name__}.{up_name} should have {expected} features for expert width {width}, "
            f"got shape {tuple(up.shape)}"
        )
    config = RoutedExpertsConfig(
        num_experts=num_experts,
        hidden_size=hidden,
        intermediate_size=width,
        activation=_activation(source),
        gate_up_layout="concatenated" if source.is_concatenated else "interleaved",
        bias=bool(source.has_bias),
        single_grouped_weight=single_grouped_weight,
        delay_wgrad_compute=delay_wgrad_compute,
    )
    return RoutedExperts(config, dtype=dtype, device="meta")


def _up_name(source: nn.Module) -> str:
    return "gate_up_proj" if source.has_gate else "up_proj"


def _activation(source: nn.Module) -> Activation:
    name = type(source).__name__
    if source.has_gate and getattr(type(source), "_apply_gate", None) is not hf_moe._default_apply_gate:
        if name == "GptOssExperts" and (source.alpha, source.limit) == (1.702, 7.0):
            return "swiglu_clamped"
        raise UnsupportedError(f"{name} has a gate function of its own, which RoutedExperts does not know")
    config = getattr(source, "config", None)
    act_name = next(
        (
            value
            for key in ("hidden_act", "hidden_activation", "mlp_hidden_act")
            if (value := getattr(config, key, None))
        ),
        None,
    )
    known = _GATED if source.has_gate else _UNGATED
    if act_name is None or act_name not in known:
        raise UnsupportedError(f"{name}: activation must be one of {', '.join(known)}; got {act_name!r}")
    return known[act_name]


def _biased_router(source: nn.Module, dtype: torch.dtype | None) -> Router:
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


# Initialization ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def initialize(model: PreTrainedModel, *, seed: int, device: torch.device) -> None:
    """Materialize what is on meta on `device` and fill it as the Hugging Face classes initialize it.

    Each module draws from a seed made of `seed` and its name, so the values depend neither on the order of modules nor
    on how the model is sharded: one module is filled whole, in fp32, and each rank keeps its part. Tensors that are
    real already are left as they are. Raises UnsupportedError, naming it, for a tensor that no class initializes.
    """
    template: PreTrainedModel = model.__dict__[_TEMPLATE]
    fresh = {f"{name}.{key}" for name, module in model.named_modules() for key, t in _own_tensors(module) if t.is_meta}
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    model.tie_weights()
    for name, source in template.named_modules():
        if next(_own_tensors(source), None) is None:
            continue
        module = model.get_submodule(name)
        if isinstance(module, RoutedExperts):
            if any(full_name.startswith(f"{name}.") for full_name in fresh):
                _fill_experts(module, source, _initialized(template, name, seed, device))
                fresh = {full_name for full_name in fresh if not full_name.startswith(f"{name}.")}
            continue
        wanted = [key for key, _ in _own_tensors(source) if f"{name}.{key}" in fresh]
        if wanted:
            full = _initialized(template, name, seed, device)
            for key in wanted:
                _keep_part(dict(_own_tensors(module))[key], full[key])
                fresh.discard(f"{name}.{key}")
        if isinstance(module, Router) and module.expert_bias is not None and f"{name}.expert_bias" in fresh:
            module.expert_bias.zero_()
            fresh.discard(f"{name}.expert_bias")
    model.tie_weights()
    if fresh:
        raise UnsupportedError(f"nothing initializes {', '.join(sorted(fresh))}: make it real before initialize()")


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _initialized(template: PreTrainedModel, name: str, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Full fp32 values of one module's own tensors, as its class and those around it initialize them.

    The module is asked first, then every module that contains it, as transformers does: some classes initialize their
    children. All but this module's tensors are on meta, where initialization does nothing.
    """
    whole = copy.copy(template.get_submodule(name))
    whole._parameters = {
        key: None if p is None else nn.Parameter(_blank(p, device)) for key, p in whole._parameters.items()
    }
    whole._buffers = {key: None if b is None else _blank(b, device) for key, b in whole._buffers.items()}
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        current, path = whole, name
        template._init_weights(current)
        while path:
            path, _, child = path.rpartition(".")
            around = copy.copy(template.get_submodule(path))
            around._modules = {**around._modules, child: current}
            template._init_weights(around)
            current = around
    values = dict(_own_tensors(whole))
    for key, value in values.items():
        if value.is_floating_point() and value.isnan().any():
            raise UnsupportedError(f"{type(whole).__name__} leaves {name}.{key} uninitialized")
    return values


def _blank(tensor: Tensor, device: torch.device) -> Tensor:
    """A real tensor of this one's shape whose values show whether anything was written."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.full(tensor.shape, float("nan"), dtype=torch.float32, device=device)


def _fill_experts(module: RoutedExperts, source: nn.Module, full: Mapping[str, Tensor]) -> None:
    for linear, key in ((module.experts.gate_up, _up_name(source)), (module.experts.down, "down_proj")):
        first, last = module.first_expert, module.first_expert + linear.num_gemms
        weight_EFD = full[key].transpose(1, 2) if source.is_transposed else full[key]
        values = {"weight": weight_EFD[first:last]}
        if linear.use_bias:
            values["bias"] = full[f"{key}_bias"][first:last]
        for kind, stacked in values.items():
            if linear.single_grouped_weight:
                _keep_part(linear.get_parameter(kind), stacked)
                continue
            for e, member in enumerate(stacked):
                _keep_part(linear.get_parameter(f"{kind}{e}"), member)


def _keep_part(target: Tensor, full: Tensor) -> None:
    """Copy into `target` the part of `full` that this rank holds."""
    if not isinstance(target, DTensor):
        target.copy_(full)
        return
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    part = full[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
    target.to_local().copy_(part)


# Observation ---------------------------------------------------------------------------------------------------------


class RoutingRecorder:
    """Records, while it is on, what each layer's router chose: expert ids, and logits where the model names them.

    Hooks sit on module instances. It must be on only during the original forward, or recomputation counts twice.
    """

    def __init__(self, model: nn.Module) -> None:
        self.ids_TK: list[Tensor] = []
        self.logits_TE: list[Tensor] = []
        self._on = False
        for module in experts_modules(model).values():
            module.register_forward_pre_hook(self._saw_experts, with_kwargs=True)
        index = getattr(_router_recorder(model), "index", 0)
        for module in router_modules(model).values():
            module.register_forward_hook(lambda _m, _a, out, index=index: self._saw_router(out, index))

    @contextmanager
    def recording(self) -> Iterator["RoutingRecorder"]:
        """Record one forward; earlier records are dropped."""
        self.ids_TK, self.logits_TE, self._on = [], [], True
        try:
            yield self
        finally:
            self._on = False

    def _saw_experts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._on:
            # Positional second argument in every class; two classes name it differently as a keyword.
            ids_TK = args[1] if len(args) > 1 else kwargs.get("top_k_index", kwargs.get("router_indices"))
            if not isinstance(ids_TK, Tensor):
                raise TypeError(
                    f"{type(module).__name__} should receive expert ids as its second argument, got {ids_TK!r}"
                )
            self.ids_TK.append(ids_TK)

    def _saw_router(self, output: Any, index: int) -> None:
        if self._on:
            self.logits_TE.append(output[index] if isinstance(output, tuple) else output)


def selection_biases(model: nn.Module) -> list[Tensor]:
    """The per-expert selection bias of each router that has one, in forward order; the caller updates them in place."""
    biases = (
        getattr(module, "expert_bias", getattr(module, "e_score_correction_bias", None))
        for module in router_modules(model).values()
    )
    return [bias_E for bias_E in biases if bias_E is not None]


def num_experts(model: nn.Module) -> int:
    """Experts of an MoE layer over all ranks; UnsupportedError for a model whose layers differ."""
    counts = {
        module.config.num_experts if isinstance(module, RoutedExperts) else module.get_parameter("down_proj").shape[0]
        for module in experts_modules(model).values()
    }
    if len(counts) != 1:
        raise UnsupportedError(f"every MoE layer must have as many experts, got {sorted(counts)}")
    return counts.pop()
