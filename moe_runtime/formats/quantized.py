"""One direction of a quantized matrix, or of a stack of them: its tensors, and the format that reads them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_runtime.formats.format import Direction, Format

__all__ = ["Quantized"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Quantized:
    """Bytes of `format` in one direction. Tensors that do not belong together raise ValueError.

    payload       uint8, format.payload_shape(shape, direction)
    scale         format.scale_dtype, format.scale_shape(shape, direction), compact
    tensor_scale  float32, one a member, where the format has one; else None
    """

    payload: Tensor
    scale: Tensor
    tensor_scale: Tensor | None = None
    format: Format
    direction: Direction = "rowwise"

    def __post_init__(self) -> None:
        if self.direction not in ("rowwise", "columnwise"):
            raise ValueError(f'direction must be "rowwise" or "columnwise", got {self.direction!r}')
        fmt, shape = self.format, self.shape
        fmt.check_shape(shape, rowwise=self.direction == "rowwise", columnwise=self.direction == "columnwise")
        _check("payload", self.payload, fmt.payload_shape(shape, self.direction), fmt.payload_dtype, fmt)
        _check("scale", self.scale, fmt.scale_shape(shape, self.direction), fmt.scale_dtype, fmt)
        if fmt.has_tensor_scale:
            _check("tensor_scale", self.tensor_scale, tuple(shape[:-2]), torch.float32, fmt)
        elif self.tensor_scale is not None:
            raise ValueError(f"{fmt.name} has no tensor_scale, got one of shape {tuple(self.tensor_scale.shape)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, (rows, cols) or (E, rows, cols)."""
        return self.format.logical_shape(self.payload.shape, self.direction)

    def member(self, e: int) -> "Quantized":
        """One of a stack's members; its tensors are views."""
        tensor_scale = None if self.tensor_scale is None else self.tensor_scale[e]
        return replace(self, payload=self.payload[e], scale=self.scale[e], tensor_scale=tensor_scale)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the tensors; a scale that directions share counts in each."""
        tensors = (self.payload, self.scale, *(() if self.tensor_scale is None else (self.tensor_scale,)))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _check(name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, fmt: Format) -> None:
    if tensor is None:
        raise ValueError(f"{fmt.name} needs a {name} of shape {shape}, got None")
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{name} of {fmt.name} must be {dtype} of shape {shape}, got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
