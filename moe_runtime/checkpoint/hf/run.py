"""The tensors of a run's checkpoint, read as those of a Hugging Face model: one at a time, whichever layout saved them.

A run that kept fp32 masters gives those: a quantized or bf16 weight is their rounding.
"""

# E experts over the whole group

import re
from pathlib import Path

import torch
from torch import Tensor

from moe_runtime.checkpoint.hf.names import Names
from moe_runtime.checkpoint.hf.reader import Box
from moe_runtime.checkpoint.store import entry_dtypes, read_entries, verify
from moe_runtime.core.errors import CheckpointError
from moe_runtime.formats import Format
from moe_runtime.tensor import QuantizedTensor

__all__ = ["RunCheckpoint"]


class RunCheckpoint:
    """A `Source` over a folder that `checkpoint.save` wrote.

    Raises CheckpointError for one that is damaged, and for one that lacks a tensor of the model or holds another.
    """

    def __init__(self, path: Path, names: Names) -> None:
        self.path, self.names = path, names
        self.bytes_read = 0
        self._shapes = verify(path)
        self._entries = {name: found for name in names.shapes if (found := self._find(name))}
        lacking = [name for name in names.shapes if name not in self._entries and name not in names.own]
        if lacking:
            raise CheckpointError(f"{path} belongs to another model: it lacks {lacking[0]}")
        known = {f"model.{name}" for name in self._entries}
        for key in self._shapes:
            whole = re.sub(r"\d*(\.(row|column)wise\.\w+)?$", "", key)
            if key.startswith("model.") and not {key, whole} & known:
                raise CheckpointError(f"{path} belongs to another model: it holds {key}")
        self._dtypes = entry_dtypes(path)
        self._held: tuple[str, Tensor] | None = None

    def _find(self, name: str) -> tuple[str, ...]:
        """The entries that make the tensor up: itself, or one an expert in id order."""
        shape = list(self.names.shapes[name])
        members = [f"{name}{expert}" for expert in range(shape[0])] if shape else []
        for stems, expected in (([name], shape), (members, shape[1:])):
            for pattern in ("optim.{}.master", "model.{}"):
                entries = tuple(pattern.format(stem) for stem in stems)
                if entries and all(entry in self._shapes for entry in entries):
                    wrong = next((entry for entry in entries if self._shapes[entry] != expected), None)
                    if wrong is not None:
                        raise CheckpointError(
                            f"{self.path} belongs to another model: {wrong} should have shape {expected}, "
                            f"the checkpoint has {self._shapes[wrong]}"
                        )
                    return entries
        if f"model.{name}.rowwise.qdata" in self._shapes or f"model.{name}0.rowwise.qdata" in self._shapes:
            raise CheckpointError(f"{self.path} holds {name} as quantized bytes without an fp32 master to write")
        return ()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    @property
    def tensors(self) -> frozenset[str]:
        """The model's tensors that the checkpoint holds."""
        return frozenset(self._entries)

    def read_packed(self, name: str, expert: int, fmt: Format, dtype: torch.dtype) -> QuantizedTensor | None:
        """None: a run's checkpoint is read as values."""
        return None

    def dtype(self, name: str) -> torch.dtype:
        """Of the stored tensor."""
        return self._dtypes[self._entries[name][0]]

    def read(self, name: str, box: Box) -> Tensor:
        """A part of a tensor, which is read whole: consecutive reads of one tensor read it once."""
        return self._whole(name)[tuple(slice(start, stop) for start, stop in box)]

    def _whole(self, name: str) -> Tensor:
        if self._held is None or self._held[0] != name:
            self._held = None  # freed before the next one is read
            read = read_entries(self.path, self._entries[name])
            values = [read[entry] for entry in self._entries[name]]
            self.bytes_read += sum(value.nbytes for value in values)
            one = len(values) == 1 and values[0].shape == self.names.shapes[name]
            self._held = (name, values[0] if one else torch.stack(values))
        return self._held[1]
