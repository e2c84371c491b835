"""Checkpoints from elsewhere: whatever they ask Python to run is refused by name, and nothing runs."""

import io
import json
import os
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from moe_runtime import checkpoint
from moe_runtime.checkpoint import files
from moe_runtime.checkpoint.files import DamagedCheckpointError


class Evil:
    """Runs a shell command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = nn.Linear(3, 2)
    return checkpoint.save(tmp_path / "root", 1, model, torch.optim.SGD(model.parameters(), lr=0.1), {})


def _load(folder: Path) -> None:
    model = nn.Linear(3, 2)
    checkpoint.load(folder, model, torch.optim.SGD(model.parameters(), lr=0.1))


def _forge(folder: Path, name: str, content: bytes) -> None:
    """Replace a file and its checksum, as somebody who made the folder can."""
    (folder / name).write_bytes(content)
    path = folder / files.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"][name] = [len(content), zlib.crc32(content)]
    path.write_text(json.dumps(manifest))


def test_code_in_the_metadata_is_refused_by_name(saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    _forge(saved, ".metadata", pickle.dumps(Evil(mark)))
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata asks for posix\.system, .* refused"):
        _load(saved)
    with pytest.raises(DamagedCheckpointError, match=r"asks for posix\.system"):
        checkpoint.read_entries(saved, ["model.weight"])
    assert not mark.exists()


def test_an_entry_that_would_be_unpickled_is_refused_by_name(saved: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.weight"] = BytesStorageMetadata()
    _forge(saved, ".metadata", pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointError, match=r"model\.weight is a pickled object, and is refused"):
        _load(saved)


def test_code_in_a_tensors_file_is_refused_by_name(saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (data,) = saved.glob("*.distcp")
    _forge(saved, data.name, _with_pickle(data.read_bytes(), pickle.dumps(Evil(mark), protocol=2)))
    with pytest.raises(DamagedCheckpointError, match=r"a tensor's file asks for posix\.system, .* refused"):
        _load(saved)
    assert not mark.exists()


def _with_pickle(content: bytes, code: bytes) -> bytes:
    """The file's first tensor, a zip of torch.save, with another pickle of the same length; the rest as it is."""
    start = content.index(b"PK\x03\x04")
    end = content.index(b"PK\x05\x06", start) + 22
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content[start:end])) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, code if entry.filename.endswith("data.pkl") else old.read(entry))
    forged = out.getvalue()
    return content[:start] + forged.ljust(end - start, b"\0")[: end - start] + content[end:]


def test_a_file_outside_of_the_folder_is_refused_by_name(saved: Path) -> None:
    (data,) = saved.glob("*.distcp")
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    for where in metadata.storage_data.values():
        where.relative_path = f"../{data.name}"
    shutil.copy(data, saved.parent / data.name)
    _forge(saved, ".metadata", pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointError, match=r"is in \.\./.*, which is no file of this checkpoint"):
        _load(saved)
    manifest = json.loads((saved / files.MANIFEST).read_text())
    manifest["files"]["../escape"] = [1, 1]
    (saved / files.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpointError, match="names a file outside it"):
        checkpoint.verify(saved)


def test_a_refused_checkpoint_is_passed_over_for_the_one_before(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = tmp_path / "ran"
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    newest = checkpoint.save(saved.parent, 2, model, optimizer, {})
    _forge(newest, ".metadata", pickle.dumps(Evil(mark)))
    found, facts = checkpoint.load_latest(saved.parent, model, optimizer)
    assert (found, facts["step"]) == (saved, 1)
    assert "posix.system" in caplog.text and "trying the one before it" in caplog.text
    assert not mark.exists()


def test_only_their_owner_can_read_checkpoints(saved: Path) -> None:
    assert saved.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in saved.iterdir()} == {0o600}
