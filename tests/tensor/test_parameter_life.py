"""A packed parameter inside modules, optimizers, checkpoints and compiled code: what a user does to any parameter."""

# R routed rows   E local experts   F out features   D in features

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import moe_runtime as mr
from moe_runtime.testing import nan_filled_memory

SPLITS = [3, 0, 2]


def layer(**options: Any) -> mr.GroupedLinear:
    torch.manual_seed(0)
    return mr.GroupedLinear(3, 8, 16, **options)


def weight_of(module: mr.GroupedLinear) -> mr.GroupedTensor:
    weight = module.weight
    assert type(weight) is mr.GroupedTensor and isinstance(weight, nn.Parameter) and weight.is_leaf
    assert dict(module.named_parameters())["weight"] is weight
    return weight


def loss_of(module: nn.Module, x_RD: Tensor) -> Tensor:
    return module(x_RD, SPLITS).square().sum()


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], Any], torch.dtype]] = {
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "half": (lambda m: m.half(), torch.float16),
    "double": (lambda m: m.double(), torch.float64),
    "to dtype": (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    "to device and dtype": (lambda m: m.to("cpu", torch.bfloat16), torch.bfloat16),
    "cpu": (lambda m: m.cpu(), torch.float32),
    "there and back": (lambda m: m.bfloat16().float(), torch.float32),
}


@pytest.mark.parametrize("swap", [False, True], ids=["data", "swap_tensors"])
@pytest.mark.parametrize("way", CONVERSIONS)
def test_module_conversion(way: str, swap: bool) -> None:
    module = layer()
    held = weight_of(module)
    before = held.plain().clone()
    held.skip_backward_post_hook = True
    convert, dtype = CONVERSIONS[way]
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        convert(module)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    weight = weight_of(module)
    assert weight is held, "an optimizer that was built before would step a parameter that nobody reads"
    assert weight.dtype == dtype and weight.requires_grad and weight.skip_backward_post_hook is True
    expected = before.bfloat16() if way == "there and back" else before
    assert torch.equal(weight.plain(), expected.to(dtype))
    assert torch.equal(weight.members()[1], expected[1].to(dtype))
    loss_of(module, rows(dtype)).backward()
    assert weight.grad is not None and weight.grad.dtype == dtype


def test_members_follow_every_change_of_storage() -> None:
    module = layer()
    weight = weight_of(module)
    flat = torch.zeros(2 * weight.numel())
    flat[: weight.numel()] = weight.plain().flatten()

    weight.data = flat[: weight.numel()].view(weight.shape)  # a reducer's buffer
    assert weight_of(module) is weight
    flat[0] = 42.0
    assert weight.members()[0][0, 0] == 42.0
    weight.members()[2][15, 7] = 24.0
    assert flat[weight.numel() - 1] == 24.0

    weight.data = torch.full((3, 16, 8), 3.0)
    assert weight.members()[1].unique().tolist() == [3.0]
    with torch.no_grad():
        weight.copy_(torch.full((3, 16, 8), 4.0))
    assert weight.members()[1].unique().tolist() == [4.0]

    values = weight.plain().clone()
    weight.untyped_storage().resize_(0)  # what FSDP2 does between uses
    weight.untyped_storage().resize_(values.numel() * 4)
    with torch.no_grad():
        weight.copy_(values + 1)
    assert weight.members()[0].unique().tolist() == [5.0]


def test_training_goes_on_in_a_remapped_buffer() -> None:
    plain, remapped = layer(), layer()
    weight = weight_of(remapped)
    buffer = weight.plain().clone().flatten()
    weight.data = buffer.view(weight.shape)
    for module in (plain, remapped):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(2):
            loss_of(module, rows()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(buffer.view(weight.shape), weight_of(plain).plain())
    assert weight.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_it_like_a_plain_parameter(name: str) -> None:
    weights = [nn.Parameter(mr.GroupedTensor.pack(torch.ones(3, 4, 8))), nn.Parameter(torch.ones(3, 4, 8))]
    target = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(2))
    for weight in weights:
        optimizer = OPTIMIZERS[name]([weight])

        def closure(weight: nn.Parameter = weight, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = (weight - target).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        state = io.BytesIO()
        torch.save(optimizer.state_dict(), state)
        state.seek(0)
        optimizer.load_state_dict(torch.load(state, weights_only=True))
        optimizer.step(closure)
    assert type(weights[0]) is mr.GroupedTensor
    assert not (weights[1] == 1.0).any()
    assert torch.equal(weights[0].plain(), weights[1])


@pytest.mark.parametrize("saved", [False, True], ids=["in memory", "through a file"])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("source", ["packed", "plain"])
def test_state_dict_both_ways(source: str, assign: bool, saved: bool) -> None:
    held = layer().state_dict() if source == "packed" else {"weight": torch.randn(3, 16, 8)}
    if source == "packed":
        assert type(held["weight"]) is mr.GroupedTensor and not held["weight"].requires_grad
    if saved:
        file = io.BytesIO()
        torch.save(held, file)
        file.seek(0)
        held = torch.load(file, weights_only=True)
    target = layer()
    with torch.no_grad():
        target.weight.fill_(float("nan"))
    before = target.weight
    assert str(target.load_state_dict(held, assign=assign)) == "<All keys matched successfully>"
    weight = weight_of(target)
    assert torch.equal(weight.plain(), torch.as_tensor(held["weight"]))
    assert weight.requires_grad and (weight is before) == (not assign)
    loss_of(target, rows()).backward()
    assert weight.grad is not None


def test_a_packed_state_dict_loads_into_a_plain_module() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 16, 8))

    for assign in (False, True):
        plain = Plain()
        plain.load_state_dict(layer().state_dict(), assign=assign)
        assert torch.equal(plain.weight, layer().weight)


def test_assign_keeps_a_frozen_weight_frozen_and_other_dtypes() -> None:
    module = layer()
    module.weight.requires_grad_(False)
    module.load_state_dict({"weight": torch.ones(3, 16, 8, dtype=torch.bfloat16)}, assign=True)
    assert weight_of(module).dtype == torch.bfloat16 and not module.weight.requires_grad


@pytest.mark.parametrize("assign", [False, True])
def test_wrong_shapes_are_refused(assign: bool) -> None:
    for shape in ((2, 16, 8), (3, 8, 16)):
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            layer().load_state_dict({"weight": torch.zeros(shape)}, assign=assign)


def test_meta_then_to_empty() -> None:
    module = layer(device="meta", dtype=torch.bfloat16, bias=True)
    assert weight_of(module).is_meta
    module.weight.requires_grad_(False)
    module.weight.skip_backward_post_hook = True
    with nan_filled_memory():
        module.to_empty(device="cpu")
        weight = weight_of(module)
        assert weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and not weight.requires_grad
        assert weight.isnan().all()
        module.reset_parameters()
    assert not weight.isnan().any() and not module.bias.isnan().any()
    assert weight_of(module) is weight


def test_to_empty_keeps_the_mark() -> None:
    module = layer(device="meta")
    weight_of(module).skip_backward_post_hook = True
    module.to_empty(device="cpu")
    module.reset_parameters()
    assert weight_of(module).skip_backward_post_hook is True


def test_meta_then_assign() -> None:
    module = layer(device="meta")
    module.load_state_dict(layer().state_dict(), assign=True)
    assert torch.equal(weight_of(module).plain(), weight_of(layer()).plain())
    loss_of(module, rows()).backward()


def test_meta_cannot_be_moved_without_values() -> None:
    with pytest.raises(NotImplementedError, match="meta"):
        layer(device="meta").to("cpu")


def test_deepcopy_of_a_module_trains_apart() -> None:
    module = layer()
    twin = copy.deepcopy(module)
    loss_of(twin, rows()).backward()
    assert weight_of(twin).grad is not None and module.weight.grad is None
    with torch.no_grad():
        twin.weight.zero_()
    assert module.weight.count_nonzero() == module.weight.numel()
    assert type(twin.weight) is mr.GroupedTensor


def test_pickled_module_trains() -> None:
    module = pickle.loads(pickle.dumps(layer()))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = weight_of(module).plain().clone()
    loss_of(module, rows()).backward()
    optimizer.step()
    assert not torch.equal(weight_of(module).plain(), before)


def test_averaged_model_follows() -> None:
    module = layer()
    averaged = torch.optim.swa_utils.AveragedModel(module)
    first = weight_of(module).plain().clone()
    averaged.update_parameters(module)
    with torch.no_grad():
        module.weight.add_(1.0)
    averaged.update_parameters(module)
    assert type(averaged.module.weight) is mr.GroupedTensor
    torch.testing.assert_close(averaged.module.weight.plain(), first + 0.5)


def test_vectors_of_parameters() -> None:
    source, target = layer(bias=True), layer(bias=True)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.0)
    vector_to_parameters(parameters_to_vector(source.parameters()), target.parameters())
    assert torch.equal(weight_of(target).plain(), weight_of(source).plain())
    assert torch.equal(target(rows(), SPLITS), source(rows(), SPLITS))


def test_functional_call_with_plain_values() -> None:
    module = layer()
    values = {"weight": torch.ones(3, 16, 8, requires_grad=True)}
    y_RF = torch.func.functional_call(module, values, (rows(), SPLITS))
    y_RF.sum().backward()
    torch.testing.assert_close(y_RF[0], rows()[0].sum().expand(16))
    assert values["weight"].grad is not None and module.weight.grad is None


# Dynamo itself instantiates autograd functions and asks non-leaf tensors for their gradient.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compile() -> None:
    torch._dynamo.reset()
    module = layer(bias=True)
    compiled = torch.compile(module, backend="aot_eager")
    results = []
    for run in (module, compiled):
        module.zero_grad()
        x_RD = rows().requires_grad_()
        y_RF = run(x_RD, SPLITS)
        y_RF.square().sum().backward()
        assert x_RD.grad is not None
        results.append([y_RF.detach(), x_RD.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)])
    assert len(results[0]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert type(module.weight) is mr.GroupedTensor


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_reads_the_current_storage(backend: str) -> None:
    torch._dynamo.reset()
    weight = nn.Parameter(mr.GroupedTensor.pack(torch.ones(3, 4, 8)))
    function = torch.compile(lambda w: (w[1] * 2).sum() + w.sum(), backend=backend, fullgraph=True)
    assert function(weight).item() == 64 + 96
    weight.data = torch.full((3, 4, 8), 2.0)
    value = function(weight)
    value.backward()
    assert value.item() == 2 * (64 + 96)
    assert weight.grad is not None and weight.grad[:, 0, 0].tolist() == [1.0, 3.0, 1.0]
