"""The whole layer against a loop over tokens in float64, and what it returns beside its output."""

# B sequences   S tokens of a sequence   T tokens   D model width   F expert width   E experts   K top-k

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_runtime.ep import Capacity
from moe_runtime.nn import (
    AuxLoss,
    BatchScope,
    LoadMeter,
    MoEConfig,
    MoELayer,
    RoutedExpertsConfig,
    RouterConfig,
    RoutingRecord,
    SharedExpertsConfig,
    step_selection_biases,
)
from moe_runtime.testing import assert_close_per_expert, nan_filled_memory

WIDTH, INNER, EXPERTS = 16, 8, 6
TOLERANCE = 3e-6
NAN = float("nan")


def layer(router: dict[str, Any] | None = None, experts: dict[str, Any] | None = None, **shared: Any) -> MoELayer:
    torch.manual_seed(0)
    sizes = {"num_experts": EXPERTS, "hidden_size": WIDTH}
    config = MoEConfig(
        router=RouterConfig(**{**sizes, "top_k": 2, **(router or {})}),
        experts=RoutedExpertsConfig(**{**sizes, "intermediate_size": INNER, **(experts or {})}),
        shared=SharedExpertsConfig(hidden_size=WIDTH, intermediate_size=INNER, **shared) if shared else None,
    )
    module = MoELayer(config)
    with torch.no_grad():
        module.router.weight.mul_(20)
    return module


def activated(h_H: Tensor, activation: str, layout: str) -> Tensor:
    if activation == "relu2":
        return torch.where(h_H > 0, h_H, 0.0) ** 2
    g_F, u_F = (h_H[0::2], h_H[1::2]) if layout == "interleaved" else h_H.chunk(2)
    if activation == "swiglu":
        return g_F / (1 + (-g_F).exp()) * u_F
    if activation == "geglu":
        return 0.5 * g_F * (1 + torch.erf(g_F / math.sqrt(2))) * u_F
    c_F, u_F = torch.where(g_F > 7, 7.0, g_F), torch.where(u_F > 7, 7.0, torch.where(u_F < -7, -7.0, u_F))
    return c_F / (1 + (-1.702 * c_F).exp()) * (u_F + 1)


def mlp(x_D: Tensor, p: dict[str, Tensor], prefix: str, e: int | None, config: Any) -> Tensor:
    """One expert for one token; `e` is None for the shared ones."""

    def linear(v: Tensor, name: str) -> Tensor:
        weight, bias = p[f"{prefix}.{name}.weight"], p.get(f"{prefix}.{name}.bias")
        weight, bias = (weight, bias) if e is None else (weight[e], None if bias is None else bias[e])
        return weight @ v + (0 if bias is None else bias)

    return linear(activated(linear(x_D, "gate_up"), config.activation, config.gate_up_layout), "down")


def reference(module: MoELayer, p: dict[str, Tensor], x_TD: Tensor, kept: list[list[int]] | None = None) -> Tensor:
    """The layer for softmax or sigmoid routers without groups, by the definitions; `kept` is what capacity left."""
    router, experts = module.config.router, module.config.experts
    outputs = []
    for t, x_D in enumerate(x_TD):
        z_E = p["router.weight"] @ x_D + p.get("router.bias", 0.0)
        scores_E = z_E.softmax(0) if router.score == "softmax" else z_E.sigmoid()
        biased = (scores_E + p.get("bias", 0.0)).tolist()
        ids = sorted(range(router.num_experts), key=lambda e: (-biased[e], e))[: router.top_k]
        weights_K = z_E[ids].softmax(0) if router.softmax_over == "chosen" else scores_E[ids]
        weights_K = weights_K / weights_K.sum() if router.norm_topk_prob else weights_K
        y_D = torch.zeros(WIDTH, dtype=torch.float64)
        for k, e in enumerate(ids if kept is None else kept[t]):
            if e < 0:
                continue
            w = weights_K[k] * router.scaling_factor
            before = experts.gates_on == "input"
            y_e = mlp(x_D * w if before else x_D, p, "experts.experts", e, experts)
            y_D = y_D + (y_e if before else w * y_e)
        if module.config.shared is not None:
            shared_D = mlp(x_D, p, "shared", None, module.config.shared)
            if module.config.shared.gate:
                shared_D = shared_D / (1 + (-(p["shared.gate.weight"] @ x_D)).exp())
            y_D = y_D + shared_D
        outputs.append(y_D)
    return torch.stack(outputs) if outputs else x_TD * 0


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mixtral": ({"norm_topk_prob": True}, {}, {}),
    "deepseek": (
        {"score": "sigmoid", "norm_topk_prob": True, "scaling_factor": 2.5, "expert_bias": True, "top_k": 3},
        {},
        {"activation": "swiglu"},
    ),
    "qwen2": ({"top_k": 4}, {}, {"gate": True}),
    "gpt-oss": (
        {"softmax_over": "chosen", "linear_bias": True},
        {"activation": "swiglu_clamped", "gate_up_layout": "interleaved", "bias": True},
        {},
    ),
    "gelu": ({}, {"activation": "geglu"}, {"activation": "geglu", "bias": True}),
    "nemotron": ({"score": "sigmoid"}, {"activation": "relu2"}, {"activation": "relu2"}),
    "llama4": ({"top_k": 1, "score": "sigmoid"}, {"gates_on": "input"}, {"activation": "swiglu"}),
    "weights on the input": ({"top_k": 2}, {"gates_on": "input", "bias": True}, {}),
    "every expert": ({"top_k": EXPERTS}, {}, {}),
    "one expert": ({"num_experts": 1, "top_k": 1, "norm_topk_prob": True}, {"num_experts": 1}, {}),
}


def exact_parameters(module: MoELayer) -> dict[str, Tensor]:
    p = {n: v.detach().as_subclass(Tensor).double().requires_grad_() for n, v in module.named_parameters()}
    if module.router.expert_bias is not None:
        p["bias"] = module.router.expert_bias.double()
    return p


def compare_gradients(module: MoELayer, x_TD: Tensor, p: dict[str, Tensor], x64_TD: Tensor) -> None:
    for name, value in (("x", x_TD), *module.named_parameters()):
        exact = x64_TD.grad if name == "x" else p[name].grad
        assert value.grad is not None, name
        exact = torch.zeros_like(value, dtype=torch.float64) if exact is None else exact
        got, exact = (value.grad, exact) if name.startswith("experts") else (value.grad[None], exact[None])
        assert_close_per_expert(got, exact, TOLERANCE, name=f"d{name}")


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str, tokens: int) -> None:
    router, experts, shared = CASES[case]
    module = layer(router, experts, **shared)
    with torch.no_grad():
        if module.router.expert_bias is not None:
            module.router.expert_bias.copy_(torch.linspace(-0.3, 0.3, EXPERTS))
        if module.router.bias is not None:
            module.router.bias.copy_(torch.linspace(-1, 1, EXPERTS))
    generator = torch.Generator().manual_seed(tokens)
    x_TD = torch.randn(tokens, WIDTH, generator=generator).requires_grad_()
    dy_TD = torch.randn(tokens, WIDTH, generator=generator)
    with nan_filled_memory():
        out = module(x_TD)
        out.y.backward(dy_TD)
    p, x64_TD = exact_parameters(module), x_TD.detach().double().requires_grad_()
    expected_TD = reference(module, p, x64_TD)
    if expected_TD.requires_grad:
        expected_TD.backward(dy_TD.double())
    assert out.y.shape == x_TD.shape and out.y.dtype == torch.float32
    assert_close_per_expert(out.y, expected_TD, TOLERANCE, name="y")
    compare_gradients(module, x_TD, p, x64_TD if x64_TD.grad is not None else torch.zeros_like(x64_TD))


@pytest.mark.parametrize("pad", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize("policy", ["position", "probability"])
def test_capacity(policy: str, pad: bool) -> None:
    """Slots over capacity add nothing and get no gradient; what the router chose is still reported and counted."""
    capacity = Capacity(factor=0.5, drop=policy, pad=pad)
    module = layer({"norm_topk_prob": True}, {"capacity": capacity, "bias": True})
    x_TD, dy_TD = torch.randn(12, WIDTH).requires_grad_(), torch.randn(12, WIDTH)
    out = module(x_TD)
    out.y.backward(dy_TD)
    kept, room = [[-1] * 2 for _ in range(12)], [2] * EXPERTS  # ceil(0.5 * 12 * 2 / 6)
    slots = [(t, k) for t in range(12) for k in range(2)]
    if policy == "probability":
        slots.sort(key=lambda s: -out.gates_TK[s].item())
    for t, k in slots:
        e = int(out.ids_TK[t, k])
        if room[e]:
            room[e] -= 1
            kept[t][k] = e
    assert any(-1 in ids for ids in kept) and int((out.ids_TK < 0).sum()) == 0 and int(out.counts_E.sum()) == 24
    p, x64_TD = exact_parameters(module), x_TD.detach().double().requires_grad_()
    expected_TD = reference(module, p, x64_TD, kept)
    expected_TD.backward(dy_TD.double())
    assert_close_per_expert(out.y, expected_TD, TOLERANCE, name="y")
    compare_gradients(module, x_TD, p, x64_TD)


def test_the_factor_scales_routed_experts_once_and_shared_ones_never() -> None:
    x_TD = torch.randn(5, WIDTH)
    plain, scaled = (layer({"scaling_factor": f}, activation="swiglu") for f in (1.0, 2.5))
    assert plain.shared is not None
    shared_TD = plain.shared(x_TD)
    torch.testing.assert_close(scaled(x_TD).y - shared_TD, 2.5 * (plain(x_TD).y - shared_TD), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("gates_on", ["output", "input"])
def test_the_router_learns_from_the_outputs_alone(gates_on: str) -> None:
    module = layer({"top_k": 1}, {"gates_on": gates_on})
    out = module(torch.randn(7, WIDTH))
    assert out.losses.total.item() == 0.0 and not out.losses.total.requires_grad
    out.y.square().sum().backward()
    assert module.router.weight.grad is not None and module.router.weight.grad.any()


def test_two_choices_by_hand() -> None:
    """y0 = 2, y1 = 5, weights [.6, .4]: 3.2, and the weights' gradients are [2, 5]."""
    config = MoEConfig(
        router=RouterConfig(num_experts=2, hidden_size=1, top_k=2),
        experts=RoutedExpertsConfig(num_experts=2, hidden_size=1, intermediate_size=1, activation="relu2"),
    )
    module = MoELayer(config)
    with torch.no_grad():
        module.router.weight.copy_(torch.tensor([[1.5], [1.0]]).log())
        module.experts.experts.gate_up.weight.fill_(1.0)
        module.experts.experts.down.weight.copy_(torch.tensor([2.0, 5.0]).view(2, 1, 1))
    out = module(torch.ones(1, 1))
    out.gates_TK.retain_grad()
    out.y.sum().backward()
    assert out.gates_TK.tolist() == [pytest.approx([0.6, 0.4])] and out.y.item() == pytest.approx(3.2)
    assert out.gates_TK.grad is not None and out.gates_TK.grad.tolist() == [[2.0, 5.0]]


LOSSES = tuple(AuxLoss(kind=kind, coefficient=0.1) for kind in ("batch", "sequence", "global_batch", "z"))


def test_losses_counts_and_shapes_of_sequences() -> None:
    module = layer({"aux_losses": LOSSES})
    x_BSD = torch.randn(2, 5, WIDTH)
    out = module(x_BSD)
    assert out.y.shape == x_BSD.shape and out.ids_TK.shape == out.gates_TK.shape == (10, 2)
    assert out.logits_TE.shape == (10, EXPERTS) and int(out.counts_E.sum()) == 20
    assert out.counts_E.dtype == torch.int64
    expected = module.router.losses(out.logits_TE, out.ids_TK, num_sequences=2)
    assert all(torch.equal(a, b) for a, b in zip(out.losses, expected, strict=True))
    out.losses.total.backward()
    assert module.router.weight.grad is not None and module.router.weight.grad.any()
    assert module.experts.experts.down.weight.grad is None


def test_microbatches_make_the_gradient_of_one_batch() -> None:
    """4 sequences at once or one after the other, output and auxiliary losses together."""
    # "batch" is left out: it counts within a microbatch.
    module, meter = layer({"aux_losses": LOSSES[1:]}), LoadMeter(1, EXPERTS, torch.device("cpu"))
    x_BSD, gradients, totals = torch.randn(4, 5, WIDTH), [], []
    whole = module(x_BSD)
    for parts in (1, 4):
        module.zero_grad()
        total = 0.0
        for x in x_BSD.chunk(parts):
            # All counts of the step, as if this were its last microbatch.
            earlier_E = whole.counts_E - module(x).counts_E
            scope = BatchScope(num_tokens=20, num_sequences=4, earlier_counts_E=earlier_E)
            out = module(x, scope=scope)
            meter.add_counts([out.counts_E])
            loss = out.y.square().sum() / 20 + out.losses.total
            loss.backward()
            total += loss.item()
        totals.append(total)
        gradients.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert totals[0] == pytest.approx(totals[1], rel=1e-6)
    for one, four in zip(*gradients, strict=True):
        torch.testing.assert_close(one, four, rtol=1e-5, atol=1e-7)
    assert torch.equal(meter.global_counts()[0], 2 * whole.counts_E)


def test_padding_changes_nothing_else() -> None:
    module = layer({"aux_losses": LOSSES}, gate=True)
    x_BSD = torch.randn(2, 4, WIDTH)
    padding_BS = torch.tensor([[False, False, False, True]] * 2)
    expected = module(x_BSD[:, :3])
    expected.losses.total.backward()
    wanted = module.router.weight.grad
    module.zero_grad()
    poisoned_BSD = x_BSD.masked_fill(padding_BS[..., None], NAN)
    out = module(poisoned_BSD, padding=padding_BS)
    torch.testing.assert_close(out.y[:, :3], expected.y)
    assert torch.equal(out.counts_E, expected.counts_E) and (out.ids_TK[[3, 7]] == -1).all()
    for got, exact in zip(out.losses, expected.losses, strict=True):
        torch.testing.assert_close(got, exact)
    out.losses.total.backward()
    torch.testing.assert_close(module.router.weight.grad, wanted)


def run(module: MoELayer, x_BSD: Tensor, *, recompute: bool, **options: Any) -> tuple[Any, list[Tensor]]:
    module.zero_grad()
    x = x_BSD.clone().requires_grad_()

    def block(x: Tensor) -> Any:
        return module(x, **options)

    out = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
    loss = out.y.square().mean() + out.losses.total
    loss.backward()
    assert x.grad is not None
    return out, [loss.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("capacity", [None, Capacity(factor=0.75, pad=True)], ids=["all rows", "capacity"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_replay_reproduces_a_run_bit_by_bit(recompute: bool, capacity: Capacity | None) -> None:
    module = layer({"aux_losses": LOSSES, "jitter": 0.2}, {"capacity": capacity}, gate=True)
    x_BSD = torch.randn(2, 9, WIDTH)
    first, results = run(module, x_BSD, recompute=False, jitter_seed=4)
    record = RoutingRecord.of([first])
    for gates in (False, True):
        again, replayed = run(module, x_BSD, recompute=recompute, jitter_seed=4, replay=record.replay(0, gates=gates))
        assert torch.equal(again.y, first.y) and torch.equal(replayed[0], results[0])
        if not gates:  # recorded weights carry no gradient
            assert all(torch.equal(a, b) for a, b in zip(replayed, results, strict=True))


@pytest.mark.parametrize("capacity", [None, Capacity(factor=0.75)], ids=["all rows", "capacity"])
@pytest.mark.parametrize("seed", [None, 7])
def test_a_jittered_layer_recomputes_the_same_rows(seed: int | None, capacity: Capacity | None) -> None:
    module, x_BSD = (
        layer({"aux_losses": LOSSES, "jitter": 0.5}, {"capacity": capacity}, gate=True),
        torch.randn(2, 9, WIDTH),
    )
    results = []
    for recompute in (False, True):
        torch.manual_seed(3)
        results.append(run(module, x_BSD, recompute=recompute, jitter_seed=seed)[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_replay_holds_a_routing_that_the_router_has_left() -> None:
    module, x_BSD = layer({"norm_topk_prob": True}), torch.randn(1, 9, WIDTH)
    record = RoutingRecord.of([module(x_BSD)])
    with torch.no_grad():
        module.router.weight.neg_()
    assert not torch.equal(module(x_BSD).ids_TK, record.layers[0].ids_TK)
    out = module(x_BSD, replay=record.replay(0))
    assert torch.equal(out.ids_TK, record.layers[0].ids_TK) and out.gates_TK.requires_grad


def test_a_record_is_a_copy() -> None:
    module, x_BSD = layer(), torch.randn(1, 3, WIDTH)
    out = module(x_BSD)
    record = RoutingRecord.of([out])
    with torch.no_grad():
        out.gates_TK.zero_()
        out.ids_TK.zero_()
    assert record.layers[0].gates_TK is not None and record.layers[0].gates_TK.any()
    assert record.layers[0].ids_TK.any() and not record.layers[0].gates_TK.requires_grad
    with pytest.raises(AttributeError):
        record.layers = ()


def test_recomputation_counts_once_and_bias_steps_once() -> None:
    module, meter = layer({"expert_bias": True}), LoadMeter(1, EXPERTS, torch.device("cpu"))
    out, _ = run(module, torch.randn(1, 8, WIDTH), recompute=True)
    meter.add_counts([out.counts_E])
    assert int(meter.global_counts().sum()) == 16
    assert module.router.expert_bias is not None
    step_selection_biases([module.router.expert_bias], meter.global_counts(), 1e-3)
    mean = 16 / EXPERTS
    for bias, count in zip(module.router.expert_bias.tolist(), out.counts_E.tolist(), strict=True):
        assert bias == pytest.approx(1e-3 * ((mean > count) - (mean < count)))


def test_hundred_repeats_give_the_same_bits() -> None:
    module = layer({"aux_losses": LOSSES}, {"bias": True}, gate=True).bfloat16()
    x_BSD = torch.randn(2, 8, WIDTH).bfloat16()
    _, first = run(module, x_BSD, recompute=False)
    for _ in range(99):
        _, again = run(module, x_BSD, recompute=False)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_bias_stays_fp32_in_a_layer_that_is_cast() -> None:
    module = layer({"expert_bias": True}).bfloat16()
    assert module.router.expert_bias is not None and module.router.expert_bias.dtype == torch.float32
    assert module.router.weight.dtype == torch.bfloat16
    out = module(torch.randn(3, WIDTH).bfloat16())
    assert out.y.dtype == torch.bfloat16 and out.gates_TK.dtype == out.logits_TE.dtype == torch.float32


def test_nothing_of_a_forward_stays_on_the_module() -> None:
    module = layer({"aux_losses": LOSSES}, gate=True)
    before = [set(vars(part)) for part in module.modules()]
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module(torch.randn(2, 3, WIDTH))
    assert [set(vars(part)) for part in module.modules()] == before
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_shared_experts_stand_between_the_halves_of_dispatch() -> None:
    # Rows have halves to stand between only where they are written out: geglu's are.
    module, calls = layer(experts={"activation": "geglu"}, gate=True), []

    def noted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        object.__setattr__(owner, name, wrapper)

    for name in ("start", "wait", "combine"):
        noted(module.experts.dispatcher, name)
    noted(module.shared, "forward")
    module(torch.randn(3, WIDTH))
    assert calls == ["start", "forward", "wait", "combine"]


def test_parts_that_do_not_fit() -> None:
    sizes = {"num_experts": 4, "hidden_size": 8}
    router, experts = RouterConfig(**sizes, top_k=2), RoutedExpertsConfig(**sizes, intermediate_size=4)
    with pytest.raises(ValueError, match="router chooses among 4 experts, but there are 5"):
        MoEConfig(router=router, experts=RoutedExpertsConfig(num_experts=5, hidden_size=8, intermediate_size=4))
    with pytest.raises(ValueError, match="the same in every part, got router=8, experts=8, shared=9"):
        MoEConfig(router=router, experts=experts, shared=SharedExpertsConfig(hidden_size=9, intermediate_size=4))
    module = MoELayer(MoEConfig(router=router, experts=experts))
    with pytest.raises(ValueError, match=r"padding must have shape \(2, 3\), x's without its width; got \(6,\)"):
        module(torch.zeros(2, 3, 8), padding=torch.zeros(6, dtype=torch.bool))
    with pytest.raises(ValueError, match="gates_on must be 'output' or 'input', got 'both'"):
        RoutedExpertsConfig(**sizes, intermediate_size=4, gates_on="both")
