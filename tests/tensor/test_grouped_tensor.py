"""The packed tensor by itself: what makes the same parameter again, what gives plain tensors, what is refused."""

# E local experts   F output rows of a member   D input columns of a member

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_runtime as mr

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def packed(requires_grad: bool = False, dtype: torch.dtype = torch.float32) -> mr.GroupedTensor:
    tensor = mr.GroupedTensor.pack(torch.randn(3, 4, 8).to(dtype))
    return tensor.requires_grad_(requires_grad)


def parameter(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(packed(dtype=dtype))


def saved_and_loaded(value: Any, **options: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, **options)


def same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_stacks_members_in_order(dtype: torch.dtype) -> None:
    members = [torch.full((2, 3), float(e)).to(dtype) for e in range(12)]
    tensor = mr.GroupedTensor.pack(members)
    assert type(tensor) is mr.GroupedTensor and tensor.shape == (12, 2, 3) and tensor.dtype == dtype
    assert tensor[:, 0, 0].tolist() == list(range(12))
    members[5].fill_(99.0)
    assert tensor[5].max() == 5.0, "a sequence is copied"
    assert not tensor.requires_grad and tensor.is_contiguous()


def test_pack_aliases_a_dense_tensor() -> None:
    dense_EFD = torch.randn(3, 4, 8, requires_grad=True)
    tensor = mr.GroupedTensor.pack(dense_EFD)
    assert same_storage(tensor, dense_EFD) and not tensor.requires_grad and tensor.is_leaf
    with torch.no_grad():
        dense_EFD.fill_(7.0)
    assert (tensor == 7.0).all()


def test_pack_of_strided_members_and_of_members_with_history() -> None:
    base = torch.randn(8, 4, requires_grad=True)
    tensor = mr.GroupedTensor.pack([base.t(), (base * 2).t()])
    assert tensor.is_contiguous() and not tensor.requires_grad
    assert torch.equal(tensor[1], base.detach().t() * 2)


def test_pack_on_meta_and_of_a_packed_tensor() -> None:
    assert mr.GroupedTensor.pack(torch.empty(3, 4, 8, device="meta")).is_meta
    tensor = packed()
    again = mr.GroupedTensor.pack(tensor)
    assert type(again) is mr.GroupedTensor and same_storage(again, tensor)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ([], ValueError, "needs at least one member, got none"),
        (torch.zeros(4, 8), ValueError, r"shape \(experts, rows, cols\), got \(4, 8\)"),
        (torch.zeros(1, 2, 3, 4), ValueError, r"shape \(experts, rows, cols\), got \(1, 2, 3, 4\)"),
        (torch.zeros(3, 8, 4).transpose(1, 2), ValueError, r"must be contiguous, got strides \(32, 1, 4\)"),
        (torch.zeros(3, 4, 8, dtype=torch.int8), TypeError, r"floating-point dtype, got torch\.int8"),
        (torch.zeros(3, 4, 8, dtype=torch.complex64), TypeError, r"floating-point dtype, got torch\.complex64"),
        ([torch.zeros(4)], ValueError, r"shape \(rows, cols\), member 0 has \(4,\)"),
        ([torch.zeros(2, 3), torch.zeros(3, 2)], ValueError, r"member 0 is \(2, 3\) .*, member 1 is \(3, 2\)"),
        ([torch.zeros(2, 3), torch.zeros(2, 3).half()], ValueError, r"member 0 is .*float32 .*, member 1 is .*float16"),
        ([torch.zeros(2, 3), torch.zeros(2, 3, device="meta")], ValueError, r"cpu, member 1 is .* meta"),
        ([torch.zeros(2, 3, dtype=torch.int64)], TypeError, r"floating-point dtype, got torch\.int64"),
    ],
)
def test_pack_refuses(source: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mr.GroupedTensor.pack(source)


def test_members_are_views_of_the_current_storage() -> None:
    tensor = packed()
    members = tensor.members()
    assert len(members) == 3 and all(type(m) is Tensor and m.shape == (4, 8) and not m.requires_grad for m in members)
    members[1].fill_(5.0)
    assert (tensor[1] == 5.0).all() and not (tensor[0] == 5.0).any()


def test_members_of_a_parameter_need_no_gradient_and_can_be_written() -> None:
    weight = parameter()
    weight.members()[2].zero_()
    assert (weight[2] == 0).all() and weight.requires_grad and weight.is_leaf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_dequantize_and_facts(dtype: torch.dtype) -> None:
    tensor = packed(dtype=dtype)
    assert type(tensor.plain()) is Tensor and same_storage(tensor.plain(), tensor)
    assert same_storage(tensor.dequantize(), tensor) and type(tensor.dequantize()) is Tensor
    other = tensor.dequantize(torch.float64)
    assert other.dtype == torch.float64 and torch.equal(other, tensor.plain().double())
    assert tensor.quantizer is None
    assert tensor.stored_bytes == 3 * 4 * 8 * tensor.element_size()
    assert repr(tensor) == f"GroupedTensor((3, 4, 8), {dtype}, cpu, requires_grad=False)"


SAME_AGAIN: dict[str, Callable[[Any], Any]] = {
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.detach().clone(),
    "clone contiguous": lambda t: t.detach().clone(memory_format=torch.contiguous_format),
    "to same": lambda t: t.detach().to(torch.float32),
    "to copy": lambda t: t.detach().to("cpu", copy=True),
    "to tensor": lambda t: t.detach().to(torch.zeros(1)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "torch.save": saved_and_loaded,
    "torch.save mmap": lambda t: saved_and_loaded(t, map_location="cpu"),
    "torch.save in a dict": lambda t: saved_and_loaded({"layer": {"weight": t}})["layer"]["weight"],
}


@pytest.mark.parametrize("way", SAME_AGAIN)
@pytest.mark.parametrize("make", [packed, parameter], ids=["tensor", "parameter"])
def test_the_same_parameter_again(make: Callable[[], Any], way: str) -> None:
    tensor = make()
    tensor.skip_backward_post_hook = True
    again = SAME_AGAIN[way](tensor)
    assert type(again) is mr.GroupedTensor and again.is_leaf
    assert torch.equal(again, tensor) and again.shape == tensor.shape and again.stride() == tensor.stride()
    assert again.skip_backward_post_hook is True
    assert len(again.members()) == 3
    keeps_role = way not in ("detach", "clone", "clone contiguous") and not way.startswith("to ")
    assert isinstance(again, nn.Parameter) == (isinstance(tensor, nn.Parameter) and keeps_role)
    assert again.requires_grad == (tensor.requires_grad and keeps_role)


def test_what_aliases_and_what_copies() -> None:
    tensor = packed()
    assert same_storage(tensor.detach(), tensor)
    assert same_storage(tensor.to(torch.float32), tensor), "nothing to convert: no copy"
    for way in ("clone", "to copy", "deepcopy", "pickle", "torch.save"):
        again = SAME_AGAIN[way](tensor)
        assert not same_storage(again, tensor), way
        again.mul_(2)
        assert not torch.equal(again, tensor), way


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_to_dtype(dtype: torch.dtype) -> None:
    tensor = packed()
    moved = tensor.to(dtype)
    assert type(moved) is mr.GroupedTensor and torch.equal(moved.plain(), tensor.plain().to(dtype))
    assert moved.dtype == dtype


def test_to_meta_keeps_the_class() -> None:
    moved = packed().to("meta")
    assert type(moved) is mr.GroupedTensor and moved.is_meta and moved.shape == (3, 4, 8)


def test_history_makes_plain_tensors_whose_gradient_comes_back() -> None:
    for function in (lambda w: w.clone(), lambda w: w.to(torch.float64), lambda w: w * 1, lambda w: w[:]):
        weight = parameter()
        result = function(weight)
        assert type(result) is Tensor and result.grad_fn is not None
        result.sum().backward()
        assert weight.grad is not None and torch.equal(weight.grad, torch.ones(3, 4, 8))


def test_deepcopy_takes_gradient_and_attributes_along_and_shares_inside_one_call() -> None:
    weight = parameter()
    weight.grad = torch.full((3, 4, 8), 2.0)
    weight.label = ["a"]
    first, second = copy.deepcopy([weight, weight])
    assert first is second and first is not weight
    assert first.grad is not weight.grad and torch.equal(first.grad, weight.grad)
    assert first.label == ["a"] and first.label is not weight.label
    first.label.append("b")
    first.grad.zero_()
    assert weight.label == ["a"] and weight.grad.max() == 2.0


def test_deepcopy_needs_a_leaf() -> None:
    aliased = torch.Tensor._make_subclass(mr.GroupedTensor, torch.zeros(3, 4, 8))
    aliased.requires_grad_()
    with torch.enable_grad():
        computed = aliased.view_as(aliased).as_subclass(mr.GroupedTensor)
    assert computed.grad_fn is not None
    with pytest.raises(RuntimeError, match="only leaf tensors can be deep-copied"):
        copy.deepcopy(computed)


def test_the_mark_is_an_attribute_of_the_class_and_belongs_to_one_tensor() -> None:
    assert mr.GroupedTensor.skip_backward_post_hook is False
    first, second = packed(), packed()
    first.skip_backward_post_hook = True
    assert second.skip_backward_post_hook is False and mr.GroupedTensor.skip_backward_post_hook is False


PIECES: dict[str, Callable[[Any], list[Tensor]]] = {
    "split": lambda w: list(w.split([1, 2])),
    "chunk": lambda w: list(w.chunk(2)),
    "tensor_split": lambda w: list(w.tensor_split(3)),
    "select": lambda w: [w.select(0, e) for e in range(3)],
    "index": lambda w: [w[0], w[1:]],
    "unbind": lambda w: list(w.unbind(0)),
    "narrow": lambda w: [w.narrow(0, 0, 1), w.narrow(0, 1, 2)],
    "iterate": lambda w: list(w),
}


@pytest.mark.parametrize("how", PIECES)
def test_pieces_are_views_with_history(how: str) -> None:
    weight = parameter()
    pieces = PIECES[how](weight)
    assert all(same_storage(piece, weight) and type(piece) is Tensor for piece in pieces)
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), weight.flatten())
    sum((piece * (i + 1)).sum() for i, piece in enumerate(pieces)).backward()
    assert weight.grad is not None and type(weight.grad) is not nn.Parameter
    expected = torch.cat([torch.full((piece.numel(),), i + 1.0) for i, piece in enumerate(pieces)])
    assert torch.equal(weight.grad.flatten(), expected)


def test_in_place_initialization_keeps_the_parameter() -> None:
    weight = parameter()
    for initialize in (nn.init.kaiming_uniform_, nn.init.zeros_, nn.init.orthogonal_, nn.init.trunc_normal_):
        initialize(weight)
        assert type(weight) is mr.GroupedTensor and weight.requires_grad and weight.is_leaf
    assert weight.count_nonzero() > 90


def test_copy_from_any_dtype_and_shape_mismatch() -> None:
    weight = parameter(torch.bfloat16)
    values = torch.randn(3, 4, 8, dtype=torch.float64)
    with torch.no_grad():
        weight.copy_(values)
    assert torch.equal(weight.members()[2], values[2].bfloat16())
    with pytest.raises(RuntimeError), torch.no_grad():
        weight.copy_(torch.zeros(3, 8, 4))


def test_hooks_and_gradients_are_those_of_any_parameter() -> None:
    weight, seen = parameter(), []
    weight.register_hook(lambda gradient: gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append((type(p), p.grad.clone())))
    for _ in range(2):
        (weight * 3).sum().backward()
    assert [float(gradient.max()) for _, gradient in seen] == [6.0, 12.0]
    assert weight.grad is not None and weight.grad.shape == (3, 4, 8)
