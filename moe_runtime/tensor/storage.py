"""What a quantized tensor holds: one record a direction, a quantizer of its own, and maybe the values it began with.

The tensors of the records are named row_payload, row_scale, row_tensor_scale, column_payload, ...; each has the members
as dim 0, so what shards the parameter by experts shards each of them. A scale that both directions share (Float8) is
one tensor, under its row's name.
"""

# E members   R rows   C columns

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moe_runtime.formats import Direction, Float8, Quantized
from moe_runtime.formats.derive import turned
from moe_runtime.kernels.dequantize import dequantize
from moe_runtime.kernels.quantize import DTYPES, quantize, quantize_into
from moe_runtime.tensor.quantizer import Quantizer

__all__ = ["DIRECTIONS", "InitValues", "Records", "records_of"]

DIRECTIONS: dict[Direction, str] = {"rowwise": "row", "columnwise": "column"}
_PARTS = ("payload", "scale", "tensor_scale")


@dataclass(frozen=True, slots=True)
class InitValues:
    """The high-precision values from which a tensor was quantized. `wanted`: kept whenever they are written."""

    wanted: bool = False
    value: Tensor | None = None

    def map(self, fn: Callable[[Tensor], Tensor]) -> "InitValues":
        """The same of the tensor that `fn` makes."""
        return self if self.value is None else replace(self, value=fn(self.value))

    def taking(self, value: Tensor | None) -> "InitValues":
        """A copy of `value`, in place of the one held where there is one; None: what was held describes nothing now."""
        if value is None or self.value is None or self.value.dtype != value.dtype:
            return replace(self, value=None if value is None else value.detach().clone())
        self.value.copy_(value)
        return self


@dataclass(frozen=True, slots=True)
class Records:
    """The bytes of a quantized tensor in one or both directions, and the quantizer that writes them."""

    row: Quantized | None
    column: Quantized | None
    quantizer: Quantizer
    init: InitValues = field(default_factory=InitValues)

    def __post_init__(self) -> None:
        stored = [q for q in (self.row, self.column) if q is not None]
        if not stored:
            raise ValueError("a quantized tensor stores rowwise or columnwise bytes, got neither")
        for q, direction in ((self.row, "rowwise"), (self.column, "columnwise")):
            if q is not None and (q.direction != direction or q.format != self.quantizer.format):
                raise ValueError(
                    f"expected a {direction} record of {self.quantizer.format}, got a {q.direction} one of {q.format}"
                )
        if len(stored) == 2 and stored[0].shape != stored[1].shape:
            raise ValueError(f"both directions must have one shape, got {stored[0].shape} and {stored[1].shape}")

    @property
    def any(self) -> Quantized:
        """A record that is stored, the rowwise one if it is."""
        record = self.row if self.row is not None else self.column
        assert record is not None
        return record

    def record(self, direction: Direction) -> Quantized | None:
        """The record of a direction, None where it is not stored."""
        return self.row if direction == "rowwise" else self.column

    def tensors(self) -> dict[str, Tensor]:
        """Every distinct tensor by name."""
        named: dict[str, Tensor] = {}
        for direction, prefix in DIRECTIONS.items():
            q = self.record(direction)
            for part in _PARTS if q is not None else ():
                tensor = getattr(q, part)
                if tensor is not None and not (part == "scale" and tensor is named.get("row_scale")):
                    named[f"{prefix}_{part}"] = tensor
        return named

    def with_tensors(self, tensors: Mapping[str, Tensor], init: InitValues | None = None) -> "Records":
        """The same records over other tensors, which `tensors()` of the result gives back."""
        return records_of(tensors, self.quantizer, InitValues(wanted=self.init.wanted) if init is None else init)

    def map(self, fn: Callable[[Tensor], Tensor], *, init: bool = True) -> "Records":
        """The records of the tensors that `fn` makes, initial values too unless `init` is False."""
        tensors = {name: fn(tensor) for name, tensor in self.tensors().items()}
        return self.with_tensors(tensors, self.init.map(fn) if init else None)

    @property
    def stored_bytes(self) -> int:
        """Bytes of every distinct tensor; initial values aside."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The values, of the rowwise bytes where there are some."""
        if self.any.payload.is_meta:
            return self.any.payload.new_empty(self.any.shape, dtype=dtype)
        # float64 holds what float32 does.
        return dequantize(self.any, dtype if dtype in DTYPES else torch.float32).to(dtype)

    # ---- writing ----

    def written(self, x_ERC: Tensor, dtype: torch.dtype) -> "Records":
        """Quantize `x` into the stored bytes, every direction, and into a direction that is wanted and was missing.

        The result shares the tensors of self. Where initial values are wanted they are `x` from now on.
        """
        row, column = self.row, self.column
        device = self.any.payload.device
        if self.init.wanted:
            x_ERC = x_ERC.to(dtype)  # what is kept is what is quantized
        x_ERC = x_ERC.detach().to(device, x_ERC.dtype if x_ERC.dtype in DTYPES else torch.float32)
        if device.type != "meta":
            quantize_into(x_ERC, row, column)
            if (self.quantizer.rowwise and row is None) or (self.quantizer.columnwise and column is None):
                new = quantize(x_ERC, self.quantizer.format, rowwise=row is None, columnwise=column is None)
                row, column = row or new[0], column or new[1]
        keep = self.init.wanted and device.type != "meta"
        init = self.init.taking(x_ERC.to(dtype)) if keep else self.init
        return Records(row, column, self.quantizer, init)

    def copied(self, source: "Records") -> "Records":
        """Take the bytes of `source`, of the same format and shape: every direction that self stores or wants.

        Raises ValueError where `source` lacks one that its bytes do not determine.
        """
        given: dict[Direction, Quantized] = {}
        for direction in DIRECTIONS:
            if self.record(direction) is not None or getattr(self.quantizer, direction):
                given[direction] = source.made(direction)
        # Only now that all are there: a direction written before another one fails would leave that one stale.
        device = self.any.payload.device
        row, column = (
            _take(self.record(direction), given[direction], device) if direction in given else None
            for direction in DIRECTIONS
        )
        init = self.init.taking(source.init.value) if self.init.wanted else self.init
        return Records(row, column, self.quantizer, init)

    def made(self, direction: Direction) -> Quantized:
        """The record of a direction: stored, or made from the other. ValueError where that does not determine it."""
        stored = self.record(direction)
        if stored is not None:
            return stored
        try:
            return turned(self.any)
        except ValueError as error:
            raise ValueError(
                f"the tensor that is written stores or wants {direction} bytes, and what is copied has none: {error}; "
                "build it without omit_columnwise_primary_weight_storage, or copy high-precision values"
            ) from None

    def with_usage(self, rowwise: bool | None, columnwise: bool | None) -> "Records":
        """Want or drop directions: True makes it from the stored one or raises, False drops its storage."""
        quantizer = self.quantizer.copy()
        quantizer.set_usage(rowwise, columnwise)
        made: dict[Direction, Quantized | None] = {}
        asked_for: dict[Direction, bool | None] = {"rowwise": rowwise, "columnwise": columnwise}
        for direction, asked in asked_for.items():
            own = None if asked is False else self.record(direction)
            made[direction] = turned(self.any) if asked and own is None else own
        return Records(made["rowwise"], made["columnwise"], quantizer, self.init)


def _take(own: Quantized | None, given: Quantized, device: torch.device) -> Quantized:
    if own is None:
        return replace(
            given,
            payload=given.payload.to(device, copy=True),
            scale=given.scale.to(device, copy=True),
            tensor_scale=None if given.tensor_scale is None else given.tensor_scale.to(device, copy=True),
        )
    for part in _PARTS:
        to, value = getattr(own, part), getattr(given, part)
        if to is not None:
            to.copy_(value)
    return own


def records_of(tensors: Mapping[str, Tensor], quantizer: Quantizer, init: InitValues) -> Records:
    """Records over tensors by name. ValueError for bytes that miss their scales or do not belong together."""
    fmt = quantizer.format
    made: dict[Direction, Quantized | None] = {"rowwise": None, "columnwise": None}
    for direction, prefix in DIRECTIONS.items():
        payload = tensors.get(f"{prefix}_payload")
        if payload is None:
            continue
        scale = tensors.get(f"{prefix}_scale")
        if scale is None and isinstance(fmt, Float8):
            scale = tensors.get("row_scale")
        if scale is None:
            raise ValueError(f"{fmt.name} {direction} bytes come with their scales, got a payload without: refused")
        made[direction] = Quantized(
            payload=payload,
            scale=scale,
            tensor_scale=tensors.get(f"{prefix}_tensor_scale"),
            format=fmt,
            direction=direction,
        )
    return Records(made["rowwise"], made["columnwise"], quantizer.copy(), init)
