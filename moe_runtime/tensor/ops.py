"""The one table of what torch does to a quantized tensor: every ATen op that has a meaning for stored bytes.

    storage      detach, clone, to, empty_like, ...   the same class over the same tensors or others
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


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What `QuantizedTensor.__torch_dispatch__` does."""
    handler = _TABLE.get(func)
    if handler is not None:
        return handler(func, *args, **kwargs)
    if any(_holds_quantized(argument) for argument in _written(func._schema, args, kwargs)):
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


def _written(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the op changes in place: positional, or named as in `out=`."""
    given = {spec.name: argument for spec, argument in zip(schema.arguments, args, strict=False)} | kwargs
    return [given.get(spec.name) for spec in schema.arguments if spec.alias_info and spec.alias_info.is_write]


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


def _is_whole(x: Any, start: Any, end: Any, step: int) -> bool:
    return start in (None, 0) and (end is None or end >= x.shape[0]) and step == 1


# ---- storage: the same class over other tensors ----


def _alias(func: Any, x: Any) -> Any:
    return x.alias()


def _clone(func: Any, x: Any, *, memory_format: torch.memory_format | None = None) -> Any:
    return x.like(x.records.map(lambda t: t.clone(memory_format=torch.contiguous_format)))


def _to_copy(func: Any, x: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    """Another device moves the bytes; another dtype is what they dequantize to from then on."""
    if dtype is not None and not dtype.is_floating_point:
        return func(x.dequantize(), dtype=dtype, device=device)
    non_blocking = bool(options.get("non_blocking", False))
    return x.like(x.records.map(lambda t: t.to(device, non_blocking=non_blocking, copy=True)), dtype=dtype)


def _empty_like(func: Any, x: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    """Uninitialized bytes: how a meta parameter becomes real."""
    return x.like(x.records.map(lambda t: torch.empty_like(t, device=device), init=False), dtype=dtype)


def _filled_like(func: Any, x: Any, *args: Any, **options: Any) -> Tensor:
    """A plain tensor: gradients and optimizer state are in high precision."""
    options.pop("memory_format", None)
    return func(torch.empty(x.shape, dtype=x.dtype, device=x.device), *args, **options)


def _new(func: Any, x: Any, size: Sequence[int], **options: Any) -> Any:
    """The same class where only the number of experts differs, as FSDP2 asks for; else a plain tensor."""
    if x.dim() == 3 and len(size) == 3 and tuple(size[1:]) == tuple(x.shape[1:]) and options.get("dtype") is None:
        device = options.get("device") or x.device
        return x.like(x.records.map(lambda t: t.new_zeros((size[0], *t.shape[1:]), device=device)))
    return func(torch.empty(0, dtype=x.dtype, device=x.device), size, **options)


def _pin_memory(func: Any, x: Any, device: Any = None) -> Any:
    return x.like(x.records.map(lambda t: t.pin_memory()))


def _is_pinned(func: Any, x: Any, device: Any = None) -> bool:
    return all(t.is_pinned() for t in x.records.tensors().values())


def _same_geometry(func: Any, x: Any, size: Sequence[int], *rest: Any, **options: Any) -> Any:
    """A view of the tensor's own geometry, and the flat one by which FSDP2 remembers a shard."""
    size = tuple(size)
    if func is aten.expand.default and len(size) == x.dim():
        size = tuple(have if want == -1 else want for want, have in zip(size, x.shape, strict=True))
    if size == tuple(x.shape) and (func is not aten.as_strided.default or tuple(rest[0]) == x.stride()):
        return _alias(func, x)
    if size in ((-1,), (x.numel(),)) and func is aten.view.default:
        return x.part(x.records.map(lambda t: t.detach(), init=False), shape=(x.numel(),))
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


def _split(func: Any, x: Any, *args: Any) -> Any:
    num_sizes = 0 if func is aten.unbind.int else 1
    _of_experts(func, x, args[num_sizes] if len(args) > num_sizes else 0)
    sizes = args[:num_sizes]
    parts = {name: func(t, *sizes) for name, t in x.records.tensors().items()}
    init, count = x.records.init, len(next(iter(parts.values())))
    values = [None] * count if init.value is None else func(init.value, *sizes)
    return tuple(
        x.part(
            x.records.with_tensors({name: pieces[i] for name, pieces in parts.items()}, replace(init, value=values[i]))
        )
        for i in range(count)
    )


def _slice(func: Any, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if dim in (0, -x.dim()) and _is_whole(x, start, end, step):
        return _alias(func, x)
    _of_experts(func, x, dim)
    return x.part(x.records.map(lambda t: func(t, 0, start, end, step)))


def _pad(func: Any, x: Any, pad: Sequence[int], value: float = 0) -> Any:
    """Of `distribute_tensor`, before ranks communicate: refused on each of them."""
    raise NotImplementedError(
        "a quantized tensor is not padded, and shards take whole experts: expected a number of experts that the ranks "
        f"divide, got {x.shape[0]} in one shard and more in another"
    )


def _select(func: Any, x: Any, dim: int, index: int) -> Any:
    _of_experts(func, x, dim)
    return x.part(x.records.map(lambda t: func(t, 0, index)))


# ---- writing ----


def _copy_(func: Any, to: Any, source: Any, non_blocking: bool = False) -> Any:
    if not _is_quantized(to):
        return func(to, source.dequantize(to.dtype if to.dtype.is_floating_point else None), non_blocking)
    to.write(source)
    return to


def _zero_(func: Any, x: Any) -> Any:
    x.write(torch.zeros(x.shape, dtype=x.dtype, device=x.device))
    return x


# ---- collectives: on every tensor of the records ----


def _all_gather(func: Any, x: Any, group_size: int, group_name: str) -> Any:
    """Waited for here: what torch wraps a plain result in, to wait when it is read, would not see its bytes read."""
    started = x.records.map(lambda t: func(t.contiguous(), group_size, group_name), init=False)
    return x.like(started.map(c10d.wait_tensor))


def _broadcast_(func: Any, tensors: Any, *args: Any) -> Any:
    *first, last = [t for x in tensors for t in (x.records.tensors().values() if _is_quantized(x) else (x,))]
    for tensor in first:
        func([tensor], *args)[1].wait()
    return tensors, func([last], *args)[1]


def _scatter_(func: Any, outputs: Any, inputs: Any, *args: Any) -> Any:
    """Of `distribute_tensor`: each tensor of the records by itself, in the order that all ranks have in common."""
    (to,), lists = outputs, inputs or [[]]
    works = []
    for name, tensor in to.records.tensors().items():
        pieces = [given.records.tensors()[name].contiguous() for given in lists[0]]
        works.append(func([tensor], [pieces] if pieces else [], *args)[1])
    for work in works[:-1]:
        work.wait()
    return outputs, works[-1]


def _wait(func: Any, x: Any) -> Any:
    return x.like(x.records.map(lambda t: func(t), init=False))


_TABLE: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    # Newer torch wraps what a collective gives by an op, older torch in a class of its own.
    **({c10d._wrap_tensor_autograd.default: _alias} if hasattr(c10d, "_wrap_tensor_autograd") else {}),
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty_like,
    aten.zeros_like.default: _filled_like,
    aten.ones_like.default: _filled_like,
    aten.full_like.default: _filled_like,
    aten.rand_like.default: _filled_like,
    aten.randn_like.default: _filled_like,
    aten.new_zeros.default: _new,
    aten.new_empty.default: _new,
    aten._pin_memory.default: _pin_memory,
    aten.is_pinned.default: _is_pinned,
    aten.view.default: _same_geometry,
    aten._unsafe_view.default: _same_geometry,
    aten.as_strided.default: _same_geometry,
    aten.expand.default: _same_geometry,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _split,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.constant_pad_nd.default: _pad,
    aten.copy_.default: _copy_,
    aten.zero_.default: _zero_,
    c10d.all_gather_into_tensor.default: _all_gather,
    torch.ops.c10d.broadcast_.default: _broadcast_,
    torch.ops.c10d.scatter_.default: _scatter_,
    c10d.wait_tensor.default: _wait,
}
