"""fp32 masters under low-precision parameters: the same bits as the optimizer by itself on fp32 copies."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_runtime as mr
from moe_runtime.optim import MasterWeights

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.02, "foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.02, "fused": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd without state": (torch.optim.SGD, {"lr": 0.1}),
}


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(4, 6, generator=generator).to(dtype)
    packed = mr.GroupedTensor.pack(torch.randn(3, 4, 8, generator=generator).to(dtype))
    return [nn.Parameter(dense), nn.Parameter(packed)]


def gradients(step: int, like: list[nn.Parameter]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in like]


def stepped(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter, gradient in zip(params, gradients(step, params), strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_follow_the_optimizer_on_fp32_copies(name: str, dtype: torch.dtype) -> None:
    kind, options = OPTIMIZERS[name]
    params = parameters(dtype)
    copies = [nn.Parameter(p.detach().float()) for p in params]
    optimizer, plain = MasterWeights(kind, params, **options), kind(copies, **options)
    for step in range(5):
        for p, copied, gradient in zip(params, copies, gradients(step, params), strict=True):
            p.grad, copied.grad = gradient.clone(), gradient.float()
        optimizer.step()
        plain.step()
        for p, copied in zip(params, copies, strict=True):
            assert torch.equal(p, copied.to(dtype)) and p.dtype == dtype
            assert torch.equal(optimizer.state[p]["master"], copied)
            for key, value in plain.state[copied].items():
                held = optimizer.state[p][key]
                assert value is None or torch.equal(held, value), key
    assert type(params[1]) is mr.GroupedTensor


def test_small_steps_are_not_lost() -> None:
    """100 steps of 1e-3 from 1 reach 1.1; a bfloat16 parameter by itself stays at 1."""
    params = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
    optimizers = [MasterWeights(torch.optim.SGD, params[:1], lr=1e-3), torch.optim.SGD(params[1:], lr=1e-3)]
    for _ in range(100):
        for parameter, optimizer in zip(params, optimizers, strict=True):
            parameter.grad = torch.full_like(parameter, -1.0)
            optimizer.step()
    assert optimizers[0].state[params[0]]["master"].tolist() == pytest.approx([1.1] * 2, abs=1e-5)
    assert params[0][0].item() == torch.tensor(1.1).bfloat16().item() and params[1][0].item() == 1.0


def test_fp32_parameters_are_their_own_masters() -> None:
    params, copies = parameters(torch.float32), parameters(torch.float32)
    optimizer, plain = MasterWeights(torch.optim.AdamW, params, lr=0.1), torch.optim.AdamW(copies, lr=0.1)
    stepped(optimizer, params, range(3))
    stepped(plain, copies, range(3))
    assert all(torch.equal(p, copied) for p, copied in zip(params, copies, strict=True))
    assert set(optimizer.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert not any(torch.equal(p, first) for p, first in zip(params, parameters(torch.float32), strict=True))


def test_a_parameter_without_gradient_is_left_alone() -> None:
    params = parameters()
    before = params[1].detach().clone()
    optimizer = MasterWeights(torch.optim.AdamW, params, lr=0.1, weight_decay=0.5)
    for _ in range(2):
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
    assert torch.equal(params[1], before)
    params[1].grad = torch.zeros(3, 4, 8, dtype=torch.bfloat16)  # zero is not None: weights decay
    optimizer.step()
    assert not torch.equal(params[1], before)


def test_a_step_without_gradients_does_not_repeat_the_last_one() -> None:
    params = parameters()
    optimizer = MasterWeights(torch.optim.SGD, params, lr=0.1, momentum=0.9)
    stepped(optimizer, params, range(1))
    before = [p.detach().clone() for p in params]
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(p, value) for p, value in zip(params, before, strict=True))


def test_gradients_and_their_dtype_are_left_alone() -> None:
    params = parameters()
    optimizer = MasterWeights(torch.optim.AdamW, params, lr=0.1)
    given = gradients(0, params)
    for parameter, gradient in zip(params, given, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
    for parameter, gradient in zip(params, given, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
        assert optimizer.state[parameter]["master"].grad is None, "fp32 gradients are freed"
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


def test_groups_keep_their_own_options() -> None:
    params, copies = parameters(), [nn.Parameter(p.detach().float()) for p in parameters()]

    def groups(of: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": of[:1], "lr": 0.5, "weight_decay": 0.0}, {"params": of[1:]}]

    optimizer = MasterWeights(torch.optim.AdamW, groups(params), lr=0.01)
    plain = torch.optim.AdamW(groups(copies), lr=0.01)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.01]
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999), "defaults of the inner optimizer are shown"
    for step in range(3):
        for p, copied, gradient in zip(params, copies, gradients(step, params), strict=True):
            p.grad, copied.grad = gradient.clone(), gradient.float()
        optimizer.step()
        plain.step()
        for group in (optimizer.param_groups[0], plain.param_groups[0]):
            group["lr"] *= 0.5  # what a schedule does
    assert all(torch.equal(p, copied.bfloat16()) for p, copied in zip(params, copies, strict=True))


def test_a_scheduler_drives_it() -> None:
    params, copies = parameters(), [nn.Parameter(p.detach().float()) for p in parameters()]
    pair = MasterWeights(torch.optim.SGD, params, lr=1.0), torch.optim.SGD(copies, lr=1.0)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in pair]
    for step in range(3):
        for p, copied, gradient in zip(params, copies, gradients(step, params), strict=True):
            p.grad, copied.grad = gradient.clone(), gradient.float()
        for optimizer, schedule in zip(pair, schedules, strict=True):
            optimizer.step()
            schedule.step()
    assert pair[0].param_groups[0]["lr"] == 0.125
    assert all(torch.equal(p, copied.bfloat16()) for p, copied in zip(params, copies, strict=True))


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


CARRIERS: dict[str, Callable[[Any], Any]] = {
    "in memory": lambda value: pickle.loads(pickle.dumps(value)),
    "through a file": through_a_file,
}


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dict_round_trip(name: str, dtype: torch.dtype, carrier: str) -> None:
    """Saved after 2 steps, loaded into a fresh optimizer over other values: masters, moments and 3 more steps equal."""
    kind, options = OPTIMIZERS[name]
    first = parameters(dtype)
    one = MasterWeights(kind, first, **options)
    stepped(one, first, range(2))
    held = CARRIERS[carrier](one.state_dict())
    if dtype == torch.bfloat16:
        assert all(state["master"].dtype == torch.float32 for state in held["state"].values())

    second = [nn.Parameter(torch.zeros_like(p)) for p in parameters(dtype)]
    two = MasterWeights(kind, second, **{**options, "lr": 123.0})
    if dtype == torch.float32:
        with torch.no_grad():
            for parameter, value in zip(second, first, strict=True):
                parameter.copy_(value)  # the model's own checkpoint holds them: they are no part of this state
    two.load_state_dict(held)
    assert two.param_groups[0]["lr"] == options["lr"]
    for steps in (range(0), range(2, 5)):
        stepped(one, first, steps)
        stepped(two, second, steps)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)
            assert one.state[a].keys() == two.state[b].keys()
            for key, value in one.state[a].items():
                assert value is None or torch.equal(value, two.state[b][key]), key
                assert not isinstance(value, Tensor) or value.dtype == torch.float32, key


def test_loading_in_the_middle_goes_back() -> None:
    params = parameters()
    optimizer = MasterWeights(torch.optim.AdamW, params, lr=0.1)
    stepped(optimizer, params, range(2))
    held, before = CARRIERS["in memory"](optimizer.state_dict()), [p.detach().clone() for p in params]
    stepped(optimizer, params, range(2, 4))
    after = [p.detach().clone() for p in params]
    optimizer.load_state_dict(held)
    assert all(torch.equal(p, value) for p, value in zip(params, before, strict=True))
    stepped(optimizer, params, range(2, 4))
    assert all(torch.equal(p, value) for p, value in zip(params, after, strict=True))


def test_state_dict_before_the_first_step_holds_the_masters() -> None:
    params = parameters()
    held = MasterWeights(torch.optim.AdamW, params, lr=0.1).state_dict()
    assert [torch.equal(held["state"][i]["master"], p.float()) for i, p in enumerate(params)] == [True, True]


def test_write_back_after_masters_were_loaded_in_place() -> None:
    params = parameters()
    optimizer = MasterWeights(torch.optim.AdamW, params, lr=0.1)
    stepped(optimizer, params, range(1))
    with torch.no_grad():
        for parameter in params:
            optimizer.state[parameter]["master"].fill_(1.00390625 + 2**-10)
    optimizer.write_back()
    assert all((p == torch.tensor(1.00390625 + 2**-10).bfloat16()).all() for p in params)
    kept = parameters(torch.float32)
    before = [p.detach().clone() for p in kept]
    MasterWeights(torch.optim.SGD, kept, lr=0.1).write_back()
    assert all(torch.equal(p, value) for p, value in zip(kept, before, strict=True))


def test_masters_start_from_the_value_itself() -> None:
    """w = .3: bfloat16 .30078125, and so is its master."""
    parameter = nn.Parameter(torch.tensor([[0.3]], dtype=torch.bfloat16))
    optimizer = MasterWeights(torch.optim.AdamW, [parameter], lr=0.1)
    assert optimizer.state_dict()["state"][0]["master"].item() == 0.30078125


def test_a_group_added_later_is_stepped_or_refused() -> None:
    """Nothing may be silently left out."""
    params = parameters()
    optimizer = MasterWeights(torch.optim.SGD, params[:1], lr=0.1)
    try:
        optimizer.add_param_group({"params": params[1:]})
    except (ValueError, NotImplementedError, RuntimeError) as refusal:
        assert "group" in str(refusal)
        return
    before = params[1].detach().clone()
    stepped(optimizer, params, range(1))
    assert not torch.equal(params[1], before)


def test_a_closure_is_refused_before_anything_moves() -> None:
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = MasterWeights(torch.optim.AdamW, params, lr=0.1)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="takes no closure: gradients must be complete before the step"):
        optimizer.step(lambda: 0.0)
    assert all(torch.equal(p, value) for p, value in zip(params, before, strict=True))


def test_a_state_of_another_number_of_parameters() -> None:
    held = MasterWeights(torch.optim.AdamW, parameters(), lr=0.1).state_dict()
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        MasterWeights(torch.optim.AdamW, parameters()[:1], lr=0.1).load_state_dict(held)


def test_step_hooks_run() -> None:
    params, seen = parameters(), []
    optimizer = MasterWeights(torch.optim.SGD, params, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    stepped(optimizer, params, range(1))
    assert seen == ["before", "after"]
