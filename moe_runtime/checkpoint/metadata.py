"""Reading what torch.distributed.checkpoint wrote about a checkpoint, without running code that somebody put there.

torch reads its `.metadata` with pickle, which calls whatever the file names, and reads entries that the metadata call
bytes with pickle too. Here only the classes that describe tensors are known, and only tensors, in files of the
checkpoint's own folder, are accepted.
"""

import io
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from moe_runtime.checkpoint.files import DamagedCheckpointError

FILE = ".metadata"
_CLASSES = {
    "pathlib": ("PosixPath", "PurePosixPath"),
    # Python 3.13's name for it.
    "pathlib._local": ("PosixPath", "PurePosixPath"),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which no checkpoint needs, and is refused")


def read(checkpoint: Path, files: Collection[str]) -> Metadata:
    """The metadata of a checkpoint whose manifest lists `files`; DamagedCheckpointError names what is refused in it."""
    try:
        metadata = _Unpickler(io.BytesIO((checkpoint / FILE).read_bytes())).load()
    except (OSError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{checkpoint} is damaged: {FILE} cannot be read: {error}") from error
    except pickle.UnpicklingError as error:
        raise DamagedCheckpointError(f"{checkpoint} is damaged: {FILE} {error}") from error
    if not isinstance(metadata, Metadata):
        raise DamagedCheckpointError(f"{checkpoint} is damaged: {FILE} holds a {type(metadata).__name__}")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise DamagedCheckpointError(
                f"{checkpoint} is damaged: {FILE} says that {name} is a pickled object, and is refused"
            )
    for index, where in metadata.storage_data.items():
        if where.relative_path not in files or getattr(where, "transform_descriptors", None):
            raise DamagedCheckpointError(
                f"{checkpoint} is damaged: {FILE} says that {index.fqn} is in {where.relative_path}, "
                "which is no file of this checkpoint, and is refused"
            )
    return metadata


class Reader(dcp.FileSystemReader):
    """torch's reader of a checkpoint folder, given metadata that `read` has accepted."""

    def __init__(self, checkpoint: Path, metadata: Metadata) -> None:
        super().__init__(checkpoint)
        self._accepted = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._accepted
