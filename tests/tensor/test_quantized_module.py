"""Quantized experts inside modules: converting, loading, materializing, optimizing; grouped and separate."""

# R routed rows   E experts   F out features   D in features

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import moe_runtime as mr
from moe_runtime.formats import MXFP8
from moe_runtime.kernels.quantize import quantize
from moe_runtime.tensor import QuantizedGroupedTensor, QuantizedTensor

RECIPES: dict[str, Any] = {
    "mxfp8": mr.recipes.MXFP8BlockScaling(),
    "nvfp4": mr.recipes.NVFP4BlockScaling(),
}
STORAGES = ["bf16", *RECIPES]
SPLITS = [5, 0, 3, 1]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one gloo rank."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        dist.destroy_process_group()


@pytest.fixture(params=[False, True], ids=["data", "swap"])
def swapping(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Both ways in which torch replaces parameters."""
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(False)


def layer(storage: str, seed: int = 0, *, omit: bool = False, keep: bool = False, **options: Any) -> mr.GroupedLinear:
    torch.manual_seed(seed)
    recipe = RECIPES.get(storage)
    if omit:
        recipe = type(recipe)(backward_override="dequantized")
    with mr.quantized_model_init(
        storage != "bf16",
        recipe,
        preserve_high_precision_init_val=keep,
        omit_columnwise_primary_weight_storage=omit,
    ):
        return mr.GroupedLinear(4, 32, 64, dtype=torch.bfloat16, **options)


def sharded(module: mr.GroupedLinear, mesh: DeviceMesh) -> mr.GroupedLinear:
    """The same module with its weight as a DTensor."""
    local = module.weight.detach()
    module.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    return module


def local(module: nn.Module, name: str = "weight") -> Any:
    value = module.get_parameter(name)
    return value.to_local() if isinstance(value, DTensor) else value


def contents(value: Any) -> dict[str, Tensor]:
    return value.records.tensors() if hasattr(value, "records") else {"values": value.detach().as_subclass(Tensor)}


def same(a: Any, b: Any) -> bool:
    ours, theirs = contents(a), contents(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def rows(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(sum(SPLITS), 32, generator=torch.Generator().manual_seed(1)).to(dtype)


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], Any], torch.dtype]] = {
    "half": (lambda m: m.half(), torch.float16),
    "float": (lambda m: m.float(), torch.float32),
    "to dtype": (lambda m: m.to(torch.float16), torch.float16),
    "to device and dtype": (lambda m: m.to("cpu", torch.float32), torch.float32),
    "cpu": (lambda m: m.cpu(), torch.bfloat16),
    "there and back": (lambda m: m.float().bfloat16(), torch.bfloat16),
}


@pytest.mark.parametrize("place", ["plain", "dtensor"])
@pytest.mark.parametrize("way", CONVERSIONS)
@pytest.mark.parametrize("storage", STORAGES)
def test_conversion(storage: str, way: str, place: str, swapping: bool, mesh: DeviceMesh) -> None:
    module, expected = layer(storage, keep=True), layer(storage, keep=True)
    module = sharded(module, mesh) if place == "dtensor" else module
    held = module.weight
    convert, dtype = CONVERSIONS[way]
    convert(module)
    weight = local(module)
    assert module.weight is held, "an optimizer that was built before would step a parameter that nobody reads"
    assert module.weight.dtype == weight.dtype == dtype and module.weight.requires_grad
    if storage == "bf16":
        assert torch.equal(weight.detach(), expected.weight.detach().to(dtype))
        return
    assert isinstance(weight, QuantizedGroupedTensor) and same(weight, expected.weight)
    init = weight.get_high_precision_init_val()
    assert init is not None and torch.equal(init, expected.weight.get_high_precision_init_val())
    if place == "plain":
        module(rows(dtype), SPLITS).sum().backward()
        assert weight.grad is not None and weight.grad.dtype == dtype


@pytest.mark.parametrize("place", ["plain", "dtensor"])
@pytest.mark.parametrize("storage", STORAGES)
def test_module_to_meta_and_back(storage: str, place: str, swapping: bool, mesh: DeviceMesh) -> None:
    """`to_empty` gives memory, `reset_parameters` values and initial values; marks stay."""
    module = layer(storage, keep=True, delay_wgrad_compute=True)
    module = sharded(module, mesh) if place == "dtensor" else module
    module.to("meta")
    weight = local(module)
    assert weight.is_meta and hasattr(weight, "records") == (storage != "bf16")
    module.to_empty(device="cpu")
    weight = local(module)
    assert weight.device.type == "cpu" and hasattr(weight, "records") == (storage != "bf16")
    assert module.weight.skip_backward_post_hook
    torch.manual_seed(3)
    if place == "dtensor":
        with torch.no_grad():
            module.weight.copy_(DTensor.from_local(layer(storage, 5).weight.dequantize(), mesh, [Shard(0)]))
    else:
        module.reset_parameters()
        assert same(local(module), layer(storage, 3).weight)
    if storage != "bf16" and place == "plain":
        init = local(module).get_high_precision_init_val()
        assert init is not None and torch.equal(init, layer("bf16", 3).weight)


@pytest.mark.parametrize("single", [True, False], ids=["packed", "separate"])
@pytest.mark.parametrize("storage", STORAGES)
def test_built_on_meta(storage: str, single: bool, swapping: bool) -> None:
    module = layer(storage, device="meta", keep=True, single_grouped_weight=single, delay_wgrad_compute=True)
    assert all(p.is_meta for p in module.parameters())
    module.to_empty(device="cpu")
    torch.manual_seed(3)
    module.reset_parameters()
    expected = layer(storage, 3, keep=True, single_grouped_weight=single)
    for name, parameter in module.named_parameters():
        assert same(parameter, expected.get_parameter(name)) and parameter.skip_backward_post_hook  # pyright: ignore
        if storage != "bf16":
            init = parameter.get_high_precision_init_val()  # pyright: ignore[reportAttributeAccessIssue]
            assert torch.equal(init, expected.get_parameter(name).get_high_precision_init_val())  # pyright: ignore


def test_separate_experts_start_at_the_values_of_packed_ones() -> None:
    for storage in STORAGES:
        packed, separate = layer(storage, keep=True), layer(storage, keep=True, single_grouped_weight=False)
        members = [separate.get_parameter(f"weight{e}") for e in range(4)]
        assert same(mr.GroupedTensor.pack([m.detach() for m in members]), packed.weight)
        if storage != "bf16":
            stacked = torch.stack([m.get_high_precision_init_val() for m in members])  # pyright: ignore
            assert torch.equal(stacked, packed.weight.get_high_precision_init_val())
            assert torch.equal(stacked, layer("bf16").weight)


def saved(module: nn.Module) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


LAYOUTS = {"packed": True, "separate": False}


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("storage", STORAGES)
def test_state_dicts_both_ways_and_both_layouts(storage: str, source: str, to: str, assign: bool) -> None:
    given = layer(storage, 0, single_grouped_weight=LAYOUTS[source])
    module = layer(storage, 7, single_grouped_weight=LAYOUTS[to], delay_wgrad_compute=True)
    assert module.load_state_dict(saved(given), assign=assign).missing_keys == []
    expected = layer(storage, 0, single_grouped_weight=LAYOUTS[to])
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, nn.Parameter) and parameter.requires_grad
        assert same(parameter, expected.get_parameter(name)), "bytes: nothing is rounded twice"
        assert parameter.skip_backward_post_hook  # pyright: ignore[reportAttributeAccessIssue]
    loaded = [p.detach().clone() for p in module.parameters()]
    with torch.no_grad():
        for parameter in given.parameters():
            parameter.zero_()
    assert all(same(p, before) for p, before in zip(module.parameters(), loaded, strict=True)), "apart from its source"


@pytest.mark.parametrize("place", ["plain", "dtensor"])
@pytest.mark.parametrize("storage", STORAGES)
def test_state_dict_of_a_dtensor(storage: str, place: str, mesh: DeviceMesh) -> None:
    make = (lambda seed: sharded(layer(storage, seed), mesh)) if place == "dtensor" else (lambda s: layer(storage, s))
    for assign in (False, True):
        module = make(7)
        module.load_state_dict(make(0).state_dict(), assign=assign)
        assert same(local(module), layer(storage).weight)
        assert isinstance(module.weight, DTensor) == (place == "dtensor")


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("storage", list(RECIPES))
def test_high_precision_state_dicts_are_quantized(storage: str, assign: bool) -> None:
    """A checkpoint of bf16 weights, as Hugging Face's are: every direction, and the initial values, are of it."""
    module = layer(storage, 7, keep=True)
    values_EFD = layer("bf16").weight.plain().clone()  # pyright: ignore[reportCallIssue]
    module.load_state_dict({"weight": values_EFD}, assign=assign)
    weight = module.weight
    assert isinstance(weight, QuantizedGroupedTensor) and weight.rowwise and weight.columnwise
    assert same(weight, mr.GroupedTensor.pack(values_EFD, weight.quantizer))
    assert torch.equal(weight.get_high_precision_init_val(), values_EFD)  # pyright: ignore[reportArgumentType]


def test_a_quantized_state_dict_gives_its_values_to_a_high_precision_layer() -> None:
    module = layer("bf16", 7)
    given = layer("mxfp8")
    module.load_state_dict(given.state_dict())
    assert torch.equal(module.weight.detach(), given.weight.dequantize())
    assert type(module.weight) is mr.GroupedTensor


def test_bytes_of_another_format_are_quantized_again() -> None:
    module, given = layer("nvfp4", 7), layer("mxfp8")
    module.load_state_dict(given.state_dict())
    expected = mr.GroupedTensor.pack(given.weight.dequantize(torch.float32), module.weight.quantizer)
    assert same(module.weight, expected)


def test_rowwise_bytes_do_not_load_where_both_directions_are_stored() -> None:
    module, given = layer("mxfp8", 7), layer("mxfp8", omit=True)
    with pytest.raises(RuntimeError, match="wants columnwise bytes, and what is copied has none"):
        module.load_state_dict(given.state_dict())
    assert same(module.weight, layer("mxfp8", 7).weight), "it raised, and wrote one direction"
    rowwise = layer("mxfp8", 7, omit=True)
    rowwise.load_state_dict(layer("mxfp8").state_dict())
    assert not rowwise.weight.columnwise and torch.equal(rowwise.weight.dequantize(), given.weight.dequantize())


@pytest.mark.parametrize("single", [True, False], ids=["packed", "separate"])
@pytest.mark.parametrize("storage", list(RECIPES))
def test_copies_of_a_module_train_apart(storage: str, single: bool) -> None:
    module = layer(storage, keep=True, single_grouped_weight=single)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        optimizer = mr.optim.MasterWeights(torch.optim.SGD, twin.parameters(), lr=1.0)
        with mr.autocast(recipe=RECIPES[storage]):
            twin(rows(), SPLITS).square().sum().backward()
        optimizer.step()
        expected = layer(storage, single_grouped_weight=single)
        for name, parameter in module.named_parameters():
            assert same(parameter, expected.get_parameter(name)) and parameter.grad is None
            assert parameter.get_high_precision_init_val() is not None  # pyright: ignore[reportAttributeAccessIssue]
            without_rows = name == "weight1"
            assert same(parameter, twin.get_parameter(name)) == without_rows


def test_every_weight_of_a_module_is_bytes() -> None:
    """Nothing of high precision is kept, and nothing is skipped."""
    with mr.quantized_model_init(recipe=RECIPES["mxfp8"]):
        experts = mr.GroupedMLP(8, 64, 32)
    held = {name: p for name, p in experts.named_parameters()}
    assert held.keys() == {"gate_up.weight", "down.weight"}
    for parameter in held.values():
        assert isinstance(parameter, QuantizedTensor)
        assert all(t.element_size() == 1 for t in parameter.records.tensors().values())
        assert parameter.get_high_precision_init_val() is None
    total = sum(p.stored_bytes for p in held.values())  # pyright: ignore[reportAttributeAccessIssue]
    assert total == MXFP8().stored_bytes((8, 64, 64), columnwise=True) + MXFP8().stored_bytes(
        (8, 64, 32), columnwise=True
    )


def test_dimensions_that_are_not_whole_blocks_are_refused_at_construction() -> None:
    with (
        mr.quantized_model_init(recipe=RECIPES["mxfp8"]),
        pytest.raises(ValueError, match=r"needs cols to be a multiple of 32, got cols=48"),
    ):
        mr.GroupedLinear(4, 48, 64)


# Attached from anywhere -----------------------------------------------------------------------------------------------

ATTACH: dict[str, Callable[[mr.GroupedLinear, Tensor], Any]] = {
    "register": lambda m, w: m.register_parameter("weight", nn.Parameter(w)),
    "assign": lambda m, w: setattr(m, "weight", nn.Parameter(w)),
    "load": lambda m, w: m.load_state_dict({"weight": w}, assign=True),
    "load copy": lambda m, w: m.load_state_dict({"weight": w}),
}


@pytest.mark.parametrize("given", ["dense", "packed", "quantized"])
@pytest.mark.parametrize("way", ATTACH)
def test_a_weight_attached_later_is_quantized_and_marked(way: str, given: str) -> None:
    module = layer("mxfp8", 7, keep=True, delay_wgrad_compute=True)
    values_EFD = layer("bf16").weight.plain().clone()  # pyright: ignore[reportCallIssue]
    weights = {
        "dense": values_EFD,
        "packed": mr.GroupedTensor.pack(values_EFD),
        "quantized": mr.GroupedTensor.pack(values_EFD, mr.Quantizer(format=MXFP8()), keep_init=True),
    }
    ATTACH[way](module, weights[given])
    weight = module.weight
    assert isinstance(weight, QuantizedGroupedTensor) and isinstance(weight, nn.Parameter)
    assert weight.skip_backward_post_hook
    assert same(weight, mr.GroupedTensor.pack(values_EFD, mr.Quantizer(format=MXFP8())))
    assert torch.equal(weight.get_high_precision_init_val(), values_EFD)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("storage", list(RECIPES))
def test_keeping_experts_keeps_bytes_and_initial_values(storage: str) -> None:
    for single in (True, False):
        module = layer(storage, keep=True, single_grouped_weight=single)
        whole = layer(storage, keep=True)
        module.keep_experts(1, 3)
        kept = module.weight if single else mr.GroupedTensor.pack([module.weight0.detach(), module.weight1.detach()])
        assert same(kept, whole.weight[1:3])
        init = kept.get_high_precision_init_val()  # pyright: ignore[reportAttributeAccessIssue]
        assert torch.equal(init, whole.weight.get_high_precision_init_val()[1:3])


# Optimizers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("omit", [False, True], ids=["both", "row-wise"])
@pytest.mark.parametrize("storage", list(RECIPES))
def test_writeback_refreshes_every_direction(storage: str, omit: bool) -> None:
    module = layer(storage, keep=True, omit=omit)
    optimizer = mr.optim.MasterWeights(torch.optim.AdamW, module.parameters(), lr=0.05)
    (master,) = optimizer._master.values()
    assert torch.equal(master, layer("bf16").weight.float()), "step 0: the values before quantization"
    assert module.weight.get_high_precision_init_val() is None
    for _ in range(2):
        module(rows(), SPLITS).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    row, column = quantize(master.detach(), module.weight.quantizer.format, columnwise=not omit)
    for got, expected in ((module.weight.record("rowwise"), row), (module.weight.record("columnwise"), column)):
        assert (got is None) == (expected is None)
        if got is not None and expected is not None:
            assert torch.equal(got.payload, expected.payload) and torch.equal(got.scale, expected.scale)
    assert module.weight.columnwise == (not omit)


def test_writeback_into_a_direction_that_is_wanted_and_missing_makes_it() -> None:
    module = layer("mxfp8", omit=True)
    module.weight.quantizer.set_usage(columnwise=True)
    optimizer = mr.optim.MasterWeights(torch.optim.SGD, module.parameters(), lr=0.1)
    module(rows(), SPLITS).sum().backward()
    optimizer.step()
    assert module.weight.columnwise
    assert same(module.weight, mr.GroupedTensor.pack(next(iter(optimizer._master.values())), module.weight.quantizer))


@pytest.mark.parametrize("kind", ["sgd", "adamw", "adamw foreach", "adamw fused"])
def test_an_optimizer_without_masters_is_refused(kind: str) -> None:
    make: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
        "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    }
    module = layer("mxfp8")
    optimizer = make[kind](module.parameters())
    module(rows(), SPLITS).sum().backward()
    with pytest.raises(NotImplementedError, match=r"in place.*step fp32 masters \(mr\.optim\.MasterWeights\)"):
        optimizer.step()
    assert same(module.weight, layer("mxfp8").weight)


def test_initial_values_free_on_a_dtensor(mesh: DeviceMesh) -> None:
    module = sharded(layer("mxfp8", keep=True), mesh)
    optimizer = mr.optim.MasterWeights(torch.optim.SGD, module.parameters(), lr=0.0)
    (master,) = optimizer._master.values()
    assert isinstance(master, DTensor) and torch.equal(master.to_local(), layer("bf16").weight.float())
    assert local(module).get_high_precision_init_val() is None


def test_averaging_a_model_writes_both_directions() -> None:
    module = layer("mxfp8")
    average = torch.optim.swa_utils.AveragedModel(module)
    average.update_parameters(module)
    assert same(average.module.weight, module.weight)
    first, ones = module.weight.dequantize(), torch.ones(4, 64, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(ones)
    average.update_parameters(module)
    mean = torch.optim.swa_utils.get_swa_avg_fn()(first, ones, 1)
    assert same(average.module.weight, mr.GroupedTensor.pack(mean, module.weight.quantizer))


def test_vectors_of_parameters() -> None:
    module = layer("mxfp8")
    vector = nn.utils.parameters_to_vector(module.parameters())
    assert torch.equal(vector, module.weight.dequantize().flatten())
    with pytest.raises(RuntimeError, match=r"\.data of a quantized tensor cannot be replaced"):
        nn.utils.vector_to_parameters(vector, module.parameters())
