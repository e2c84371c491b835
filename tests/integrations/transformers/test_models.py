"""Hugging Face MoE models with our experts in place of theirs: the same logits, gradients and initialization."""

from typing import Any

import pytest
import torch
from tiny_models import ARCHITECTURES, COMMON, config_of
from torch import Tensor, nn

from moe_runtime.core.errors import ConfigError, UnsupportedError
from moe_runtime.integrations import transformers as hf
from moe_runtime.nn import Router

# Worst relative norm of a difference seen over these models, fp32: 4e-7 in logits, 3e-6 in gradients.
TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 1e-5


def _build(name: str, **options: Any) -> nn.Module:
    model = hf.build(config_of(name), **options)
    hf.initialize(model, seed=7, device=torch.device("cpu"))
    # Zero-initialized parameters would hide what they multiply; linear attention that forgets at once, as it is
    # initialized to, has gradients of terms that cancel, in which fp32 leaves four digits.
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("bias", "sinks", "linear_attn.A_log")):
                parameter.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(len(key)))
    return model


def _eager(name: str) -> nn.Module:
    model = _build(name, experts_backend="hf")
    if name != "llama4_text":  # has but one
        model.set_experts_implementation("eager")  # pyright: ignore[reportCallIssue]
    return model


def _match_biases(ours: nn.Module, theirs: nn.Module) -> None:
    """Experts' biases in ours as in theirs: they have other names and shapes there."""
    for name, module in hf.experts_modules(ours).items():
        source = theirs.get_submodule(name)
        for linear, key in ((module.experts.gate_up, "gate_up_proj"), (module.experts.down, "down_proj")):
            if linear.use_bias:
                with torch.no_grad():
                    linear.bias.copy_(getattr(source, f"{key}_bias"))


def _run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.arange(40).view(2, 20) % COMMON["vocab_size"]
    logits = model(input_ids=ids, use_cache=False).logits
    (logits.float() * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _as_theirs(gradients: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Our gradients under Hugging Face's names and orientations."""
    renamed = dict(gradients)
    for name in hf.experts_modules(model):
        layout = hf.experts_layout(model.__dict__["initialization_template"].get_submodule(name))
        for ours, key in (("gate_up", layout.up_name), ("down", "down_proj")):
            weight = renamed.pop(f"{name}.experts.{ours}.weight")
            renamed[f"{name}.{key}"] = weight.transpose(1, 2) if layout.is_transposed else weight
            if layout.has_bias:
                renamed[f"{name}.{key}_bias"] = renamed.pop(f"{name}.experts.{ours}.bias")
    return renamed


@pytest.mark.parametrize(
    ("name", "discrete"), [*((name, False) for name in ARCHITECTURES), ("qwen3_moe", True)], ids=str
)
def test_logits_and_every_gradient_equal_hugging_faces(name: str, discrete: bool) -> None:
    ours, theirs = _build(name, single_grouped_weight=not discrete), _eager(name)
    if not discrete:
        _match_biases(ours, theirs)
    logits, gradients = _run(ours)
    expected_logits, expected = _run(theirs)
    assert (logits - expected_logits).norm() / expected_logits.norm() < TOLERANCE
    if discrete:
        return
    found = _as_theirs(gradients, ours)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        error = (found[key] - value).norm() / value.norm().clamp(min=1e-12)
        print(f"measured {error:.1e} {name} {key}")
        assert error < GRADIENT_TOLERANCE, f"{key}: {error:.1e}"


def test_initialization_depends_on_seed_and_name_only() -> None:
    first, again, other = (
        hf.build(config_of("qwen3_moe")),
        hf.build(config_of("qwen3_moe")),
        hf.build(config_of("qwen3_moe"), balance_bias=True),
    )
    torch.manual_seed(1)
    hf.initialize(first, seed=3, device=torch.device("cpu"))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    hf.initialize(again, seed=3, device=torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before), "the caller's random state is left alone"
    hf.initialize(other, seed=3, device=torch.device("cpu"))
    state = first.state_dict()
    for key, value in again.state_dict().items():
        assert torch.equal(value, state[key]), key
    for key, value in other.state_dict().items():
        assert key.endswith("expert_bias") or torch.equal(value, state[key]), key
    std = first.model.layers[0].mlp.experts.experts.gate_up.weight.detach().std().item()
    assert std == pytest.approx(first.config.initializer_range, rel=0.1)
    assert not any(tensor.is_meta for tensor in [*first.parameters(), *first.buffers()])


def test_real_tensors_are_left_as_they_are() -> None:
    model = hf.build(config_of("qwen3_moe"))
    model.register_buffer("zeros", torch.zeros(3))
    model.model.norm.weight = nn.Parameter(torch.full((32,), 5.0))
    hf.initialize(model, seed=0, device=torch.device("cpu"))
    assert not model.zeros.any()
    assert (model.model.norm.weight == 5.0).all()
    assert all(torch.isfinite(tensor).all() for tensor in [*model.parameters(), *model.buffers()])


def test_recorder_counts_each_forward_once_under_checkpointing() -> None:
    model = _build("qwen3_moe")
    hf.enable_activation_checkpointing(model)
    model.train()
    recorder = hf.RoutingRecorder(model)
    ids = torch.arange(16).view(1, 16)
    with recorder.recording():
        loss = model(input_ids=ids, use_cache=False).logits.square().mean()
    loss.backward()
    assert len(recorder.ids_TK) == len(recorder.logits_TE) == 2
    assert all(found.shape == (16, 2) for found in recorder.ids_TK)
    assert all(found.shape == (16, 6) for found in recorder.logits_TE)


def test_biased_router_takes_the_place_of_a_softmax_router() -> None:
    model = hf.build(config_of("mixtral"), balance_bias=True)
    hf.initialize(model, seed=7, device=torch.device("cpu"))
    routers = hf.router_modules(model)
    assert len(routers) == 2 and all(isinstance(router, Router) for router in routers.values())
    assert all(not bias.any() for bias in hf.selection_biases(model))
    plain = _build("mixtral")
    ids = torch.arange(16).view(1, 16)
    torch.testing.assert_close(
        model(input_ids=ids, use_cache=False).logits, plain(input_ids=ids, use_cache=False).logits, rtol=1e-5, atol=1e-6
    )


def test_deepseeks_own_bias_is_found() -> None:
    model = hf.build(config_of("deepseek_v3"), balance_bias=True)
    hf.initialize(model, seed=7, device=torch.device("cpu"))
    biases = hf.selection_biases(model)
    assert len(biases) == 1 and biases[0].shape == (6,)


def test_what_cannot_be_replaced_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"GptOssTopKRouter has none .* use router.aux_loss_coefficient"):
        hf.build(config_of("gpt_oss"), balance_bias=True)
    with pytest.raises(UnsupportedError, match="no mixture of experts is made of a 'llama' config"):
        hf.build(hf.load_config(model_type="llama", fields=COMMON))
    with pytest.raises(UnsupportedError, match=r"activation must be one of .*; got 'tanh'"):
        hf.build(hf.load_config(model_type="qwen3_moe", fields={**COMMON, "hidden_act": "tanh", "num_experts": 4}))


def test_configs_that_transformers_refuses_are_one_sentence(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="did you mean 'qwen3_moe'"):
        hf.load_config(model_type="qwen3_mo")
    with pytest.raises(ConfigError, match=r"\[model\] does not make a config of 'qwen3_moe'"):
        hf.load_config(model_type="qwen3_moe", fields={"num_experts": "many"})
    config_of("qwen3_moe").save_pretrained(tmp_path)
    loaded = hf.load_config(config_file=str(tmp_path / "config.json"), fields={"num_hidden_layers": 1})
    assert (loaded.hidden_size, loaded.num_hidden_layers) == (32, 1)


def test_llama4s_choices_are_recorded_though_its_own_experts_are_not_told_them() -> None:
    chosen = []
    for backend in ("grouped", "hf"):
        model = _build("llama4_text", experts_backend=backend)
        recorder = hf.RoutingRecorder(model)
        with recorder.recording():
            model(input_ids=torch.arange(16).view(1, 16), use_cache=False)
        assert len(recorder.ids_TK) == len(recorder.logits_TE) == 2
        chosen.append(torch.stack(recorder.ids_TK))
    assert torch.equal(*chosen) and chosen[0].shape == (2, 16, 2)
