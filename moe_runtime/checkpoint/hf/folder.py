"""A folder of safetensors: which file holds which key, and any part of any tensor without reading the rest."""

# R rows   C columns   B bytes

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from moe_runtime.core.errors import CheckpointError

__all__ = ["INDEX_FILE", "SINGLE_FILE", "Folder"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Folder:
    """The tensors of a Hugging Face folder by key. A context manager: files stay open inside, mapped, not read.

    `bytes_read` counts what was asked for. Raises CheckpointError for a folder without weights, a file that is
    damaged, an index that names a file or key that is not there, or a key that two files hold.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        self._name_of: dict[str, str] = {}
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise

    def _open(self) -> None:
        index = _read_index(self.path)
        names = sorted(set(index.values())) if index is not None else _weight_files(self.path)
        for name in names:
            opened = self._open_file(name)
            for key in opened.keys():  # noqa: SIM118 (a file is not a dict)
                if key in self._name_of:
                    raise CheckpointError(
                        f"{self.path} holds the tensor {key} twice, in {self._name_of[key]} and in {name}"
                    )
                self._file_of[key], self._name_of[key] = opened, name
        for key, name in (index or {}).items():
            if self._name_of.get(key) != name:
                raise CheckpointError(f"{self.path}: {INDEX_FILE} places {key} in {name}, which does not hold it")

    def _open_file(self, name: str) -> Any:
        # Here, because an installation without it trains as well.
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ImportError("moe_runtime.checkpoint.hf needs: pip install 'moe-runtime[train]'") from error
        try:
            return self._stack.enter_context(safe_open(self.path / name, framework="pt"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.path}: {INDEX_FILE} names {name}, which does not exist") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / name} is no whole safetensors file: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __contains__(self, key: str) -> bool:
        return key in self._name_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._name_of)

    def file_of(self, key: str) -> str:
        """The name of the file that holds it."""
        return self._name_of[key]

    def shape(self, key: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self._file_of[key].get_slice(key).get_shape())

    def dtype(self, key: str) -> torch.dtype:
        """Of the tensor on disk."""
        name = self._file_of[key].get_slice(key).get_dtype()
        if name not in _DTYPES:
            raise CheckpointError(f"{self.path}: {key} has dtype {name}, expected one of {', '.join(_DTYPES)}")
        return _DTYPES[name]

    def read(self, key: str, box: tuple[tuple[int, int], ...]) -> Tensor:
        """The part [start, stop) in each dimension; a tensor of its own."""
        opened = self._file_of[key]
        if not box:
            part = opened.get_tensor(key).clone()
        else:
            part = opened.get_slice(key)[tuple(slice(start, stop) for start, stop in box)]
        self.bytes_read += part.numel() * part.element_size()
        return part


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_FILE
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no index: expected a JSON object with a weight_map, got {error!r}") from error
    outside = next((name for name in index.values() if Path(str(name)).name != name), None)
    if outside is not None:
        raise CheckpointError(f"{path} may name only files beside it, got {outside!r}")
    return {str(key): str(name) for key, name in index.items()}


def _weight_files(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise CheckpointError(f"expected a Hugging Face folder, got {folder}, which is no folder")
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if not found:
        raise CheckpointError(f"{folder} holds no weights: expected {SINGLE_FILE}, or {INDEX_FILE} and its files")
    return found
