"""Our experts beside Megatron's SequentialMLP inside its MoELayer: values, gradients, initialization, attributes."""

import copy
from typing import Any

import torch
from mcore_world import EXPERTS, config, expert_weights, groups, moe_layer, rows
from megatron.core.activations import quick_gelu, squared_relu
from torch import nn
from torch.nn import functional as F

from moe_runtime.integrations.megatron import experts_spec

ACTIVATIONS = {
    "swiglu": {},
    "swiglu_fused": {"bias_activation_fusion": True},
    "geglu": {"activation_func": F.gelu},
    "swiglu_clamped": {
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
    },
    "relu2": {"activation_func": squared_relu, "gated_linear_unit": False},
}


def against_sequential(ep: int, options: dict[str, Any], layout: dict[str, Any]) -> dict[str, float]:
    """Largest relative difference of each thing that a layer makes."""
    options = dict(options)
    options.update(ACTIVATIONS[options.pop("activation", "swiglu")])
    groups(ep)
    cfg = config(ep, **options)
    theirs, ours = moe_layer(cfg, ours=False), moe_layer(cfg, ours=True, **layout)
    if cfg.add_bias_linear:
        for (
            expert
        ) in theirs.experts.local_experts:  # torch refuses Megatron's `+=` on what a function returned as it is
            expert.linear_fc2.register_forward_hook(lambda _, __, out: (out[0].clone(), out[1]))
        with torch.no_grad():
            for index, (a, b) in enumerate(_biases(theirs.experts, ours.experts)):
                values = torch.randn(a[0].shape, generator=torch.Generator().manual_seed(index))
                for p in (*a, *b):
                    p.copy_(values if p.dim() == 1 else values.expand(p.shape))
    # On the CPU each of their ranks makes the same experts.
    _copy_weights(theirs.experts, ours.experts, same=ep == 1)
    results = []
    for layer in (theirs, ours):
        x = rows(7, seed=3).to(cfg.params_dtype).requires_grad_()
        out, bias = layer(x)
        assert bias is None
        (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append(
            {"out": out, "dx": x.grad, "router": layer.router.weight.grad, **expert_weights(layer.experts, True)}
        )
    assert results[0].keys() == results[1].keys(), (results[0].keys(), results[1].keys())
    return {name: _difference(results[0][name], results[1][name]) for name in results[0]}


def _biases(theirs: nn.Module, ours: nn.Module) -> list[tuple[list[Any], list[Any]]]:
    return [
        ([getattr(e, name).bias for e in theirs.local_experts], getattr(ours, name).wgrad_parameters("bias"))
        for name in ("linear_fc1", "linear_fc2")
    ]


def _copy_weights(theirs: nn.Module, ours: nn.Module, *, same: bool) -> None:
    for name in ("linear_fc1", "linear_fc2"):
        linear = getattr(ours, name)
        values = expert_weights(ours)[f"{name}.weight"]
        for e, expert in enumerate(theirs.local_experts):
            if same:
                assert getattr(expert, name).weight.equal(values[e]), f"initial values of {name}, expert {e}"
            with torch.no_grad():
                getattr(expert, name).weight.copy_(values[e])
        assert linear.num_gemms == len(theirs.local_experts)


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / a.abs().max()).item()


def initial_values(ep: int) -> torch.Tensor:
    """Every expert's first weight, by global id."""
    groups(ep)
    return expert_weights(moe_layer(config(ep), ours=True).experts)["linear_fc1.weight"]


def attributes(ep: int, layout: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Megatron's attributes of our parameters after everything that replaces them, where they changed: nothing."""
    groups(ep)
    cfg = config(ep, add_bias_linear=True)
    layer = moe_layer(cfg, ours=True, delay_wgrad_compute=True, **layout)
    expected = _marks(layer.experts)
    changed = {}

    def check(what: str, experts: nn.Module) -> None:
        if (got := _marks(experts)) != expected:
            changed[what] = {
                name: (got.get(name), expected[name]) for name in expected if got.get(name) != expected[name]
            }

    copied = {name: copy.deepcopy(getattr(layer.experts, name)) for name in ("linear_fc1", "linear_fc2")}
    check("deepcopy", nn.ModuleDict(copied))
    check("bfloat16", layer.bfloat16().experts)
    state = {name: value.clone() for name, value in layer.experts.state_dict().items()}
    layer.experts.load_state_dict({name: nn.Parameter(value) for name, value in state.items()}, assign=True)
    check("load_state_dict(assign=True)", layer.experts)
    fc1 = layer.experts.linear_fc1
    for name, parameter in list(fc1.named_parameters()):
        setattr(fc1, name, nn.Parameter(parameter.detach().clone()))
    check("assignment", layer.experts)
    layer.experts.to("meta").to_empty(device="cpu")
    check("to_empty", layer.experts)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.experts.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    check("swap", layer.experts)
    return {"marks": expected, "changed": changed}


def _marks(experts: nn.Module) -> dict[str, dict[str, Any]]:
    names = ("allreduce", "tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")
    return {
        name: {
            **{key: getattr(p, key, "nothing") for key in names},
            "skip_backward_post_hook": getattr(p, "skip_backward_post_hook", False),
        }
        for name, p in experts.named_parameters()
    }


def their_attributes() -> dict[str, dict[str, Any]]:
    """What Megatron's own experts carry at EP 2."""
    groups(2)
    return _marks(moe_layer(config(2), ours=False).experts)


def refusal(options: dict[str, Any]) -> str:
    """The sentence with which a config is refused."""
    groups()
    cfg = config()
    for name, value in options.items():  # past Megatron's own checks, which want a GPU
        setattr(cfg, name, {"tanh": torch.tanh}.get(value, value) if isinstance(value, str) else value)
    try:
        experts_spec()(EXPERTS, cfg)
    except ValueError as error:
        return str(error)
    return ""
