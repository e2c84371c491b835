"""Safetensors files written as they are computed: the header first, then one tensor at a time, then the index.

The library's own `save_file` takes all tensors of a file at once. A header needs only shapes, which are known before,
so here one tensor is held at a time. The format: eight bytes of header length, the header in JSON padded to a multiple
of eight, then the tensors' bytes one after the other.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from moe_runtime.checkpoint.hf.folder import INDEX_FILE, SINGLE_FILE

__all__ = ["MAX_SHARD_BYTES", "Shard", "ShardWriter", "Spec", "plan_shards", "write_index"]

MAX_SHARD_BYTES = 5 * 10**9

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A tensor to be written. `writer`: the rank that writes it."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    writer: int = 0

    @property
    def num_bytes(self) -> int:
        """In the file, header aside."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A file and its tensors, in their order."""

    file: str
    specs: tuple[Spec, ...]


def plan_shards(specs: Sequence[Spec], max_shard_bytes: int) -> tuple[Shard, ...]:
    """Files of at most `max_shard_bytes`, or one tensor where that is more; each has one writer, in order of ranks."""
    files: list[list[Spec]] = []
    for writer in sorted({spec.writer for spec in specs}):
        size = max_shard_bytes + 1  # every writer begins a file
        for spec in (spec for spec in specs if spec.writer == writer):
            if size + spec.num_bytes > max_shard_bytes:
                files.append([])
                size = 0
            files[-1].append(spec)
            size += spec.num_bytes
    if len(files) == 1:
        return (Shard(file=SINGLE_FILE, specs=tuple(files[0])),)
    return tuple(
        Shard(file=f"model-{number:05d}-of-{len(files):05d}.safetensors", specs=tuple(held))
        for number, held in enumerate(files, start=1)
    )


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """model.safetensors.index.json, where there is more than one file."""
    if len(shards) == 1:
        return
    specs = [spec for shard in shards for spec in shard.specs]
    index = {
        "metadata": {"total_size": sum(spec.num_bytes for spec in specs)},
        "weight_map": {spec.key: shard.file for shard in shards for spec in shard.specs},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class ShardWriter:
    """Writes the tensors of one rank's shards, which must come in their order."""

    def __init__(self, folder: Path, shards: Sequence[Shard]) -> None:
        self.folder = folder
        self._waiting = [(shard, index) for shard in shards for index in range(len(shard.specs))]
        self._file: IO[bytes] | None = None

    def add(self, key: str, tensor: Tensor) -> None:
        """Append the next tensor. ValueError for one out of order or not as announced."""
        shard, index = self._waiting[0] if self._waiting else (None, 0)
        spec = None if shard is None else shard.specs[index]
        if (
            shard is None
            or spec is None
            or (key, tensor.dtype, tuple(tensor.shape))
            != (
                spec.key,
                spec.dtype,
                spec.shape,
            )
        ):
            raise ValueError(f"expected {spec} next, got {key} {tensor.dtype} {tuple(tensor.shape)}")
        if index == 0:
            self.close()
            self._file = (self.folder / shard.file).open("wb")
            self._file.write(_header(shard.specs))
        assert self._file is not None
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self._file.write(flat.view(torch.uint8).numpy().data)
        del self._waiting[0]
        if not self._waiting:
            self.close()

    def close(self) -> None:
        """Close the file that is open."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _header(specs: Sequence[Spec]) -> bytes:
    entries: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    start = 0
    for spec in specs:
        stop = start + spec.num_bytes
        entries[spec.key] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
