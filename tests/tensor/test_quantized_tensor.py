"""A quantized tensor by itself: its bytes, directions that never go stale, initial values, and what is refused."""

# E experts   R rows   C columns

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_runtime as mr
from moe_runtime.formats import MXFP4, MXFP8, NVFP4, Float8, Format, FP8Block, HighPrecision
from moe_runtime.formats.derive import can_turn, turned
from moe_runtime.kernels.dequantize import dequantize
from moe_runtime.kernels.quantize import quantize
from moe_runtime.tensor import QuantizedGroupedTensor, QuantizedTensor
from moe_runtime.tensor.fsdp import gathered, record_bytes
from moe_runtime.tensor.storage import InitValues, records_of

SHAPE = (3, 128, 128)
FORMATS: dict[str, Format] = {
    "mxfp8": MXFP8(),
    "mxfp8 e5m2": MXFP8(element="e5m2"),
    "nvfp4": NVFP4(),
    "nvfp4 2d": NVFP4(two_dimensional=True),
    "float8": Float8(),
    "fp8_block": FP8Block(),
    "fp8_block 2d": FP8Block(two_dimensional=True),
}
TURNING = [name for name, fmt in FORMATS.items() if can_turn(fmt)]
APART = [name for name in FORMATS if name not in TURNING]


def dense(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(name: str, seed: int = 0, *, keep_init: bool = False, **usage: bool) -> QuantizedGroupedTensor:
    quantizer = mr.Quantizer(format=FORMATS[name], **usage)
    tensor = mr.GroupedTensor.pack(dense(seed), quantizer, keep_init=keep_init)
    assert isinstance(tensor, QuantizedGroupedTensor)
    return tensor


def same_bytes(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    ours, theirs = a.records.tensors(), b.records.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def assert_holds(tensor: QuantizedTensor, values_ERC: Tensor) -> None:
    """Every direction holds what quantizing `values_ERC` gives, bit for bit."""
    fmt = tensor.quantizer.format
    row, column = quantize(values_ERC.contiguous(), fmt, columnwise=True)
    for got, expected in ((tensor.record("rowwise"), row), (tensor.record("columnwise"), column)):
        if got is not None and expected is not None:
            assert torch.equal(got.payload, expected.payload) and torch.equal(got.scale, expected.scale)
            assert (got.tensor_scale is None) == (expected.tensor_scale is None)
            assert got.tensor_scale is None or torch.equal(got.tensor_scale, expected.tensor_scale)


# Making ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["dense", "members", "packed"])
@pytest.mark.parametrize("name", FORMATS)
def test_pack_quantizes_both_directions(name: str, source: str) -> None:
    given = {"dense": dense(), "members": list(dense()), "packed": mr.GroupedTensor.pack(dense())}[source]
    tensor = mr.GroupedTensor.pack(given, mr.Quantizer(format=FORMATS[name]))
    assert isinstance(tensor, QuantizedGroupedTensor) and isinstance(tensor, mr.GroupedTensor)
    assert tensor.shape == SHAPE and tensor.dtype == torch.bfloat16 and not tensor.requires_grad
    assert tensor.rowwise and tensor.columnwise
    assert_holds(tensor, dense())
    assert torch.equal(tensor.dequantize(), dequantize(tensor.record("rowwise"), torch.bfloat16))  # pyright: ignore


@pytest.mark.parametrize("usage", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_stored_bytes_are_the_formula(name: str, usage: tuple[bool, bool]) -> None:
    rowwise, columnwise = usage
    tensor = made(name, rowwise=rowwise, columnwise=columnwise)
    assert (tensor.rowwise, tensor.columnwise) == usage
    held = sum(t.untyped_storage().nbytes() for t in tensor.records.tensors().values())
    assert tensor.stored_bytes == held == FORMATS[name].stored_bytes(SHAPE, rowwise=rowwise, columnwise=columnwise)
    meta = mr.GroupedTensor.pack(torch.empty(SHAPE, device="meta"), tensor.quantizer)
    assert meta.stored_bytes == held and meta.is_meta


def test_rowwise_mxfp8_of_eight_experts() -> None:
    """16384 elements: 32,768 bytes in bfloat16, 16,896 = 16384 * (1 + 1 / 32) row-wise."""
    quantizer = mr.Quantizer(format=MXFP8(), columnwise=False)
    tensor = mr.GroupedTensor.pack(torch.randn(8, 64, 32).bfloat16(), quantizer)
    assert tensor.numel() * 2 == 32768 and tensor.stored_bytes == 16896
    assert all(t.dtype == torch.uint8 for t in tensor.records.tensors().values())


def test_mxfp4_is_rowwise_only() -> None:
    quantizer = mr.Quantizer(format=MXFP4(), columnwise=False)
    tensor = mr.GroupedTensor.pack(dense(), quantizer)
    assert tensor.stored_bytes == 3 * 128 * 128 * 17 // 32
    with pytest.raises(ValueError, match=r"mxfp4 is stored row-wise only, got columnwise=True"):
        mr.Quantizer(format=MXFP4())
    with pytest.raises(ValueError, match="row-wise only"):
        quantizer.set_usage(columnwise=True)


@pytest.mark.parametrize("name", FORMATS)
def test_members_are_the_experts_and_write_through(name: str) -> None:
    tensor = made(name)
    members = tensor.members()
    assert len(members) == 3 and all(type(m) is QuantizedTensor and m.shape == (128, 128) for m in members)
    for member, whole in zip(members, tensor.dequantize(), strict=True):
        assert torch.equal(member.dequantize(), whole)
    values = dense(1)[2]
    members[2].copy_(values)
    expected = dense()
    expected[2] = values
    assert_holds(tensor, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_packing_quantized_members_keeps_their_bytes(name: str) -> None:
    tensor = made(name)
    assert same_bytes(mr.GroupedTensor.pack(tensor.members()), tensor)
    again = mr.GroupedTensor.pack(tensor)
    again.zero_()
    assert not tensor.dequantize().any(), "without a quantizer it is an alias"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    values = dense(dtype=dtype)
    tensor = mr.GroupedTensor.pack(values, mr.Quantizer(format=MXFP8()))
    assert tensor.dtype == dtype and tensor.dequantize().dtype == dtype
    assert_holds(tensor, values if dtype != torch.float64 else values.float())


@pytest.mark.parametrize(
    ("shape", "fmt", "message"),
    [
        ((2, 32, 48), MXFP8(), r"mxfp8 stored rowwise needs cols to be a multiple of 32, got cols=48 in shape"),
        ((2, 48, 32), MXFP8(), r"mxfp8 stored columnwise needs rows to be a multiple of 32, got rows=48"),
        ((2, 16, 24), NVFP4(), r"nvfp4 stored rowwise needs cols to be a multiple of 16, got cols=24"),
        ((2, 24, 16), NVFP4(two_dimensional=True), r"nvfp4 stored rowwise needs rows to be a multiple of 16, got rows"),
        ((2, 64, 128), FP8Block(two_dimensional=True), r"fp8_block stored rowwise needs rows to be a multiple of 128"),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dimensions_that_are_not_whole_blocks(shape: Any, fmt: Format, message: str, device: str) -> None:
    with pytest.raises(ValueError, match=message):
        mr.GroupedTensor.pack(torch.zeros(shape, device=device), mr.Quantizer(format=fmt))


def test_quantizers_that_say_nothing() -> None:
    with pytest.raises(ValueError, match="needs a quantized format, got HighPrecision"):
        mr.Quantizer(format=HighPrecision())
    with pytest.raises(ValueError, match="rowwise=True or columnwise=True, got neither"):
        mr.Quantizer(format=MXFP8(), rowwise=False, columnwise=False)


def test_set_usage_of_a_quantizer() -> None:
    quantizer = mr.Quantizer(format=MXFP8(), columnwise=False)
    quantizer.set_usage()
    quantizer.set_usage(rowwise=None, columnwise=None)
    assert (quantizer.rowwise, quantizer.columnwise) == (True, False)
    quantizer.set_usage(columnwise=True)
    assert (quantizer.rowwise, quantizer.columnwise) == (True, True)
    with pytest.raises(ValueError, match="got neither"):
        quantizer.set_usage(rowwise=False, columnwise=False)
    assert (quantizer.rowwise, quantizer.columnwise) == (True, True), "it raised, and changed"


# Quantizers apart, directions -----------------------------------------------------------------------------------------


def test_the_parameter_owns_its_quantizer() -> None:
    ops = mr.Quantizer(format=MXFP8())
    first, second = (mr.GroupedTensor.pack(dense(), ops) for _ in range(2))
    ops.set_usage(columnwise=False)
    assert first.quantizer is not second.quantizer and first.quantizer is not ops
    for tensor in (first, second, first.clone(), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert tensor.quantizer.columnwise and tensor.columnwise
    first.copy_(dense(1))
    assert_holds(first, dense(1))


@pytest.mark.parametrize("name", TURNING)
def test_square_blocks_make_the_missing_direction(name: str) -> None:
    tensor = made(name, columnwise=False)
    tensor.set_usage(columnwise=True)
    assert tensor.columnwise and tensor.quantizer.columnwise
    assert_holds(tensor, dense())
    tensor.set_usage(rowwise=False)
    assert not tensor.rowwise
    assert torch.equal(tensor.dequantize(), made(name).dequantize()), "read from the columnwise bytes"
    tensor.set_usage(rowwise=True)
    assert_holds(tensor, dense())
    for q in (tensor.record("rowwise"), tensor.record("columnwise")):
        assert q is not None and torch.equal(turned(turned(q)).payload, q.payload)


@pytest.mark.parametrize("name", APART)
def test_other_formats_do_not(name: str) -> None:
    tensor = made(name, columnwise=False)
    before = made(name, columnwise=False)
    with pytest.raises(ValueError, match=r"cannot make its other direction from the rowwise one"):
        tensor.set_usage(columnwise=True)
    assert not tensor.columnwise and not tensor.quantizer.columnwise and same_bytes(tensor, before)


def test_none_keeps_false_drops() -> None:
    tensor = made("mxfp8")
    tensor.set_usage()
    assert tensor.rowwise and tensor.columnwise
    tensor.set_usage(columnwise=False)
    assert tensor.stored_bytes == MXFP8().stored_bytes(SHAPE) and not tensor.quantizer.columnwise
    with pytest.raises(ValueError, match="got neither"):
        tensor.set_usage(rowwise=False)
    assert tensor.rowwise


@pytest.mark.parametrize("name", FORMATS)
def test_a_usage_that_is_wanted_comes_with_the_next_values(name: str) -> None:
    tensor = made(name, columnwise=False)
    tensor.quantizer.set_usage(columnwise=True)
    assert not tensor.columnwise
    tensor.copy_(dense(1))
    assert tensor.columnwise
    assert_holds(tensor, dense(1))


WRITES: dict[str, Callable[[QuantizedGroupedTensor, Tensor], Any]] = {
    "copy_": lambda t, values: t.copy_(values),
    "write": lambda t, values: t.write(values),
    "data": lambda t, values: t.data.copy_(values),
    "detached": lambda t, values: t.detach().copy_(values),
    "viewed": lambda t, values: t.view_as(t).copy_(values),
    "all experts": lambda t, values: t[:].copy_(values),
    "each expert": lambda t, values: [t[e].copy_(values[e]) for e in range(3)],
    "halves": lambda t, values: [half.copy_(v) for half, v in zip(t.split(2), values.split(2), strict=True)],
    "members": lambda t, values: [m.copy_(v) for m, v in zip(t.members(), values, strict=True)],
    "fp32": lambda t, values: t.copy_(values.float()),
    "strided": lambda t, values: t.copy_(values.mT.contiguous().mT),
    "a parameter of it": lambda t, values: nn.Parameter(t, requires_grad=False).copy_(values),
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("name", FORMATS)
def test_no_write_leaves_a_direction_stale(name: str, way: str) -> None:
    tensor = made(name)
    storage = [t.data_ptr() for t in tensor.records.tensors().values()]
    WRITES[way](tensor, dense(1))
    assert_holds(tensor, dense(1))
    assert [t.data_ptr() for t in tensor.records.tensors().values()] == storage, "in place"


@pytest.mark.parametrize("alias", ["detach", "data", "view_as", "slice of all", "parameter"])
def test_a_direction_added_later_is_there_for_every_alias(alias: str) -> None:
    """Were it not, a write through the older alias would leave it stale."""
    ways: dict[str, Callable[[Any], Any]] = {
        "detach": lambda t: t.detach(),
        "data": lambda t: t.data,
        "view_as": lambda t: t.view_as(t),
        "slice of all": lambda t: t[:],
        "parameter": lambda t: nn.Parameter(t, requires_grad=False),
    }
    tensor = made("float8", columnwise=False)
    older = ways[alias](tensor)
    tensor.set_usage(columnwise=True)
    older.copy_(dense(1))
    assert tensor.columnwise and older.columnwise
    assert_holds(tensor, dense(1))
    older.set_usage(columnwise=False)
    assert not tensor.columnwise, "and one that is dropped is gone for every alias"


@pytest.mark.parametrize("part", ["slice", "member", "member of a slice", "flat"])
def test_an_older_part_cannot_leave_it_stale_either(part: str) -> None:
    ways: dict[str, Callable[[Any], Any]] = {
        "slice": lambda t: t[:2],
        "member": lambda t: t.members()[0],
        "member of a slice": lambda t: t[:2][0],
        "flat": lambda t: t.view(-1),
    }
    tensor = made("float8", columnwise=False)
    older = ways[part](tensor)
    tensor.set_usage(columnwise=True)
    with pytest.raises(RuntimeError, match="does not hold the columnwise bytes that the whole holds"):
        older.copy_(torch.zeros(older.shape))
    assert_holds(tensor, dense())


@pytest.mark.parametrize("name", APART)
def test_bytes_that_lack_a_stored_direction_are_not_copied(name: str) -> None:
    tensor, source = made(name), made(name, 1, columnwise=False)
    with pytest.raises(ValueError, match=r"wants columnwise bytes, and what is copied has none.*omit_col"):
        tensor.copy_(source)
    assert_holds(tensor, dense())
    tensor.copy_(source.dequantize())
    assert_holds(tensor, source.dequantize())


@pytest.mark.parametrize("name", TURNING)
def test_bytes_that_determine_the_other_direction_are_copied_and_turned(name: str) -> None:
    tensor = made(name)
    tensor.copy_(made(name, 1, columnwise=False))
    assert same_bytes(tensor, made(name, 1))
    tensor.copy_(made(name, 2, rowwise=False))
    assert same_bytes(tensor, made(name, 2))


def test_bytes_of_another_format_are_quantized_from_their_values() -> None:
    tensor, source = made("mxfp8"), made("float8", 1)
    tensor.copy_(source)
    assert_holds(tensor, source.dequantize(torch.float32))
    plain = torch.zeros(SHAPE, dtype=torch.bfloat16)
    plain.copy_(source)
    assert torch.equal(plain, source.dequantize())


def test_a_write_of_a_wrong_shape_changes_nothing() -> None:
    tensor = made("mxfp8")
    for values in (torch.zeros(3, 128, 64), torch.zeros(4, 128, 128)):
        with pytest.raises(RuntimeError):
            tensor.copy_(values)
    assert_holds(tensor, dense())


def test_a_write_between_forward_and_backward_is_noticed() -> None:
    weight = nn.Parameter(made("mxfp8"))
    x_RC = torch.randn(3, 128, dtype=torch.bfloat16, requires_grad=True)
    product = (weight * x_RC[:, None]).sum()
    with torch.no_grad():
        weight.copy_(dense(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize(
    ("experts", "ranks", "sizes"),
    [(20, 8, [3, 3, 3, 3, 3, 3, 2]), (64, 6, [11, 11, 11, 11, 11, 9]), (5, 4, [2, 2, 1]), (1, 2, [1])],
)
@pytest.mark.parametrize("storage", ["bf16", "mxfp8"])
def test_shards_of_experts(storage: str, experts: int, ranks: int, sizes: list[int]) -> None:
    """As FSDP2 and DTensor cut dim 0: the last ones are smaller, or there are none left for them."""
    dense_ERC = torch.arange(experts).bfloat16()[:, None, None].expand(experts, 32, 32).contiguous()
    tensor = mr.GroupedTensor.pack(dense_ERC, None if storage == "bf16" else mr.Quantizer(format=MXFP8()))
    chunks = tensor.chunk(ranks)
    assert [len(chunk) for chunk in chunks] == sizes
    values = [c.dequantize() if isinstance(c, QuantizedTensor) else c for c in chunks]
    assert torch.equal(torch.cat(values), tensor.dequantize())
    empty = tensor[experts:]
    assert empty.shape == (0, 32, 32) and not empty.numel()
    if isinstance(empty, QuantizedTensor):
        assert empty.stored_bytes == 0 and empty.dequantize().shape == (0, 32, 32)
        empty.copy_(torch.zeros(0, 32, 32))
        assert record_bytes(empty.records).shape == (0, record_bytes(tensor.records).shape[1])
        again = pickle.loads(pickle.dumps(empty))
        assert again.shape == (0, 32, 32) and again.columnwise


# Initial values -------------------------------------------------------------------------------------------------------


def test_three_tenths() -> None:
    """bf16 .30078125; alone in an MXFP8 block code 117, payload 320, .3125. The master starts at .30078125."""
    values = torch.full((1, 32, 32), 0.3, dtype=torch.bfloat16)
    tensor = mr.GroupedTensor.pack(values, mr.Quantizer(format=MXFP8()), keep_init=True)
    row = tensor.record("rowwise")
    assert row is not None and row.scale.unique().tolist() == [117]
    assert row.payload.view(torch.float8_e4m3fn).float().unique().tolist() == [320.0]
    assert tensor.dequantize().unique().tolist() == [0.3125]
    init = tensor.get_high_precision_init_val()
    assert init is not None and init.unique().tolist() == [0.30078125]
    optimizer = mr.optim.MasterWeights(torch.optim.SGD, [nn.Parameter(tensor)], lr=0.0)
    (master,) = optimizer._master.values()
    assert master.unique().tolist() == [0.30078125] and master.dtype == torch.float32
    assert tensor.get_high_precision_init_val() is None, "freed, in every alias"


KEPT: dict[str, Callable[[Any], Any]] = {
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "to dtype": lambda t: t.to(torch.float32),
    "to device": lambda t: t.to("cpu", copy=True),
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "parameter": nn.Parameter,
    "members": lambda t: mr.GroupedTensor.pack(t.members()),
    "split": lambda t: mr.GroupedTensor.pack([m for part in t.split(2) for m in part.members()]),
    "slice": lambda t: t[0:3],
}


@pytest.mark.parametrize("way", KEPT)
def test_initial_values_are_kept_through(way: str) -> None:
    tensor = made("mxfp8", keep_init=True)
    init = KEPT[way](tensor).get_high_precision_init_val()
    assert type(init) is Tensor and torch.equal(init, dense()) and not init.requires_grad
    again = mr.GroupedTensor.pack(init, tensor.quantizer)
    assert same_bytes(again, tensor), "quantizing them gives the weight"


def test_initial_values_are_a_copy_in_flat_order() -> None:
    values = dense()
    tensor = mr.GroupedTensor.pack(values, mr.Quantizer(format=MXFP8()), keep_init=True)
    values.zero_()
    init = tensor.get_high_precision_init_val()
    assert init is not None and init.is_contiguous() and torch.equal(init.view(-1), dense().view(-1))


def test_initial_values_of_a_part_are_its_own() -> None:
    tensor = made("mxfp8", keep_init=True)
    for part, expected in ((tensor[1:], dense()[1:]), (tensor[2], dense()[2]), (tensor.split(2)[1], dense()[2:])):
        init = part.get_high_precision_init_val()
        assert init is not None and torch.equal(init, expected)


def test_members_with_and_without_initial_values_do_not_mix() -> None:
    members = list(made("mxfp8", keep_init=True).members())
    members[1].clear_high_precision_init_val()
    with pytest.raises(RuntimeError, match=r"inconsistent high-precision initial values: expected all 3 .*, got 2"):
        mr.GroupedTensor.pack(members)
    for member in members:
        member.clear_high_precision_init_val()
    assert mr.GroupedTensor.pack(members).get_high_precision_init_val() is None


def test_members_that_differ_do_not_stack() -> None:
    members = [*made("mxfp8").members(), made("mxfp8 e5m2").members()[0]]
    with pytest.raises(ValueError, match="members must agree in shape, format, dtype and directions"):
        mr.GroupedTensor.pack(members)
    with pytest.raises(ValueError, match="members must agree"):
        mr.GroupedTensor.pack([made("mxfp8").members()[0], made("mxfp8", columnwise=False).members()[0]])


def test_values_written_later_are_the_initial_ones_until_they_are_cleared() -> None:
    """Construction writes more than once: empty, then reset_parameters, then a loaded checkpoint."""
    tensor = made("mxfp8", keep_init=True)
    tensor.copy_(dense(1).float())
    assert torch.equal(tensor.get_high_precision_init_val(), dense(1))  # pyright: ignore
    tensor.copy_(made("mxfp8", 2))
    assert tensor.get_high_precision_init_val() is None, "bytes came without any: the old ones would be wrong"
    tensor.copy_(dense(1))
    tensor.clear_high_precision_init_val()
    tensor.copy_(dense(2))
    assert tensor.get_high_precision_init_val() is None
    assert made("mxfp8").get_high_precision_init_val() is None


def test_what_is_kept_is_what_is_quantized() -> None:
    tensor = made("mxfp8", keep_init=True).to(torch.float16)
    tensor.copy_(dense(1, torch.float32))
    init = tensor.get_high_precision_init_val()
    assert init is not None and torch.equal(init, dense(1, torch.float16))
    assert_holds(tensor, init)


FLAT: dict[str, Callable[[Any], Any]] = {
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "to dtype": lambda t: t.to(torch.float32),
    "slice of all": lambda t: t[:],
    "parameter": nn.Parameter,
    "compiled": lambda t: torch.compile(lambda x: x.clone(), backend="aot_eager")(t),
}


@pytest.mark.parametrize("way", FLAT)
def test_the_flat_view_stays_flat(way: str) -> None:
    """By which FSDP2 remembers a shard; whoever else makes one gets its values in its shape."""
    tensor = made("mxfp8")
    flat = FLAT[way](tensor.view(-1))
    assert flat.shape == (tensor.numel(),) and torch.equal(
        flat.dequantize(), tensor.dequantize().flatten().to(flat.dtype)
    )
    assert (flat * 2).shape == torch.cat([flat]).shape == torch.empty_like(flat).shape == flat.shape
    for refused in (lambda: flat[:5], lambda: flat.split(2), lambda: flat.view(SHAPE), lambda: flat[0]):
        with pytest.raises(NotImplementedError, match="of a quantized tensor"):
            refused()


def test_inference_mode() -> None:
    """Aliases and copies as ever; a direction cannot go stale there either, and training goes on."""
    tensor = nn.Parameter(made("mxfp8", keep_init=True))
    with torch.inference_mode():
        alias, copied = tensor.detach(), tensor.clone()
        assert type(alias) is QuantizedGroupedTensor and same_bytes(copied, tensor)
        assert same_bytes(mr.GroupedTensor.pack(tensor.members()), tensor)
        copied.copy_(dense(1))
        assert_holds(copied, dense(1))
        twin = nn.ParameterDict({"w": tensor}).state_dict()["w"]
    assert same_bytes(twin, tensor) and not alias.is_inference()
    (tensor * torch.ones(SHAPE, dtype=torch.bfloat16)).sum().backward()
    assert tensor.grad is not None
    with torch.no_grad():
        alias.copy_(dense(2))
    assert_holds(tensor, dense(2))


# Saving ---------------------------------------------------------------------------------------------------------------


def test_a_copy_is_apart() -> None:
    tensor = made("mxfp8")
    before = tensor.dequantize()
    for twin in (copy.deepcopy(tensor), tensor.clone(), pickle.loads(pickle.dumps(tensor))):
        row = twin.record("rowwise")
        row.scale.add_(1)  # twice the values
        assert torch.equal(twin.dequantize(), before * 2) and torch.equal(tensor.dequantize(), before)


@pytest.mark.parametrize("usage", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_scales_and_usages_survive_a_file(name: str, usage: tuple[bool, bool]) -> None:
    weight = nn.Parameter(made(name, rowwise=usage[0], columnwise=usage[1]), requires_grad=False)
    weight.skip_backward_post_hook = True  # pyright: ignore[reportAttributeAccessIssue]
    buffer = io.BytesIO()
    torch.save({"w": weight}, buffer)
    for options in ({"weights_only": True}, {"weights_only": False}, {"map_location": "cpu"}):
        buffer.seek(0)
        loaded = torch.load(buffer, **options)["w"]
        assert type(loaded) is QuantizedGroupedTensor and isinstance(loaded, nn.Parameter)
        assert same_bytes(loaded, weight) and loaded.quantizer == weight.quantizer  # pyright: ignore
        assert loaded.skip_backward_post_hook and not loaded.requires_grad and loaded.dtype == torch.bfloat16


def test_gradients_and_attributes_go_along_a_deepcopy() -> None:
    weight = nn.Parameter(made("mxfp8"))
    weight.grad = torch.ones(SHAPE, dtype=torch.bfloat16)
    weight.label = ["a"]  # pyright: ignore[reportAttributeAccessIssue]
    first, second = copy.deepcopy([weight, weight])
    assert first is second and first.requires_grad and torch.equal(first.grad, weight.grad)
    first.label.append("b")
    assert weight.label == ["a"] and first.grad is not weight.grad  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", FORMATS)
def test_a_payload_without_its_scales_is_refused(name: str) -> None:
    tensor = made(name)
    tensors = tensor.records.tensors()
    for missing in [n for n in tensors if "scale" in n]:
        held = {n: t for n, t in tensors.items() if n != missing}
        with pytest.raises(ValueError, match=r"come with their scales, got a payload without|needs a tensor_scale"):
            records_of(held, tensor.quantizer, InitValues())


def test_scales_of_another_size_are_refused() -> None:
    tensors = made("mxfp8").records.tensors()
    tensors["row_scale"] = tensors["row_scale"][:, :64]
    with pytest.raises(ValueError, match=r"scale of mxfp8 must be torch\.uint8 of shape"):
        records_of(tensors, mr.Quantizer(format=MXFP8()), InitValues())


# What FSDP2 gathers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usage", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_one_record_of_bytes_an_expert(name: str, usage: tuple[bool, bool]) -> None:
    tensor = made(name, rowwise=usage[0], columnwise=usage[1])
    record_EB = record_bytes(tensor.records)
    assert record_EB.dtype == torch.uint8 and record_EB.shape[0] == 3 and record_EB.is_contiguous()
    parts = tensor.records.tensors()
    assert tensor.stored_bytes // 3 <= record_EB.shape[1] <= tensor.stored_bytes // 3 + 16 * len(parts)
    template = tensor.records.map(lambda t: t[:0], init=False)
    again = QuantizedGroupedTensor.wrap(gathered(record_EB, template), torch.bfloat16)
    assert same_bytes(again, tensor)
    record_EB.zero_()
    assert all(not t.any() for t in again.records.tensors().values()), "views: the gathered bytes are the only copy"


def test_shared_memory() -> None:
    tensor = made("mxfp8").share_memory_()
    assert all(t.is_shared() for t in tensor.records.tensors().values())
