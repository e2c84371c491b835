"""RoutedExperts against a dense loop over tokens and choices in float64: dropped slots, poison, repeatability."""

# T tokens   D model width   F expert width   K top-k   E experts

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import moe_runtime as mr
from moe_runtime.functional import Activation
from moe_runtime.testing import assert_close_per_expert, nan_filled_memory, strided

# Against float64 without rounding in between, of values and gradients: the worst measured is 6.6e-7 and 1.1e-2.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
NAN = float("nan")
WIDTH, INNER, EXPERTS = 32, 16, 5


def experts(dtype: torch.dtype = torch.float32, **options: Any) -> mr.RoutedExperts:
    torch.manual_seed(0)
    sizes = {"num_experts": EXPERTS, "hidden_size": WIDTH, "intermediate_size": INNER}
    return mr.RoutedExperts(mr.RoutedExpertsConfig(**{**sizes, **options}), dtype=dtype)


def loop(values: dict[str, Tensor], ids_TK: Tensor, gates_TK: Tensor, activation: Activation) -> Tensor:
    """out[t] = sum_k gates[t, k] * expert[ids[t, k]](x[t]), one token and one choice at a time."""
    outputs = []
    for t, ids in enumerate(ids_TK.tolist()):
        out_D = torch.zeros(WIDTH, dtype=torch.float64)
        for k, e in enumerate(ids):
            if e < 0:
                continue
            h_H = values["gate_up.weight"][e] @ values["x"][t]
            if "gate_up.bias" in values:
                h_H = h_H + values["gate_up.bias"][e]
            if activation == "relu2":
                a_F = h_H.relu() ** 2
            else:
                g_F, u_F = h_H.chunk(2)
                a_F = F.silu(g_F) * u_F
            y_D = values["down.weight"][e] @ a_F
            if "down.bias" in values:
                y_D = y_D + values["down.bias"][e]
            out_D = out_D + gates_TK[t, k] * y_D
        outputs.append(out_D)
    return torch.stack(outputs) if outputs else values["x"] * 0


ROUTINGS: dict[str, list[list[int]]] = {
    "spread": [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [0, 2], [4, 1]],
    "one expert": [[3, -1]] * 7,
    "same expert twice": [[1, 1], [2, 2], [1, 2]],
    "first and last empty": [[1, 2], [3, 1], [2, 3], [1, 3]],
    "dropped slots": [[0, -1], [-1, 4], [-1, -1], [2, 3], [-1, 0]],
    "all dropped": [[-1, -1], [-1, -1]],
    "one choice": [[4], [0], [-1], [4]],
    "three choices": [[4, 0, 2], [1, -1, 3], [2, 3, 4], [0, 1, 2]],
    "no tokens": [],
}


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_values_and_gradients(activation: Activation, routing: str, dtype: torch.dtype, bias: bool) -> None:
    module = experts(dtype, activation=activation, bias=bias)
    ids_TK = torch.tensor(ROUTINGS[routing]).reshape(-1, len(ROUTINGS[routing][0]) if ROUTINGS[routing] else 2).long()
    generator = torch.Generator().manual_seed(len(ids_TK))
    x_TD = torch.randn(len(ids_TK), WIDTH, generator=generator).to(dtype) * 2
    gates_TK = torch.rand(ids_TK.shape, generator=generator) + 0.1
    dout_TD = torch.randn(x_TD.shape, generator=generator).to(dtype)

    exact = {"x": x_TD.double()} | {n: p.detach().as_subclass(Tensor).double() for n, p in _parameters(module)}
    exact = {name: value.requires_grad_() for name, value in exact.items()}
    gates64_TK = gates_TK.double().requires_grad_()
    expected_TD = loop(exact, ids_TK, gates64_TK, activation)
    if expected_TD.requires_grad:
        expected_TD.backward(dout_TD.double())

    x_TD.requires_grad_()
    gates_TK = torch.where(ids_TK < 0, NAN, gates_TK).requires_grad_()  # nobody reads a dropped slot's gate
    with nan_filled_memory():
        out_TD = module(x_TD, ids_TK, gates_TK)
        out_TD.backward(dout_TD)
    bound = TOLERANCE[dtype]
    measured = {"out": assert_close_per_expert(out_TD, expected_TD, bound, name="out")}
    assert out_TD.dtype == dtype and x_TD.grad is not None and gates_TK.grad is not None
    for name, value in (("x", x_TD), *_parameters(module)):
        wanted = exact[name].grad
        assert value.grad is not None, name
        wanted = torch.zeros_like(exact[name]) if wanted is None else wanted
        measured[name] = assert_close_per_expert(value.grad, wanted, bound, name=f"d{name}")
    wanted = torch.zeros_like(gates64_TK) if gates64_TK.grad is None else gates64_TK.grad
    got, wanted = gates_TK.grad.reshape(1, -1), wanted.reshape(1, -1)
    measured["gates"] = assert_close_per_expert(got, wanted, bound, name="dgates")
    assert torch.equal(gates_TK.grad[ids_TK < 0], torch.zeros(int((ids_TK < 0).sum())))
    for name, worst in measured.items():
        print(f"measured {dtype} {name} {worst:.2e}")


def _parameters(module: mr.RoutedExperts) -> list[tuple[str, Tensor]]:
    return list(module.experts.named_parameters())


def test_dropped_slots_contribute_nothing() -> None:
    """ids [[0, -1], [1, 0]]: counts [2, 1]; the dropped slot adds 0 to the output and gets no gradient."""
    module = experts(num_experts=2)
    x_TD, gates_TK = torch.randn(2, WIDTH), torch.tensor([[0.5, NAN], [0.25, 0.75]])
    out_TD = module(x_TD, torch.tensor([[0, -1], [1, 0]]), gates_TK)
    alone_TD = module(x_TD[:1], torch.tensor([[0]]), torch.tensor([[0.5]]))
    torch.testing.assert_close(out_TD[:1], alone_TD)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_poisoned_token_that_is_dropped_reaches_nobody(bias: bool) -> None:
    module = experts(bias=bias)
    x_TD, gates_TK = torch.randn(4, WIDTH), torch.rand(4, 2)
    ids_TK = torch.tensor([[0, 1], [2, 2], [-1, -1], [4, 0]])
    results = []
    for poison in (0.0, NAN, float("inf")):
        module.zero_grad()
        x, gates = x_TD.clone(), gates_TK.clone()
        x[2], gates[2] = poison, poison
        x, gates = x.requires_grad_(), gates.requires_grad_()
        out_TD = module(x, ids_TK, gates)
        out_TD.sum().backward()
        results.append([out_TD.detach(), x.grad, gates.grad, *(p.grad for p in module.parameters())])
        assert torch.equal(out_TD[2], torch.zeros(WIDTH))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_two_experts_of_one_token_by_hand() -> None:
    """y0 = 2 and y1 = 5 with weights [0.6, 0.4]: 3.2, and the weights' gradient is [2, 5]."""
    module = experts(num_experts=2, hidden_size=1, intermediate_size=1, activation="relu2")
    with torch.no_grad():
        module.experts.gate_up.weight.fill_(1.0)
        module.experts.down.weight.copy_(torch.tensor([2.0, 5.0]).view(2, 1, 1))
    gates_TK = torch.tensor([[0.6, 0.4]], requires_grad=True)
    out_TD = module(torch.ones(1, 1), torch.tensor([[0, 1]]), gates_TK)
    out_TD.sum().backward()
    assert out_TD.item() == pytest.approx(3.2, rel=1e-6)
    assert gates_TK.grad is not None and gates_TK.grad.tolist() == [[2.0, 5.0]]


def test_bfloat16_choices_are_summed_in_float32() -> None:
    """256 + 1 + 1 is 258 in every order; in bfloat16 one after the other it is 256. 100 runs, the same bits."""
    module = experts(torch.bfloat16, num_experts=3, hidden_size=8, intermediate_size=8, activation="relu2")
    with torch.no_grad():
        module.experts.gate_up.weight.copy_(torch.eye(8).expand(3, 8, 8))
        module.experts.down.weight.copy_(torch.eye(8) * torch.tensor([256.0, 1.0, 1.0]).view(3, 1, 1))
    x_TD, gates_TK = torch.ones(1, 8, dtype=torch.bfloat16), torch.ones(1, 3)
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        outputs = {module(x_TD, torch.tensor([order]), gates_TK)[0, 0].item() for _ in range(34)}
        assert outputs == {258.0}


def test_repeats_bit_by_bit() -> None:
    module = experts(torch.bfloat16, bias=True)
    x_TD, ids_TK = torch.randn(16, WIDTH).bfloat16(), torch.randint(-1, EXPERTS, (16, 3))
    gates_TK, results = torch.rand(16, 3), []
    for _ in range(5):
        module.zero_grad()
        x = x_TD.clone().requires_grad_()
        out_TD = module(x, ids_TK, gates_TK)
        out_TD.square().sum().backward()
        results.append([out_TD.detach(), x.grad, *(p.grad.clone() for p in module.parameters())])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_inputs_that_are_not_contiguous_and_int32_ids(dtype: torch.dtype) -> None:
    module = experts(dtype)
    x_TD, gates_TK, ids_TK = torch.randn(6, WIDTH).to(dtype), torch.rand(6, 2), torch.randint(-1, EXPERTS, (6, 2))
    results = []
    for x, ids, gates in (
        (x_TD, ids_TK, gates_TK),
        (strided(x_TD), ids_TK.t().contiguous().t(), gates_TK.t().contiguous().t()),
        (x_TD, ids_TK.int(), strided(gates_TK)),
    ):
        module.zero_grad()
        x, gates = x.detach().requires_grad_(), gates.detach().requires_grad_()
        out_TD = module(x, ids, gates)
        out_TD.sum().backward()
        results.append([out_TD.detach(), x.grad, gates.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_gates_of_the_rows_dtype_get_a_gradient_of_it() -> None:
    module = experts(torch.bfloat16)
    gates_TK = torch.rand(2, 2).bfloat16().requires_grad_()
    module(torch.randn(2, WIDTH).bfloat16(), torch.tensor([[0, 1], [2, 3]]), gates_TK).sum().backward()
    assert gates_TK.grad is not None and gates_TK.grad.dtype == torch.bfloat16


def test_layouts_of_weights_give_the_same_bits() -> None:
    packed, separate = (experts(single_grouped_weight=flag) for flag in (True, False))
    separate.load_state_dict(packed.state_dict())
    x_TD, ids_TK, gates_TK = torch.randn(6, WIDTH), torch.randint(-1, EXPERTS, (6, 2)), torch.rand(6, 2)
    assert torch.equal(packed(x_TD, ids_TK, gates_TK), separate(x_TD, ids_TK, gates_TK))
    assert set(packed.state_dict()) == {"experts.gate_up.weight", "experts.down.weight"}


def test_recompute_gives_the_same_bits_as_keeping() -> None:
    module = experts(bias=True)
    router = mr.Router(mr.RouterConfig(num_experts=EXPERTS, hidden_size=WIDTH, top_k=2))
    x_TD, chosen, results = torch.randn(6, WIDTH), [], []

    def block(x_TD: Tensor) -> Tensor:
        _, gates_TK, ids_TK = router(x_TD)
        chosen.append(ids_TK)
        return module(x_TD, ids_TK, gates_TK)

    for recompute in (False, True):
        module.zero_grad()
        router.zero_grad()
        x = x_TD.clone().requires_grad_()
        out_TD = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        out_TD.square().sum().backward()
        results.append([out_TD.detach(), x.grad, *(p.grad for p in (*module.parameters(), *router.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(chosen) == 3 and all(torch.equal(ids_TK, chosen[0]) for ids_TK in chosen)


@pytest.fixture
def four_ranks() -> Iterator[dist.ProcessGroup]:
    """Rank 2 of a group of 4 that communicates with nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])
def test_sharding_keeps_this_ranks_experts(packed: bool, four_ranks: dist.ProcessGroup) -> None:
    module = experts(num_experts=8, bias=True, single_grouped_weight=packed)
    whole = experts(num_experts=8, bias=True).experts
    module.shard_experts(four_ranks)
    assert module.first_expert == 4 and "experts 4..5 of 8" in repr(module)
    for name in ("gate_up", "down"):
        ours, theirs = getattr(module.experts, name), getattr(whole, name)
        assert torch.equal(ours.stacked_weight(), theirs.weight[4:6])
        assert torch.equal(ours.stacked_bias(), theirs.bias[4:6])
    with pytest.raises(ValueError, match="these experts are split over a group already"):
        module.shard_experts(four_ranks)


def test_sharding_needs_a_number_of_experts_that_divides(four_ranks: dist.ProcessGroup) -> None:
    module = experts(num_experts=6)
    with pytest.raises(ValueError, match="6 experts cannot be split evenly over 4 ranks"):
        module.shard_experts(four_ranks)
    assert module.experts.down.weight.shape[0] == 6 and module.first_expert == 0


def test_shapes_that_do_not_fit() -> None:
    module, x_TD = experts(), torch.zeros(3, WIDTH)
    ids_TK, gates_TK = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    expected = r"expected tokens \(T, D\), ids \(T, K\) and gates \(T, K\), got "
    with pytest.raises(ValueError, match=expected + rf"\(3, {WIDTH}\), \(3, 2\) and \(3, 1\)"):
        module(x_TD, ids_TK, gates_TK[:, :1])
    with pytest.raises(ValueError, match=expected + rf"\(2, {WIDTH}\), \(3, 2\) and \(3, 2\)"):
        module(x_TD[:2], ids_TK, gates_TK)
    with pytest.raises(ValueError, match=expected + rf"\(1, 3, {WIDTH}\), \(3, 2\) and \(3, 2\)"):
        module(x_TD[None], ids_TK, gates_TK)
    with pytest.raises(ValueError, match=r"\(T, K\) .*, got \(3,\) and 5"):
        module(x_TD, ids_TK[:, 0], gates_TK[:, 0])


def test_values_that_do_not_fit() -> None:
    module, x_TD, gates_TK = experts(), torch.zeros(3, WIDTH), torch.ones(3, 2)
    with pytest.raises(ValueError, match=rf"\[-1, num_experts={EXPERTS}\), got {EXPERTS} for token 1, choice 0"):
        module(x_TD, torch.tensor([[0, 1], [EXPERTS, 0], [0, 0]]), gates_TK)
    with pytest.raises(TypeError, match=r"ids must be int64 or int32, got torch\.float32"):
        module(x_TD, torch.zeros(3, 2), gates_TK)
    with pytest.raises(ValueError, match=rf"expected rows \(R, {WIDTH}\) .*, got \(3, 5\)"):
        module(torch.zeros(3, 5), torch.zeros(3, 2, dtype=torch.int64), gates_TK)


@pytest.mark.parametrize("name", ["num_experts", "hidden_size", "intermediate_size"])
def test_config_sizes(name: str) -> None:
    sizes = {"num_experts": 2, "hidden_size": 4, "intermediate_size": 4} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        mr.RoutedExpertsConfig(**sizes)


def test_config_is_a_frozen_value_that_checks_its_names() -> None:
    config = mr.RoutedExpertsConfig(num_experts=2, hidden_size=4, intermediate_size=4)
    with pytest.raises(AttributeError):
        config.num_experts = 3
    assert config == mr.RoutedExpertsConfig(num_experts=2, hidden_size=4, intermediate_size=4)
    with pytest.raises(TypeError):
        mr.RoutedExpertsConfig(2, 4, 4)
    with pytest.raises(ValueError, match=r"activation must be one of .*; got 'tanh'"):
        mr.RoutedExpertsConfig(num_experts=2, hidden_size=4, intermediate_size=4, activation="tanh")


def test_representation_names_the_experts() -> None:
    assert f"experts 0..{EXPERTS - 1} of {EXPERTS}" in repr(experts())
