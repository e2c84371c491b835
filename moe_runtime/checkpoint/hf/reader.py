"""Model tensors out of a Hugging Face folder, part by part: names matched first, then only the bytes asked for."""

# E experts over the whole group   F output features   D input features

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from moe_runtime.checkpoint.hf.folder import Folder
from moe_runtime.checkpoint.hf.names import STYLES, Names, Piece
from moe_runtime.core.errors import CheckpointError
from moe_runtime.formats import MXFP4, Format, FP8Block
from moe_runtime.tensor import QuantizedTensor, Quantizer
from moe_runtime.tensor.storage import InitValues, records_of

__all__ = ["Box", "Reader", "Source", "blocks", "check_no_nan"]

Box = tuple[tuple[int, int], ...]
Encoding = Literal["plain", "fp8", "mxfp4"]

_BLOCK_BYTES = 2**24
_MXFP4_GROUP = 32


class Source(Protocol):
    """Anything that can say what a part of a model's tensor is."""

    def __contains__(self, name: object) -> bool:
        """Whether there is such a tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """In which the tensor is written where no other is asked for."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """The values of tensor `name` in [start, stop) of each dimension, on the CPU."""
        ...


@dataclass(frozen=True, slots=True)
class _Stored:
    """A piece as this folder holds it."""

    piece: Piece
    key: str  # with the folder's prefix; without `_blocks`
    encoding: Encoding

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that it is read from."""
        if self.encoding == "mxfp4":
            return f"{self.key}_blocks", f"{self.key}_scales"
        return (self.key, f"{self.key}_scale_inv") if self.encoding == "fp8" else (self.key,)


class Reader:
    """A folder seen as the tensors of one model; a context manager.

    ignore  regular expressions of keys that may be left over, besides those that the model's class ignores
    Raises CheckpointError, naming keys, for tensors that the folder lacks, keys that belong to nothing, a tensor that
    is there in both name styles, and shapes that differ.
    """

    def __init__(self, path: Path, names: Names, *, ignore: Sequence[str] = ()) -> None:
        self.names = names
        self.folder = Folder(path)
        self._stored: dict[str, tuple[_Stored, ...]] = {}
        try:
            self._match(ignore)
        except BaseException:
            self.folder.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.folder.__exit__(*exc)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    @property
    def path(self) -> Path:
        """The folder's."""
        return self.folder.path

    @property
    def bytes_read(self) -> int:
        """Of the folder's files, so far."""
        return self.folder.bytes_read

    @property
    def tensors(self) -> frozenset[str]:
        """The model's tensors that the folder holds: all but those that Hugging Face's class does not have."""
        return frozenset(self._stored)

    # ---- matching ----

    def _match(self, ignore: Sequence[str]) -> None:
        missing: list[str] = []
        for name in self.names.shapes:
            found = self._find(name)
            if found is not None:
                self._stored[name] = found
            elif name not in self.names.own:
                missing.append(self._first_missing(name))
        if missing:
            raise CheckpointError(f"{self.folder.path} lacks {_some(missing)}, which the model has")
        used = {key for stored in self._stored.values() for one in stored for key in one.keys}
        used |= {key for other in self.names.tied if (key := self._there(other)) is not None}
        patterns = [re.compile(pattern) for pattern in (*self.names.ignored, *ignore)]
        left = sorted(
            key for key in self.folder if key not in used and not any(pattern.search(key) for pattern in patterns)
        )
        if left:
            raise CheckpointError(
                f"{self.folder.path} holds {_some(left)}, which {'belongs' if len(left) == 1 else 'belong'} to no "
                "tensor of the model; a pattern in `ignore` leaves keys out"
            )
        for name, stored in self._stored.items():
            for one in stored:
                self._check_shape(name, one)

    def _find(self, name: str) -> tuple[_Stored, ...] | None:
        whole: list[tuple[_Stored, ...]] = []
        for style in STYLES:
            found = [self._store(piece) for piece in self.names.pieces[style][name]]
            stored = tuple(one for one in found if one is not None)
            if len(stored) == len(found) and stored not in whole:
                whole.append(stored)
        if len(whole) > 1:
            first, second = (stored[0].key for stored in whole)
            raise CheckpointError(f"{self.folder.path} holds {name} twice: as {first} and as {second}")
        if not whole:
            other = next((other for other, tensor in self.names.tied.items() if tensor == name), None)
            piece = self._store(Piece(key=other)) if other is not None else None
            return None if piece is None else (piece,)
        return whole[0]

    def _store(self, piece: Piece) -> _Stored | None:
        key = self._there(piece.key)
        if key is not None:
            return _Stored(piece, key, "fp8" if f"{key}_scale_inv" in self.folder else "plain")
        blocks, scales = self._there(f"{piece.key}_blocks"), self._there(f"{piece.key}_scales")
        if blocks is not None and scales is not None:
            return _Stored(piece, blocks.removesuffix("_blocks"), "mxfp4")
        return None

    def _there(self, key: str) -> str | None:
        """The key as this folder spells it: as it is, or with or without the base model's prefix."""
        prefix = f"{self.names.prefix}." if self.names.prefix else ""
        candidates = (key, f"{prefix}{key}", key.removeprefix(prefix)) if prefix else (key,)
        return next((candidate for candidate in candidates if candidate in self.folder), None)

    def _first_missing(self, name: str) -> str:
        """Of the style that the folder holds most of."""
        lacking = [
            [piece.key for piece in self.names.pieces[style][name] if self._store(piece) is None] for style in STYLES
        ]
        return min(lacking, key=len)[0] if len(lacking[0]) != len(lacking[1]) else lacking[0][0]

    def _check_shape(self, name: str, one: _Stored) -> None:
        expected = one.piece.disk_shape(self.names.shapes[name])
        found = self.folder.shape(one.keys[0])
        if one.encoding == "mxfp4":
            # Packed in the model's own orientation, 32 values of a row in 16 bytes.
            box = one.piece.box(self.names.shapes[name])
            *lead, cols = (stop - start for start, stop in box)
            expected = (*lead, cols // _MXFP4_GROUP, _MXFP4_GROUP // 2)
        if found != expected:
            raise CheckpointError(f"{self.folder.path}: {one.keys[0]} must have shape {expected}, got {found}")
        if one.encoding == "plain":
            return
        tiles = tuple(-(-size // block) for size, block in zip(found[-2:], self.names.fp8_block, strict=True))
        scales = found[:-1] if one.encoding == "mxfp4" else (*found[:-2], *tiles)
        if (got := self.folder.shape(one.keys[1])) != scales:
            raise CheckpointError(f"{self.folder.path}: {one.keys[1]} must have shape {scales}, got {got}")

    # ---- reading ----

    def dtype(self, name: str) -> torch.dtype:
        """The stored one; of quantized bytes the one that the model's class has."""
        return self.names.dtype if self.is_packed(name) else self._dtype(self._stored[name])

    def _dtype(self, pieces: Iterable[_Stored]) -> torch.dtype:
        """Of the values that `read` gives: one that holds those of every piece."""
        found = (torch.float32 if one.encoding != "plain" else self.folder.dtype(one.key) for one in pieces)
        return functools.reduce(torch.promote_types, found)

    def is_packed(self, name: str) -> bool:
        """Whether the folder holds the tensor as quantized bytes."""
        return self._stored[name][0].encoding != "plain"

    def is_mxfp4(self, name: str) -> bool:
        """Whether those bytes are MXFP4."""
        return self._stored[name][0].encoding == "mxfp4"

    def row_step(self, name: str) -> int:
        """Output features of the smallest piece: what blocks of rows must divide."""
        boxes = [self._box(name, one) for one in self._stored[name]]
        return min(box[1][1] - box[1][0] for box in boxes)

    def read(self, name: str, box: Box) -> Tensor:
        """The values of a tensor in [start, stop) of each dimension; dequantized, in float32, where they are packed."""
        pieces = [
            (inside, one) for one in self._stored[name] if (inside := _overlap(box, self._box(name, one))) is not None
        ]
        if len(pieces) == 1 and pieces[0][0] == box:
            return self._values(name, pieces[0][1], box)
        out = torch.empty([stop - start for start, stop in box], dtype=self._dtype(one for _, one in pieces))
        for inside, one in pieces:
            target = out[_within(inside, box)]
            target.copy_(self._values(name, one, inside))
        return out

    def _box(self, name: str, one: _Stored) -> Box:
        return one.piece.box(self.names.shapes[name])

    def _values(self, name: str, one: _Stored, box: Box) -> Tensor:
        """Of one piece, in a part of it; in the model's orientation."""
        if one.encoding == "mxfp4":
            packed = self._mxfp4(name, one, box)
            return packed.dequantize(torch.float32)
        part = self.folder.read(one.key, self._on_disk(name, one, box))
        if one.encoding == "fp8":
            part = self._scaled(name, one, box, part)
        if one.piece.transposed:
            part = part.transpose(-1, -2)
        return part if one.piece.expert is None else part[None]

    def _on_disk(self, name: str, one: _Stored, box: Box) -> Box:
        """A part of the model's tensor as a part of the tensor on disk."""
        whole = self._box(name, one)
        inside = [(start - first, stop - first) for (start, stop), (first, _) in zip(box, whole, strict=True)]
        if one.piece.transposed:
            inside[-1], inside[-2] = inside[-2], inside[-1]
        return tuple(inside if one.piece.expert is None else inside[1:])

    def _scaled(self, name: str, one: _Stored, box: Box, part: Tensor) -> Tensor:
        """value = element * scale of its block, in float32."""
        inside, scale_key = self._on_disk(name, one, box), one.keys[1]
        scale_box = list(inside)
        for dim, block in zip((-2, -1), self.names.fp8_block, strict=True):
            start, stop = inside[dim]
            scale_box[dim] = (start // block, -(-stop // block))
        values = part.to(torch.float32)
        scale = self.folder.read(scale_key, tuple(scale_box)).to(torch.float32)
        for dim, block in zip((-2, -1), self.names.fp8_block, strict=True):
            start, stop = inside[dim]
            scale = scale.repeat_interleave(block, dim).narrow(dim, start % block, stop - start)
        return values.mul_(scale)

    def _mxfp4(self, name: str, one: _Stored, box: Box) -> QuantizedTensor:
        """Whole rows of packed bytes, (..., F, D / 2) and (..., F, D / 32)."""
        whole = self._box(name, one)
        inside = [(start - first, stop - first) for (start, stop), (first, _) in zip(box, whole, strict=True)]
        rows, (first, last) = tuple(inside[:-1]), inside[-1]
        if first % _MXFP4_GROUP or last % _MXFP4_GROUP:
            raise ValueError(f"{name}: MXFP4 is read in groups of {_MXFP4_GROUP} columns, got [{first}, {last})")
        groups = (first // _MXFP4_GROUP, last // _MXFP4_GROUP)
        payload = self.folder.read(one.keys[0], (*rows, groups, (0, _MXFP4_GROUP // 2))).flatten(-2)
        scale = self.folder.read(one.keys[1], (*rows, groups))
        return _packed(payload, scale, MXFP4(), torch.bfloat16)

    def read_packed(self, name: str, expert: int, fmt: Format, dtype: torch.dtype) -> QuantizedTensor | None:
        """Expert's bytes as the folder holds them, rowwise; None where they are not bytes of `fmt`."""
        if not self.is_packed(name) or len(self.names.shapes[name]) != 3:
            return None
        full = ((expert, expert + 1), *((0, size) for size in self.names.shapes[name][1:]))
        pieces = [
            (inside, one) for one in self._stored[name] if (inside := _overlap(full, self._box(name, one))) is not None
        ]
        if isinstance(fmt, MXFP4) and all(one.encoding == "mxfp4" for _, one in pieces):
            ((inside, one),) = pieces
            return self._mxfp4(name, one, inside)[0]  # pyright: ignore[reportReturnType]
        if not isinstance(fmt, FP8Block) or not fmt.two_dimensional or tuple(fmt.block) != self.names.fp8_block:
            return None
        rows = [stop - start for inside, _ in pieces for start, stop in (inside[1],)]
        if any(size % fmt.block.rows for size in rows) or full[-1][1] % fmt.block.cols:
            return None
        parts: dict[str, list[Tensor]] = {"row_payload": [], "row_scale": []}
        for inside, one in pieces:
            box = self._on_disk(name, one, inside)
            if one.encoding != "fp8" or one.piece.transposed or self.folder.dtype(one.key) != fmt.encoding.dtype:
                return None
            scale_box = tuple(
                (start // size, stop // size)
                for (start, stop), size in zip(box[-2:], self.names.fp8_block, strict=True)
            )
            parts["row_payload"].append(self.folder.read(one.key, box).reshape(-1, full[-1][1]).view(torch.uint8))
            scale = self.folder.read(one.keys[1], (*box[:-2], *scale_box))
            parts["row_scale"].append(scale.to(torch.float32).reshape(-1, scale.shape[-1]))
        return _packed(torch.cat(parts["row_payload"]), torch.cat(parts["row_scale"]), fmt, dtype)


def _packed(payload: Tensor, scale: Tensor, fmt: Format, dtype: torch.dtype) -> QuantizedTensor:
    quantizer = Quantizer(format=fmt, columnwise=False)
    tensors: Mapping[str, Tensor] = {"row_payload": payload.contiguous(), "row_scale": scale.contiguous()}
    return QuantizedTensor.wrap(records_of(tensors, quantizer, InitValues()), dtype)


def blocks(box: Box, itemsize: int) -> Iterator[Box]:
    """A box in parts of at most 16 MiB, or one row where that is more: what is held while a tensor is copied."""
    if len(box) == 0:
        yield box
        return
    (start, stop), *rest = box
    size = itemsize
    for first, last in rest:
        size *= last - first
    if len(box) > 1 and size > _BLOCK_BYTES:
        for index in range(start, stop):
            for inner in blocks(tuple(rest), itemsize):
                yield ((index, index + 1), *inner)
        return
    step = max(1, _BLOCK_BYTES // max(size, 1))
    for index in range(start, stop, step):
        yield ((index, min(index + step, stop)), *rest)


def check_no_nan(name: str, values: Tensor, path: Path) -> None:
    """CheckpointError, naming the tensor, for values that hold NaN."""
    if values.is_floating_point() and values.isnan().any():
        raise CheckpointError(f"{path}: {name} holds NaN")


def _overlap(a: Box, b: Box) -> Box | None:
    common = tuple((max(p, q), min(r, s)) for (p, r), (q, s) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _within(inside: Box, box: Box) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(inside, box, strict=True))


def _some(keys: Sequence[str]) -> str:
    shown = ", ".join(keys[:3])
    return shown if len(keys) <= 3 else f"{shown} and {len(keys) - 3} more"
