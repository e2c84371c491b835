"""The table of what a user does to a parameter: each operation, on each storage, plain and as a DTensor.

An operation gives the same parameter again ("bytes": quantized, both directions right), gives what it gives of the
values ("values": a plain tensor), or raises a sentence, and then nothing has changed. In high precision it does what it
does to an ordinary tensor.
"""

# E experts   R rows   C columns

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import moe_runtime as mr
from moe_runtime.formats import MXFP8, NVFP4
from moe_runtime.kernels.dequantize import dequantize
from moe_runtime.tensor import QuantizedGroupedTensor, QuantizedTensor

SHAPE = (4, 32, 64)
STORAGES = {"bf16": None, "mxfp8": MXFP8(), "nvfp4": NVFP4(two_dimensional=True)}
QUANTIZED = ["mxfp8", "nvfp4"]
ONES = torch.ones(SHAPE)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one gloo rank."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        dist.destroy_process_group()


def packed(storage: str) -> Any:
    dense_ERC = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    fmt = STORAGES[storage]
    return mr.GroupedTensor.pack(dense_ERC, None if fmt is None else mr.Quantizer(format=fmt))


def wrapped(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    return tensor if mesh is None else DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)


def saved_and_loaded(tensor: Tensor) -> Any:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def in_place(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(tensor: Any) -> Any:
        change(tensor)
        return tensor

    return run


def like(tensor: Any, value: Tensor) -> Any:
    """`value` as a DTensor if `tensor` is one."""
    return wrapped(value, tensor.device_mesh) if isinstance(tensor, DTensor) else value


class Row(NamedTuple):
    """One operation; what it does to quantized bytes, plain and in a DTensor: "bytes", "values", or its sentence."""

    run: Callable[[Any], Any]
    plain: str
    dtensor: str


def row(run: Callable[[Any], Any], plain: str, dtensor: str | None = None) -> Row:
    return Row(run, plain, plain if dtensor is None else dtensor)


IN_PLACE = r"would change a quantized tensor in place, and rounding would undo it"
WHOLE = r"takes whole experts: expected dim 0 of \(E, rows, cols\), got dim"
NO_MEANING = r"has no meaning for quantized bytes: expected an op on whole experts \(dim 0\)"
KEEPS_SHAPE = r"of a quantized tensor keeps its shape \(4, 32, 64\), got"
MIXED = "got mixed torch.Tensor and DTensor"  # torch's own, whatever the DTensor holds

TABLE: dict[str, Row] = {
    # the same parameter again
    "detach": row(lambda t: t.detach(), "bytes"),
    "clone": row(lambda t: t.clone(), "bytes"),
    "contiguous": row(lambda t: t.contiguous(), "bytes"),
    "deepcopy": row(copy.deepcopy, "bytes"),
    "copy": row(copy.copy, "bytes"),
    "pickle": row(lambda t: pickle.loads(pickle.dumps(t)), "bytes"),
    "torch.save": row(saved_and_loaded, "bytes"),
    "to dtype": row(lambda t: t.to(torch.float16), "bytes"),
    "to device": row(lambda t: t.to("cpu", copy=True), "bytes"),
    "to device and dtype": row(lambda t: t.to("cpu", torch.float32), "bytes"),
    "float": row(lambda t: t.float(), "bytes"),
    "cpu": row(lambda t: t.cpu(), "bytes"),
    "type_as": row(lambda t: t.type_as(torch.zeros((), dtype=torch.float16)), "bytes"),
    "requires_grad_": row(lambda t: t.requires_grad_(), "bytes"),
    "parameter": row(lambda t: nn.Parameter(t), "bytes"),
    "view of its shape": row(lambda t: t.view(SHAPE), "bytes"),
    "view_as": row(lambda t: t.view_as(t), "bytes"),
    "expand_as": row(lambda t: t.expand_as(t), "bytes"),
    "expand": row(lambda t: t.expand(4, -1, 64), "bytes"),
    # experts
    "split": row(lambda t: t.split(3), "bytes"),
    "split sizes": row(lambda t: t.split([1, 3]), "bytes"),
    "chunk": row(lambda t: t.chunk(2), "bytes"),
    "tensor_split": row(lambda t: t.tensor_split(2), "bytes"),
    "select": row(lambda t: t.select(0, 2), "bytes"),
    "index": row(lambda t: t[-1], "bytes"),
    "slice": row(lambda t: t[1:3], "bytes"),
    "slice by two": row(lambda t: t[::2], "bytes"),
    "slice of all": row(lambda t: t[:], "bytes"),
    "narrow": row(lambda t: t.narrow(0, 1, 2), "bytes"),
    "unbind": row(lambda t: t.unbind(0), "bytes", "Attempted to unbind along the sharded dimension 0"),
    "iterate": row(lambda t: tuple(t), "bytes", "Attempted to unbind along the sharded dimension 0"),
    "split rows": row(lambda t: t.split(16, 1), WHOLE),
    "chunk columns": row(lambda t: t.chunk(2, -1), WHOLE),
    "slice rows": row(lambda t: t[:, 1:3], WHOLE),
    "select row": row(lambda t: t[0, 0], WHOLE),
    "unbind rows": row(lambda t: t.unbind(1), WHOLE),
    # writing
    "copy_": row(in_place(lambda t: t.copy_(like(t, ONES))), "values written"),
    "copy_ of another dtype": row(in_place(lambda t: t.copy_(like(t, ONES.double()))), "values written"),
    "copy_ of one expert": row(in_place(lambda t: t.copy_(like(t, ONES[:1]))), "values written"),
    "zero_": row(in_place(lambda t: t.zero_()), "values written"),
    "set an expert": row(in_place(lambda t: t.__setitem__(1, ONES[1])), "values written", MIXED),
    "set experts": row(in_place(lambda t: t.__setitem__(slice(1, 3), ONES[1:3])), "values written", MIXED),
    "copy_ to a member": row(in_place(lambda t: t[3].copy_(ONES[3])), "values written", MIXED),
    "fill_": row(in_place(lambda t: t.fill_(1.0)), IN_PLACE),
    "set a number": row(in_place(lambda t: t.__setitem__(0, 1.0)), IN_PLACE, "fill_.Tensor does not have a sharding"),
    "mul_": row(in_place(lambda t: t.mul_(2)), IN_PLACE),
    "add_": row(in_place(lambda t: t.add_(1)), IN_PLACE),
    "sub_ of a tensor": row(in_place(lambda t: t.sub_(like(t, ONES))), IN_PLACE),
    "clamp_": row(in_place(lambda t: t.clamp_(0, 1)), IN_PLACE),
    "lerp_": row(in_place(lambda t: t.lerp_(like(t, ONES.bfloat16()), 0.5)), IN_PLACE),
    "_foreach_mul_": row(in_place(lambda t: torch._foreach_mul_([t], 2.0)), IN_PLACE),
    "add out": row(in_place(lambda t: torch.add(like(t, ONES), 1, out=t)), IN_PLACE),
    "set_": row(in_place(lambda t: t.set_(like(t, ONES.bfloat16()))), IN_PLACE, "does not have a sharding strategy"),
    # views that mix bytes
    "transpose": row(lambda t: t.transpose(1, 2), NO_MEANING),
    "mT": row(lambda t: t.mT, NO_MEANING),
    "permute": row(lambda t: t.permute(0, 2, 1), NO_MEANING),
    "reshape": row(lambda t: t.reshape(4, -1), KEEPS_SHAPE),
    "view": row(lambda t: t.view(4, 2, 16, 64), KEEPS_SHAPE),
    "unsqueeze": row(lambda t: t.unsqueeze(0), NO_MEANING),
    "squeeze": row(lambda t: t.squeeze(0), NO_MEANING),
    "expand to more": row(lambda t: t.expand(2, 4, 32, 64), KEEPS_SHAPE),
    "view of a dtype": row(lambda t: t.view(torch.int16), NO_MEANING),
    # values
    "multiply": row(lambda t: t * 2, "values"),
    "add": row(lambda t: t + t, "values"),
    "compare": row(lambda t: t == t, "values"),
    "norm": row(lambda t: t.norm(), "values"),
    "sum": row(lambda t: t.sum(), "values"),
    "flat": row(lambda t: t.flatten() * 1, "values"),
    "cat": row(lambda t: torch.cat([t, t]), "values"),
    "stack": row(lambda t: torch.stack([t, t]), "values"),
    "to integers": row(lambda t: t.to(torch.int32), "values"),
    "where": row(lambda t: torch.where(t > 0, t, 0), "values"),
    "zeros_like": row(torch.zeros_like, "values"),
    "ones_like": row(torch.ones_like, "values"),
    "full_like": row(lambda t: torch.full_like(t, 3.0), "values"),
    "zeros_like of a dtype": row(lambda t: torch.zeros_like(t, dtype=torch.float32), "values"),
    "new_zeros": row(lambda t: t.new_zeros(3), "values"),
    "numpy": row(lambda t: t.float().numpy(), "not supported for tensor subclasses"),
    "tolist": row(lambda t: t.tolist(), "not supported for tensor subclasses"),
    "dlpack": row(lambda t: torch.from_dlpack(t.detach()), "no buffer of values to share", None),
}
TABLE["dlpack"] = TABLE["dlpack"]._replace(dtensor="skip")  # a DTensor hands out its own, empty, buffer


def outcome(run: Callable[[Any], Any], tensor: Any) -> Any:
    """Results as a list of local tensors, or the exception."""
    try:
        result = run(tensor)
    except Exception as error:  # whatever torch raises is what is compared
        return error
    results = list(result) if isinstance(result, list | tuple) else [result]
    return [r.to_local() if isinstance(r, DTensor) else r for r in results]


def values(tensor: Any) -> Tensor:
    return tensor.dequantize() if hasattr(tensor, "records") else tensor.detach().as_subclass(Tensor)


def both_directions(tensor: QuantizedTensor, dtype: torch.dtype) -> list[Tensor]:
    assert tensor.rowwise and tensor.columnwise
    return [dequantize(q, dtype) for q in (tensor.record("rowwise"), tensor.record("columnwise")) if q is not None]


@pytest.mark.parametrize("place", ["plain", "dtensor"])
@pytest.mark.parametrize("name", TABLE)
def test_high_precision_does_what_an_ordinary_tensor_does(name: str, place: str, mesh: DeviceMesh) -> None:
    if name == "dlpack" and place == "dtensor":
        pytest.skip("a DTensor hands out an empty buffer")
    over = mesh if place == "dtensor" else None
    ours = outcome(TABLE[name].run, wrapped(packed("bf16"), over))
    torchs = outcome(TABLE[name].run, wrapped(packed("bf16").plain().clone(), over))
    assert type(ours) is type(torchs), ours
    if isinstance(ours, Exception):
        return
    for got, expected in zip(ours, torchs, strict=True):
        if isinstance(got, Tensor):
            assert got.dtype == expected.dtype and torch.equal(values(got), values(expected))
        else:
            assert (got == expected).all() if hasattr(got, "all") else got == expected


@pytest.mark.parametrize("place", ["plain", "dtensor"])
@pytest.mark.parametrize("storage", QUANTIZED)
@pytest.mark.parametrize("name", TABLE)
def test_quantized(name: str, storage: str, place: str, mesh: DeviceMesh) -> None:
    over = mesh if place == "dtensor" else None
    source = packed(storage)
    before = both_directions(source, torch.float32)
    expected = TABLE[name].dtensor if over else TABLE[name].plain
    if expected == "skip":
        pytest.skip("a DTensor hands out an empty buffer")
    results = outcome(TABLE[name].run, wrapped(source, over))
    if expected not in ("bytes", "values", "values written"):
        assert isinstance(results, Exception), f"{name} is ignored, or has got a meaning: {results}"
        with pytest.raises(type(results), match=expected):
            raise results
        assert all(map(torch.equal, both_directions(source, torch.float32), before)), "it raised, and wrote"
        return
    if isinstance(results, Exception):
        raise results
    nominal = outcome(TABLE[name].run, wrapped(before[0].bfloat16(), over))
    # One reference for each direction: in one-dimensional blocks they hold different roundings.
    exact = [outcome(TABLE[name].run, wrapped(value.clone(), over)) for value in before]
    for index, got in enumerate(results):
        assert got.shape == nominal[index].shape and got.dtype == nominal[index].dtype
        if expected == "values":
            assert type(got) is Tensor and torch.equal(got, nominal[index])
            continue
        assert isinstance(got, QuantizedTensor) and isinstance(got, QuantizedGroupedTensor) == (got.dim() == 3)
        for direction, reference in zip(both_directions(got, got.dtype), exact, strict=True):
            assert torch.equal(direction, reference[index].to(got.dtype))
        if expected == "bytes":
            assert got.quantizer == source.quantizer and got.quantizer.format == STORAGES[storage]


@pytest.mark.parametrize("storage", STORAGES)
def test_meta(storage: str, mesh: DeviceMesh) -> None:
    for over in (None, mesh):
        moved = wrapped(packed(storage), over).to("meta")
        local = moved.to_local() if isinstance(moved, DTensor) else moved
        assert local.is_meta and local.shape == SHAPE and local.dtype == torch.bfloat16
        assert hasattr(local, "records") == (storage != "bf16")


@pytest.mark.parametrize("storage", STORAGES)
def test_empty_like_keeps_the_storage(storage: str, mesh: DeviceMesh) -> None:
    for over in (None, mesh):
        made = torch.empty_like(wrapped(packed(storage), over))
        local = made.to_local() if isinstance(made, DTensor) else made
        assert local.shape == SHAPE and hasattr(local, "records") == (storage != "bf16")
        if storage != "bf16":
            assert local.stored_bytes == packed(storage).stored_bytes and local.quantizer == packed(storage).quantizer


@pytest.mark.parametrize("storage", QUANTIZED)
@pytest.mark.parametrize("role", ["tensor", "parameter"])
def test_data_cannot_be_replaced(role: str, storage: str) -> None:
    tensor = packed(storage)
    tensor = nn.Parameter(tensor) if role == "parameter" else tensor
    before = tensor.dequantize()
    for value in (ONES.bfloat16(), packed(storage)):
        with pytest.raises(RuntimeError, match=r"\.data of a quantized tensor cannot be replaced.*use copy_\(\)"):
            tensor.data = value
    assert torch.equal(tensor.dequantize(), before)
    tensor.data.copy_(ONES)  # the alias writes through, into both directions
    assert all(torch.equal(value, ONES) for value in both_directions(tensor, torch.float32))


def test_data_of_a_dtensor_is_torchs_own_matter(mesh: DeviceMesh) -> None:
    """torch ignores `.data =` on every DTensor, whatever it holds, and nothing here can see it."""
    for tensor in (torch.randn(SHAPE), packed("mxfp8")):
        parameter = nn.Parameter(wrapped(tensor, mesh))
        before = values(parameter.to_local()).clone()
        parameter.data = wrapped(torch.zeros(SHAPE), mesh)
        assert torch.equal(values(parameter.to_local()), before)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["shard", "replicate"])
@pytest.mark.parametrize("storage", STORAGES)
def test_distribute_and_gather(storage: str, placement: Any, mesh: DeviceMesh) -> None:
    source = packed(storage)
    spread = distribute_tensor(source, mesh, [placement])
    assert hasattr(spread.to_local(), "records") == (storage != "bf16")
    for whole in (spread.full_tensor(), spread.redistribute(mesh, [Replicate()]).to_local()):
        assert torch.equal(values(whole), values(source))
        if storage != "bf16":
            assert isinstance(whole, QuantizedGroupedTensor)
            assert all(map(torch.equal, both_directions(whole, torch.float32), both_directions(source, torch.float32)))


@pytest.mark.parametrize("storage", QUANTIZED)
def test_shards_that_split_blocks_are_refused(storage: str, mesh: DeviceMesh) -> None:
    with pytest.raises(NotImplementedError, match=WHOLE):
        distribute_tensor(packed(storage), mesh, [Shard(1)])


@pytest.mark.parametrize("storage", QUANTIZED)
def test_only_known_collectives_touch_it(storage: str, mesh: DeviceMesh) -> None:
    with pytest.raises(NotImplementedError, match=r"would communicate the values of a quantized tensor"):
        dist.all_reduce(packed(storage))
    partial = DTensor.from_local(packed(storage), mesh, [Shard(0)], run_check=False)
    assert isinstance(partial.full_tensor(), QuantizedGroupedTensor)


COMPILED: dict[str, Callable[[Any], Any]] = {
    "alias": lambda t: (t.detach(), t.clone()),
    "experts": lambda t: (t[1:3], t.select(0, 1), *t.unbind(0)),
    "values": lambda t: (t * 2, torch.zeros_like(t), t.norm()),
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", COMPILED)
def test_compiles(name: str, storage: str) -> None:
    """In one graph, but for what keeps the class in high precision (`detach`, `clone`)."""
    source = nn.Parameter(packed(storage), requires_grad=False)
    torch._dynamo.reset()
    whole = storage != "bf16" or name != "alias"
    results = torch.compile(COMPILED[name], backend="aot_eager", fullgraph=whole)(source)
    for got, expected in zip(results, COMPILED[name](source), strict=True):
        assert got.shape == expected.shape and torch.equal(values(got), values(expected))
        assert storage == "bf16" or type(got) is type(expected)


def test_compiled_code_is_compiled_again_for_another_storage() -> None:
    torch._dynamo.reset()
    double = torch.compile(lambda t: t * 2, backend="aot_eager", fullgraph=True)
    for storage in STORAGES:
        weight = nn.Parameter(packed(storage), requires_grad=False)
        assert torch.equal(double(weight), weight * 2)


def test_hash_for_the_compilers_cache_tells_storages_apart_and_not_values() -> None:
    made = [packed(storage) for storage in QUANTIZED]
    made.append(mr.GroupedTensor.pack(ONES.bfloat16(), mr.Quantizer(format=MXFP8(), columnwise=False)))
    made.append(packed("mxfp8").to(torch.float16))
    made.append(packed("mxfp8")[:2])
    made.append(packed("mxfp8").requires_grad_())
    hashes = [tensor._stable_hash_for_caching() for tensor in made]
    assert len(set(hashes)) == len(hashes)
    other = packed("mxfp8")
    other.copy_(ONES)
    assert other._stable_hash_for_caching() == hashes[0]
    assert "0x" not in repr(made[0].__tensor_flatten__()), "an address would differ between processes"
