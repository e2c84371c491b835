"""QuantizedTensor: a weight whose storage is a number format's bytes, in one or both directions.

It has the shape of the weight and a nominal high-precision dtype, the one that gradients have and that `dequantize()`
gives. Storage only: a layer reads its records and multiplies by them, it never multiplies through this class.
"""

# E members   R rows   C columns

import copy
import dataclasses
import hashlib
import weakref
from contextlib import nullcontext
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from moe_runtime import formats
from moe_runtime.formats import Direction, Quantized
from moe_runtime.kernels.quantize import DTYPES
from moe_runtime.tensor.ops import dispatch
from moe_runtime.tensor.quantizer import Quantizer
from moe_runtime.tensor.storage import DIRECTIONS, InitValues, Records, records_of

__all__ = ["QuantizedTensor", "rebuild_quantized"]

_FORMATS = (formats.Float8, formats.FP8Block, formats.MXFP8, formats.MXFP4, formats.NVFP4)


class _Held:
    """What a tensor and its aliases share: a direction that one of them adds or drops is there, or gone, for all.

    whole  what the tensor is a part of, as long as anybody can read that
    """

    __slots__ = ("__weakref__", "records", "whole")

    def __init__(self, records: Records, whole: "_Held | None" = None) -> None:
        self.records = records
        self.whole = None if whole is None else weakref.ref(whole)


class QuantizedTensor(Tensor):
    """(rows, cols) quantized; `GroupedTensor` is the same of (E, rows, cols). Made by `quantized`."""

    _held: _Held
    skip_backward_post_hook: bool = False

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def wrap(
        cls, records: Records, dtype: torch.dtype, *, requires_grad: bool = False, shape: tuple[int, ...] | None = None
    ) -> Self:
        """The tensor whose storage `records` are."""
        payload = records.any.payload
        # Of an ordinary tensor an ordinary alias, in inference mode too, where torch cannot alias it otherwise.
        with torch.inference_mode(False) if _is_ordinary_inside(payload) else nullcontext():
            self = torch.Tensor._make_wrapper_subclass(
                cls,
                records.any.shape if shape is None else shape,
                dtype=dtype,
                device=payload.device,
                requires_grad=requires_grad,
            )
        self._held = _Held(records)
        return self

    @classmethod
    def quantized(
        cls, x_ERC: Tensor, quantizer: Quantizer, *, keep_init: bool = False, dtype: torch.dtype | None = None
    ) -> Self:
        """The bytes of high-precision values; on meta, of none.

        quantizer  copied: the tensor owns its own
        keep_init  keep the values too, for masters to start at; on meta, those that are written first
        """
        dtype, x_ERC = x_ERC.dtype if dtype is None else dtype, x_ERC.detach()
        quantizer = quantizer.copy()
        if x_ERC.is_meta:
            return cls.wrap(_on_meta(x_ERC, quantizer, InitValues(wanted=keep_init)), dtype)
        row, column = quantizer.quantize(x_ERC if x_ERC.dtype in DTYPES else x_ERC.float())
        init = InitValues(wanted=True, value=x_ERC.to(dtype, copy=True)) if keep_init else InitValues()
        return cls.wrap(Records(row, column, quantizer, init), dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    # ---- facts ----

    @property
    def records(self) -> Records:
        """The stored bytes."""
        return self.__dict__["_held"].records

    @records.setter
    def records(self, records: Records) -> None:
        self._held.records = records

    @property
    def quantizer(self) -> Quantizer:
        """This tensor's own quantizer."""
        return self.records.quantizer

    @property
    def rowwise(self) -> bool:
        """Whether the rowwise direction is stored: what fprop reads."""
        return self.records.row is not None

    @property
    def columnwise(self) -> bool:
        """Whether the columnwise direction is stored: what a quantized dgrad reads."""
        return self.records.column is not None

    def record(self, direction: Direction) -> Quantized | None:
        """The bytes of a direction, None where it is not stored. They alias the storage."""
        return self.records.record(direction)

    @property
    def stored_bytes(self) -> int:
        """Bytes held for payloads and scales; initial values aside."""
        return self.records.stored_bytes

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of the nominal dtype, or of `dtype`."""
        return self.records.dequantize(self.dtype if dtype is None else dtype).view(self.shape)

    # ---- directions and values ----

    def set_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Store or drop directions. None changes nothing, False drops the bytes.

        True makes them from the other direction; raises ValueError where that does not determine them.
        """
        self.records = self.records.with_usage(rowwise, columnwise)

    def write(self, source: Tensor) -> None:
        """Take new values: every direction that is stored or wanted is refreshed, or nothing is and it raises.

        source  high-precision values, which are quantized; or a quantized tensor, whose bytes are copied where the
                format is the same, else whose values are quantized
        """
        self._check_whole()
        if tuple(source.shape) != tuple(self.shape):
            source = source.expand(self.shape)
        if isinstance(source, QuantizedTensor) and source.quantizer.format == self.quantizer.format:
            self.records = self.records.copied(source.records)
            return
        values = source.dequantize(torch.float32) if isinstance(source, QuantizedTensor) else source
        self.records = self.records.written(values, self.dtype)

    def _check_whole(self) -> None:
        """RuntimeError where a write would leave a direction of what this is a part of as it was."""
        whole = self._held.whole and self._held.whole()
        while whole is not None:
            stale = [d for d in DIRECTIONS if whole.records.record(d) is not None and self.record(d) is None]
            if stale:
                raise RuntimeError(
                    f"this part of a quantized tensor does not hold the {' and '.join(stale)} bytes that the whole "
                    "holds, which a write would leave stale: take the part again after set_usage, or write the whole"
                )
            whole = whole.whole and whole.whole()

    def get_high_precision_init_val(self) -> Tensor | None:
        """The values from which this was first quantized, of the nominal dtype; None where they are not kept."""
        return self.records.init.value

    def clear_high_precision_init_val(self) -> None:
        """Free them."""
        r = self.records
        self.records = Records(r.row, r.column, r.quantizer)

    # ---- the same parameter again ----

    def like(
        self, records: Records, *, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None
    ) -> "QuantizedTensor":
        """A tensor of this kind over other records, without history; one expert of a stack is a plain matrix."""
        if shape is None and self._is_flat:
            shape = (prod(records.any.shape),)
        cls = type(self) if len(records.any.shape) == len(self.records.any.shape) else QuantizedTensor
        return cls.wrap(records, self.dtype if dtype is None else dtype, shape=shape)

    @property
    def _is_flat(self) -> bool:
        """Whether this is the one-dimensional view by which FSDP2 remembers a shard."""
        return self.dim() == 1

    def alias(self) -> "QuantizedTensor":
        """A tensor without history over the same storage, whatever becomes of it."""
        new = type(self).wrap(self.records, self.dtype, shape=tuple(self.shape))
        new._held = self._held
        return new

    def part(self, records: Records, *, shape: tuple[int, ...] | None = None) -> "QuantizedTensor":
        """A tensor without history over a part of the same storage."""
        new = self.like(records, shape=shape)
        new._held.whole = weakref.ref(self._held)
        return new

    def _with_attributes(self, new: "QuantizedTensor") -> "QuantizedTensor":
        for name, held in self.__dict__.items():
            if name not in ("_held", "_is_param"):
                setattr(new, name, held)
        return new

    def detach(self) -> "QuantizedTensor":
        """An alias without history, of the same class."""
        return self._with_attributes(Tensor.detach(self))  # pyright: ignore[reportArgumentType]

    def clone(self, *, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        """A copy of the bytes."""
        return Tensor.clone(self, memory_format=memory_format)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As `Tensor.to`: the bytes elsewhere, or another nominal dtype. `dequantize` gives values."""
        return Tensor.to(self, *args, **kwargs)

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """An alias without history."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(
            "the .data of a quantized tensor cannot be replaced: its bytes would keep the old values; use copy_()"
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.records.tensors()), (self.records.quantizer.copy(), self.dtype, self.records.init.wanted)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> "QuantizedTensor":
        quantizer, dtype, wanted = meta
        shape = tuple(size) if len(size) == 1 else None
        return cls.wrap(records_of(inner, quantizer, InitValues(wanted=wanted)), dtype, shape=shape)

    def __getattr__(self, name: str) -> Any:
        # row_payload and the like, for `__tensor_flatten__`.
        held = self.__dict__.get("_held")
        if held is not None and name.startswith(("row_", "column_")):
            tensors = held.records.tensors()
            if name in tensors:
                return tensors[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _stable_hash_for_caching(self) -> str:
        """For torch.compile's cache on disk: what a graph is specialized on, the same in every process."""
        names, meta = self.__tensor_flatten__()
        described = (type(self).__qualname__, tuple(self.shape), str(self.device), self.requires_grad, names, meta)
        return hashlib.sha256(repr(described).encode()).hexdigest()

    def share_memory_(self) -> Self:
        """Move the bytes to shared memory, for other processes."""
        for tensor in self.records.tensors().values():
            tensor.share_memory_()
        return self

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("a quantized tensor has no buffer of values to share; dequantize() gives the values")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return rebuild_quantized, (type(self), _state_of(self), self.requires_grad, _plain_attributes(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            return memo[id(self)]
        if self.grad_fn is not None:
            raise RuntimeError("only leaf tensors can be deep-copied; detach this tensor first")
        records = self.records.map(lambda t: t.detach().clone())
        new = type(self).wrap(records, self.dtype, requires_grad=self.requires_grad, shape=tuple(self.shape))
        for name, held in copy.deepcopy(_plain_attributes(self), memo).items():
            setattr(new, name, held)
        if self.grad is not None:
            new.grad = self.grad.clone()
        memo[id(self)] = new
        return new  # pyright: ignore[reportReturnType]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        directions = " and ".join(name for name in ("rowwise", "columnwise") if getattr(self, name))
        return (
            f"{type(self).__name__}({tuple(self.shape)}, {self.quantizer.format.name} {directions}, {self.dtype}, "
            f"{self.device}, requires_grad={self.requires_grad})"
        )


def _is_ordinary_inside(tensor: Tensor) -> bool:
    return torch.is_inference_mode_enabled() and not tensor.is_inference()


def _on_meta(x_ERC: Tensor, quantizer: Quantizer, init: InitValues) -> Records:
    fmt, made = quantizer.format, {}
    fmt.check_shape(x_ERC.shape, rowwise=quantizer.rowwise, columnwise=quantizer.columnwise)
    for direction, prefix in DIRECTIONS.items():
        if not getattr(quantizer, direction):
            continue
        made[f"{prefix}_payload"] = x_ERC.new_empty(fmt.payload_shape(x_ERC.shape, direction), dtype=fmt.payload_dtype)
        if not (isinstance(fmt, formats.Float8) and "row_scale" in made):
            made[f"{prefix}_scale"] = x_ERC.new_empty(fmt.scale_shape(x_ERC.shape, direction), dtype=fmt.scale_dtype)
        if fmt.has_tensor_scale:
            made[f"{prefix}_tensor_scale"] = x_ERC.new_empty(x_ERC.shape[:-2], dtype=torch.float32)
    return records_of(made, quantizer, init)


def _plain_attributes(x: Tensor) -> dict[str, Any]:
    return {name: held for name, held in x.__dict__.items() if name != "_held"}


def _state_of(x: QuantizedTensor) -> dict[str, Any]:
    """Plain values and tensors only, which `torch.load(weights_only=True)` reads."""
    fmt, q = x.quantizer.format, x.quantizer
    options = {field.name: getattr(fmt, field.name) for field in dataclasses.fields(fmt)}  # pyright: ignore[reportArgumentType]
    return {
        "tensors": {name: t.detach() for name, t in x.records.tensors().items()},
        "format": fmt.name,
        "options": options,
        "usage": (q.rowwise, q.columnwise),
        "dtype": x.dtype,
        "shape": tuple(x.shape),
        "init": (x.records.init.wanted, x.records.init.value),
    }


def rebuild_quantized(
    cls: type[QuantizedTensor], state: dict[str, Any], requires_grad: bool, attributes: dict[str, Any]
) -> QuantizedTensor:
    """Inverse of pickling. ValueError for a format that is not known, or bytes that do not belong together."""
    formats_by_name = {fmt.name: fmt for fmt in _FORMATS}
    if state["format"] not in formats_by_name:
        raise ValueError(f"expected a format among {', '.join(sorted(formats_by_name))}, got {state['format']!r}")
    rowwise, columnwise = state["usage"]
    fmt = formats_by_name[state["format"]](**state["options"])
    wanted, value = state["init"]
    quantizer = Quantizer(format=fmt, rowwise=rowwise, columnwise=columnwise)
    records = records_of(state["tensors"], quantizer, InitValues(wanted, value))
    new = cls.wrap(records, state["dtype"], requires_grad=requires_grad, shape=state["shape"])
    for name, held in attributes.items():
        setattr(new, name, held)
    return new
