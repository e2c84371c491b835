"""Shared experts: a dense MLP with an optional gate, against plain torch in float64."""

import math

import pytest
import torch
from torch import Tensor

from moe_runtime.nn import SharedExperts, SharedExpertsConfig
from moe_runtime.testing import assert_close_per_expert

WIDTH, INNER = 12, 10


def reference(module: SharedExperts, x_TD: Tensor) -> Tensor:
    p = {name: value.detach().double() for name, value in module.named_parameters()}
    h_TH = x_TD @ p["gate_up.weight"].T + p.get("gate_up.bias", torch.zeros(1).double())
    config = module.config
    if config.activation == "relu2":
        a_TF = h_TH.clamp(min=0) ** 2
    else:
        is_inter = config.gate_up_layout == "interleaved"
        g_TF, u_TF = (h_TH[:, 0::2], h_TH[:, 1::2]) if is_inter else (h_TH[:, :INNER], h_TH[:, INNER:])
        a_TF = g_TF / (1 + (-g_TF).exp()) * u_TF
        if config.activation == "geglu":
            a_TF = 0.5 * g_TF * (1 + torch.erf(g_TF / math.sqrt(2))) * u_TF
    y_TD = a_TF @ p["down.weight"].T + p.get("down.bias", torch.zeros(1).double())
    return y_TD / (1 + (-(x_TD @ p["gate.weight"].T)).exp()) if config.gate else y_TD


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate": True},
        {"bias": True, "gate": True, "activation": "relu2"},
        {"activation": "geglu", "gate_up_layout": "interleaved"},
    ],
    ids=str,
)
def test_values_and_gradients(options: dict, tokens: int) -> None:
    torch.manual_seed(0)
    module = SharedExperts(SharedExpertsConfig(hidden_size=WIDTH, intermediate_size=INNER, **options))
    x_TD, dy_TD = torch.randn(tokens, WIDTH).requires_grad_(), torch.randn(tokens, WIDTH)
    y_TD = module(x_TD)
    y_TD.backward(dy_TD)
    x64_TD = x_TD.detach().double().requires_grad_()
    y64_TD = reference(module, x64_TD)
    y64_TD.backward(dy_TD.double())
    assert x_TD.grad is not None and x64_TD.grad is not None
    assert_close_per_expert(y_TD, y64_TD, 2e-6, name="y")
    assert_close_per_expert(x_TD.grad, x64_TD.grad, 2e-6, name="dx")
    assert all(p.grad is not None for p in module.parameters())


def test_names_of_parameters_and_meta() -> None:
    config = SharedExpertsConfig(hidden_size=4, intermediate_size=3, gate=True, bias=True)
    module = SharedExperts(config, device="meta")
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes == {
        "gate_up.weight": (6, 4),
        "gate_up.bias": (6,),
        "down.weight": (4, 3),
        "down.bias": (4,),
        "gate.weight": (1, 4),
    }
    module.to_empty(device="cpu").reset_parameters()
    assert all(p.isfinite().all() and not p.is_meta for p in module.parameters())


def test_refusals() -> None:
    with pytest.raises(ValueError, match="intermediate_size must be at least 1, got 0"):
        SharedExpertsConfig(hidden_size=4, intermediate_size=0)
    with pytest.raises(ValueError, match=r"activation must be one of .*; got 'tanh'"):
        SharedExpertsConfig(hidden_size=4, intermediate_size=4, activation="tanh")
