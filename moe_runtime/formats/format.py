"""What every format answers: shapes, dtypes and bytes of the tensors that store a matrix, and which shapes it takes.

A format is a frozen value that describes bytes. Making them is kernels/quantize, reading them kernels/dequantize.

    rowwise      payload (..., rows, cols), blocks along cols (in_features): what fprop reads
    columnwise   payload (..., cols, rows), the transposed matrix, blocks along rows (out_features), so that dgrad reads
                 its contraction from adjacent bytes, as fprop does

Columnwise is rowwise of the transposed matrix, so each formula below is written once, for the stored matrix.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import ClassVar, Literal, NamedTuple

import torch

from moe_runtime.formats.encodings import Encoding

__all__ = ["Block", "Direction", "Format"]

Direction = Literal["rowwise", "columnwise"]


class Block(NamedTuple):
    """The elements that share a scale, in the stored matrix; rows and cols differ only for one-dimensional blocks."""

    rows: int
    cols: int


class Format(ABC):
    """The common part of all formats. `shape` is always the logical one, (rows, cols) or (E, rows, cols)."""

    __slots__ = ()
    name: ClassVar[str]
    columnwise_allowed: ClassVar[bool] = True
    has_tensor_scale: ClassVar[bool] = False  # a second scale, one float32 a member

    @property
    @abstractmethod
    def encoding(self) -> Encoding | None:
        """Of the payload; None: torch's own dtype, no scale."""

    @property
    @abstractmethod
    def block(self) -> Block | None:
        """What shares a scale; None: the whole member."""

    @property
    def scale_encoding(self) -> Encoding | None:
        """Of the scale; None: float32."""
        return None

    @property
    def element_bits(self) -> int:
        """Bits of one stored element, scales aside."""
        return 8 * self.payload_dtype.itemsize if self.encoding is None else self.encoding.bits

    @property
    def payload_dtype(self) -> torch.dtype:
        """Quantized payloads are bytes."""
        return torch.uint8

    @property
    def scale_dtype(self) -> torch.dtype:
        """float32, or bytes of `scale_encoding`."""
        return torch.float32 if self.scale_encoding is None else torch.uint8

    def payload_shape(self, shape: Sequence[int], direction: Direction = "rowwise") -> tuple[int, ...]:
        """(..., rows, cols) for rowwise, (..., cols, rows) for columnwise; the last one halved for 4-bit elements."""
        *lead, rows, cols = _stored(shape, direction)
        return (*lead, rows, cols * self.element_bits // (8 * self.payload_dtype.itemsize))

    def scale_shape(self, shape: Sequence[int], direction: Direction = "rowwise") -> tuple[int, ...]:
        """One scale a block, in the order of the stored matrix; one a member where the block is the member."""
        *lead, rows, cols = _stored(shape, direction)
        return tuple(lead) if self.block is None else (*lead, rows // self.block.rows, cols // self.block.cols)

    def logical_shape(self, payload_shape: Sequence[int], direction: Direction = "rowwise") -> tuple[int, ...]:
        """Inverse of `payload_shape`."""
        *lead, rows, cols = payload_shape
        return _stored((*lead, rows, cols * 8 * self.payload_dtype.itemsize // self.element_bits), direction)

    def stored_bytes(self, shape: Sequence[int], *, rowwise: bool = True, columnwise: bool = False) -> int:
        """Payload, scales and tensor scales of the directions asked for."""
        directions: list[Direction] = [*(["rowwise"] if rowwise else []), *(["columnwise"] if columnwise else [])]
        return sum(self._direction_bytes(shape, direction) for direction in directions)

    def _direction_bytes(self, shape: Sequence[int], direction: Direction) -> int:
        payload = prod(self.payload_shape(shape, direction)) * self.payload_dtype.itemsize
        scale = prod(self.scale_shape(shape, direction)) * self.scale_dtype.itemsize
        return payload + scale + (4 * prod(shape[:-2]) if self.has_tensor_scale else 0)

    def check_shape(self, shape: Sequence[int], *, rowwise: bool = True, columnwise: bool = False) -> None:
        """ValueError unless `shape` can be stored in the directions asked for: whole blocks only."""
        if len(shape) not in (2, 3):
            raise ValueError(f"{self.name} stores (rows, cols) or (E, rows, cols), got {tuple(shape)}")
        if not rowwise and not columnwise:
            raise ValueError(f"{self.name} needs rowwise or columnwise storage, got neither")
        if columnwise and not self.columnwise_allowed:
            raise ValueError(f"{self.name} is stored row-wise only, got columnwise=True")
        if self.block is None:
            return
        rows, cols = shape[-2:]
        across, along = self.block
        needs = [("rowwise", "cols", cols, along), ("rowwise", "rows", rows, across)] * rowwise
        needs += [("columnwise", "rows", rows, along), ("columnwise", "cols", cols, across)] * columnwise
        for direction, dim, size, multiple in needs:
            if size % multiple:
                raise ValueError(
                    f"{self.name} stored {direction} needs {dim} to be a multiple of {multiple}, "
                    f"got {dim}={size} in shape {tuple(shape)}"
                )


def _stored(shape: Sequence[int], direction: Direction) -> tuple[int, ...]:
    """The shape of the stored matrix: transposed for columnwise."""
    *lead, rows, cols = shape
    return (*lead, rows, cols) if direction == "rowwise" else (*lead, cols, rows)
