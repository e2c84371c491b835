"""The one table of what torch does to a quantized tensor: every ATen op that has a meaning for stored bytes.

    storage      detach, clone, to, empty_like, ...   the same class over other tensors
    experts      split, slice, select, unbind, dim 0   the same records of fewer experts
    writing      copy_, zero_                          quantizes, or copies bytes
    values       anything else that neither views nor writes: computed from the dequantized values, a plain tensor

An op that views (transpose, reshape) or writes (mul_, add_) and has no entry is refused with a sentence, so nothing is
ever applied to the one copy and not to the other.
"""

# E members   R rows   C columns

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed._functional_collectives  # defines the collectives of the table
from torch import Tensor
from torch.utils._pytree import tree_map

from moe_runtime.tensor.storage import Records

__all__ = ["dispatch"]

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

_TABLE: dict[Any, Callable[..., Any]] = {}


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What `QuantizedTensor.__torch_dispatch__` does."""
    handler = _TABLE.get(func)
    if handler is not None:
        return handler(func, *args, **kwargs)
    schema = func._schema
    writes = [bool(spec.alias_info and spec.alias_info.is_write) for spec in schema.arguments]
    written = [argument for argument, write in zip(args, writes, strict=False) if write]
    if any(_holds_quantized(a) for a in written):
        raise NotImplementedError(
            f"{_name(func)} would change a quantized tensor in place, and rounding would undo it; step fp32 masters "
            "(mr.optim.MasterWeights), or write new values with copy_"
        )
    if func.namespace in ("c10d", "_c10d_functional"):
        raise NotImplementedError(
            f"{func} would communicate the values of a quantized tensor and drop the result; communicate its bytes "
            "(records.tensors()), or dequantize() first"
        )
    if func.is_view:
        raise NotImplementedError(
            f"{_name(func)} has no meaning for quantized bytes: expected an op on whole experts (dim 0), "
            f"got {_name(func)}; dequantize() gives the values"
        )
    args, kwargs = tree_map(_values, (tuple(args), kwargs))
    return func(*args, **kwargs)


def _name(func: Any) -> str:
    return str(func).removeprefix("aten.").partition(".")[0]


def _holds_quantized(argument: Any) -> bool:
    if isinstance(argument, list | tuple):
        return any(_holds_quantized(item) for item in argument)
    return _is_quantized(argument)


def _is_quantized(x: Any) -> bool:
    return isinstance(getattr(x, "records", None), Records)


def _values(x: Any) -> Any:
    return x.dequantize() if _is_quantized(x) else x


def _implements(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        _TABLE.update(dict.fromkeys(ops, handler))
        return handler

    return register


# ---- storage: the same class over other tensors ----


@_implements(aten.detach.default, aten.alias.default, c10d._wrap_tensor_autograd.default)
def _alias(func: Any, x: Any) -> Any:
    return x.like(x.records.map(lambda t: t.detach()))


@_implements(aten.clone.default)
def _clone(func: Any, x: Any, *, memory_format: torch.memory_format | None = None) -> Any:
    return x.like(x.records.map(lambda t: t.clone(memory_format=torch.contiguous_format)))


@_implements(aten._to_copy.default)
def _to_copy(func: Any, x: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    """Another device moves the bytes; another dtype is what they dequantize to from then on."""
    if dtype is not None and not dtype.is_floating_point:
        return func(x.dequantize(), dtype=dtype, device=device)
    non_blocking = bool(options.get("non_blocking", False))
    return x.like(x.records.map(lambda t: t.to(device, non_blocking=non_blocking, copy=True)), dtype=dtype)


@_implements(aten.empty_like.default)
def _empty_like(func: Any, x: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    """Uninitialized bytes: how a meta parameter becomes real."""
    return x.like(x.records.map(lambda t: torch.empty_like(t, device=device), init=False), dtype=dtype)


@_implements(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
)
def _filled_like(func: Any, x: Any, *args: Any, **options: Any) -> Tensor:
    """A plain tensor: gradients and optimizer state are in high precision."""
    options.pop("memory_format", None)
    return func(torch.empty(x.shape, dtype=x.dtype, device=x.device), *args, **options)


@_implements(aten.new_zeros.default, aten.new_empty.default)
def _new(func: Any, x: Any, size: Sequence[int], **options: Any) -> Any:
    """The same class where only the number of experts differs, as FSDP2 asks for; else a plain tensor."""
    if x.dim() == 3 and len(size) == 3 and tuple(size[1:]) == tuple(x.shape[1:]) and options.get("dtype") is None:
        device = options.get("device") or x.device
        return x.like(x.records.map(lambda t: t.new_zeros((size[0], *t.shape[1:]), device=device)))
    return func(torch.empty(0, dtype=x.dtype, device=x.device), size, **options)


@_implements(aten._pin_memory.default)
def _pin_memory(func: Any, x: Any, device: Any = None) -> Any:
    return x.like(x.records.map(lambda t: t.pin_memory()))


@_implements(aten.is_pinned.default)
def _is_pinned(func: Any, x: Any, device: Any = None) -> bool:
    return all(t.is_pinned() for t in x.records.tensors().values())


@_implements(aten.view.default, aten._unsafe_view.default, aten.as_strided.default, aten.expand.default)
def _same_geometry(func: Any, x: Any, size: Sequence[int], *rest: Any, **options: Any) -> Any:
    """A view of the tensor's own geometry, and the flat one by which FSDP2 remembers a shard."""
    size = tuple(size)
    if func is aten.expand.default:
        size = tuple(have if want == -1 else want for want, have in zip(size, x.shape, strict=False))
    if size == tuple(x.shape) and (func is not aten.as_strided.default or tuple(rest[0]) == x.stride()):
        return _alias(func, x)
    if size in ((-1,), (x.numel(),)) and func is aten.view.default:
        return x.like(x.records.map(lambda t: t.detach(), init=False), shape=(x.numel(),))
    raise NotImplementedError(
        f"{_name(func)} of a quantized tensor keeps its shape {tuple(x.shape)}, got {size}; "
        "dequantize() gives the values"
    )


# ---- experts: the same records of fewer of them ----


def _of_experts(func: Any, x: Any, dim: int) -> None:
    if x.dim() != 3 or dim not in (0, -3):
        raise NotImplementedError(
            f"{_name(func)} of a quantized tensor takes whole experts: expected dim 0 of (E, rows, cols), "
            f"got dim {dim} of {tuple(x.shape)}; dequantize() gives the values"
        )


@_implements(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
def _split(func: Any, x: Any, *args: Any) -> Any:
    num_sizes = 0 if func is aten.unbind.int else 1
    _of_experts(func, x, args[num_sizes] if len(args) > num_sizes else 0)
    sizes = args[:num_sizes]
    parts = {name: func(t, *sizes) for name, t in x.records.tensors().items()}
    init, count = x.records.init, len(next(iter(parts.values())))
    values = [None] * count if init.value is None else func(init.value, *sizes)
    return tuple(
        x.like(
            x.records.with_tensors({name: pieces[i] for name, pieces in parts.items()}, replace(init, value=values[i]))
        )
        for i in range(count)
    )


@_implements(aten.slice.Tensor)
def _slice(func: Any, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if x.dim() == 1 or (x.dim() != 3 and dim == 0 and start in (None, 0) and (end is None or end >= x.shape[0])):
        return _alias(func, x)
    _of_experts(func, x, dim)
    return x.like(x.records.map(lambda t: func(t, 0, start, end, step)))


@_implements(aten.select.int)
def _select(func: Any, x: Any, dim: int, index: int) -> Any:
    _of_experts(func, x, dim)
    return x.like(x.records.map(lambda t: func(t, 0, index)))


# ---- writing ----


@_implements(aten.copy_.default)
def _copy_(func: Any, to: Any, source: Any, non_blocking: bool = False) -> Any:
    if not _is_quantized(to):
        return func(to, source.dequantize(to.dtype if to.dtype.is_floating_point else None), non_blocking)
    to.write(source)
    return to


@_implements(aten.zero_.default)
def _zero_(func: Any, x: Any) -> Any:
    x.write(torch.zeros(x.shape, dtype=x.dtype, device=x.device))
    return x


# ---- collectives: on every tensor of the records ----


@_implements(c10d.all_gather_into_tensor.default)
def _all_gather(func: Any, x: Any, group_size: int, group_name: str) -> Any:
    return x.like(x.records.map(lambda t: func(t.contiguous(), group_size, group_name), init=False))


@_implements(torch.ops.c10d.broadcast_.default)
def _broadcast_(func: Any, tensors: Any, *args: Any) -> Any:
    *first, last = [t for x in tensors for t in (x.records.tensors().values() if _is_quantized(x) else (x,))]
    for tensor in first:
        func([tensor], *args)[1].wait()
    return tensors, func([last], *args)[1]


@_implements(c10d.wait_tensor.default)
def _wait(func: Any, x: Any) -> Any:
    return x.like(x.records.map(lambda t: func(t), init=False))
