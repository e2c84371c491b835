"""Checkpoints on disk: a folder a step, written beside and renamed when whole, verified before it is read.

    <root>/step-000100/        *.distcp and .metadata (torch.distributed.checkpoint), manifest.json
    <root>/.step-000100.tmp/   one being written; never looked at, removed by the next save

The manifest holds the caller's facts, the shape of every entry, and size and CRC-32 of every file.
"""

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from moe_runtime.checkpoint import tensors
from moe_runtime.core.errors import CheckpointError

_NAME = re.compile(r"^step-(\d+)$")
_MANIFEST = "manifest.json"
_FORMAT = 1


def save(
    root: Path, step: int, model: nn.Module, optimizer: Optimizer, facts: Mapping[str, Any], *, keep: int = 0
) -> Path:
    """Write the state after `step` steps under `root`; every rank calls it. Returns the new folder.

    facts  JSON values to find again in `read_facts`: data position, configuration
    keep   newest checkpoints kept, older ones removed; 0 keeps all
    Raises CheckpointError on every rank if any rank failed; earlier checkpoints are untouched and no part stays behind.
    """
    final, beside = root / f"step-{step:06d}", root / f".step-{step:06d}.tmp"
    entries = _entries(model, optimizer)
    problem = _on_first_rank(lambda: _make_room(root, beside))
    if not problem:
        problem = _write(beside, entries)
    if not problem:
        files = _merge(_checksums(beside, _own_files(beside)))
        manifest = {
            "format": _FORMAT,
            "step": step,
            "facts": dict(facts),
            "shapes": _merge(tensors.shapes(entries)),
            "files": files,
        }
        problem = _on_first_rank(lambda: _publish(beside, final, manifest))
    if problem:
        _on_first_rank(lambda: shutil.rmtree(beside, ignore_errors=True))
        raise CheckpointError(f"the checkpoint of step {step} could not be written to {root}: {problem}")
    _on_first_rank(lambda: _prune(root, keep))
    return final


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint under `root`, or None."""
    found = {int(match[1]): path for path in root.glob("step-*") if (match := _NAME.match(path.name))}
    whole = [step for step, path in found.items() if (path / _MANIFEST).is_file()]
    return found[max(whole)] if whole else None


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """What `save` was given, and "step". Raises CheckpointError for a folder that is no whole checkpoint."""
    manifest = _manifest(checkpoint)
    return {**manifest["facts"], "step": manifest["step"]}


def load(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Fill model, optimizer and this rank's random state in place; every rank calls it. Returns `read_facts`.

    Any expert and data degree may load what any other saved. Raises CheckpointError, before anything is changed, for a
    damaged file or for the checkpoint of a model whose entries differ.
    """
    manifest = _manifest(checkpoint)
    if not optimizer.state:
        tensors.create_optimizer_state(optimizer)
    entries = _entries(model, optimizer)
    _check_shapes(checkpoint, manifest["shapes"], _merge(tensors.shapes(entries)))
    problems = _merge(_damaged(checkpoint, manifest["files"]))
    if problems:
        name, what = sorted(problems.items())[0]
        raise CheckpointError(f"{checkpoint} is damaged: {name} {what}")
    saved = {key: value for key, value in entries.items() if key in manifest["shapes"]}
    with _one_process_is_fine():
        dcp.load(saved, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=not dist.is_initialized())
    tensors.forget_init_values(model)
    _restore_random_state(saved)
    return {**manifest["facts"], "step": manifest["step"]}


def _entries(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    entries = {f"model.{name}": value for name, value in tensors.model_tensors(model).items()}
    entries.update((f"optim.{name}", value) for name, value in tensors.optimizer_tensors(model, optimizer).items())
    rank = _rank()
    entries[f"random.{rank}.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        entries[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return entries


def _restore_random_state(entries: Mapping[str, Tensor]) -> None:
    rank = _rank()
    if f"random.{rank}.cpu" in entries:
        torch.set_rng_state(entries[f"random.{rank}.cpu"])
    if f"random.{rank}.cuda" in entries:
        torch.cuda.set_rng_state(entries[f"random.{rank}.cuda"])


def _check_shapes(checkpoint: Path, saved: Mapping[str, list[int]], wanted: Mapping[str, list[int]]) -> None:
    # Random states belong to ranks, whose number may differ.
    names = sorted(name for name in saved.keys() | wanted.keys() if not name.startswith("random."))
    for name in names:
        if saved.get(name) != wanted.get(name):
            raise CheckpointError(
                f"{checkpoint} belongs to another model: {name} should have shape {wanted.get(name, 'none')}, "
                f"the checkpoint has {saved.get(name, 'none')}"
            )


def _write(beside: Path, entries: dict[str, Tensor]) -> str:
    # torch collects what any rank raised and raises it on all, so no rank goes on alone.
    try:
        with _one_process_is_fine():
            writer = dcp.FileSystemWriter(beside, sync_files=True)
            dcp.save(entries, storage_writer=writer, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        rank, failure = sorted(error.failures.items())[0]
        return f"rank {rank}: {failure[0]}"
    except OSError as error:
        return str(error)
    return ""


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """torch warns whenever there is no process group, though a single process needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _publish(beside: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    with (beside / _MANIFEST).open("w") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(beside)
    if final.exists():
        shutil.rmtree(final)
    beside.rename(final)
    _sync_folder(final.parent)


def _make_room(root: Path, beside: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob(".step-*.tmp"):
        shutil.rmtree(stale)
    beside.mkdir(mode=0o700)


def _prune(root: Path, keep: int) -> None:
    whole = sorted(path for path in root.glob("step-*") if _NAME.match(path.name))
    for old in whole[:-keep] if keep else []:
        shutil.rmtree(old)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest(checkpoint: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} is no whole checkpoint: {error}") from error
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{checkpoint} has format {manifest.get('format')}, expected {_FORMAT}")
    return manifest


def _own_files(folder: Path) -> list[Path]:
    mine = sorted(folder.glob(f"__{_rank()}_*"))
    return [*mine, folder / ".metadata"] if _rank() == 0 else mine


def _checksums(folder: Path, files: list[Path]) -> dict[str, list[int]]:
    return {str(path.relative_to(folder)): [path.stat().st_size, _crc(path)] for path in files}


def _damaged(checkpoint: Path, files: Mapping[str, list[int]]) -> dict[str, str]:
    """What is wrong with this rank's share of the files."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    found: dict[str, str] = {}
    for name in sorted(files)[_rank() :: world]:
        path, (size, crc) = checkpoint / name, files[name]
        if not path.is_file():
            found[name] = "is missing"
        elif path.stat().st_size != size:
            found[name] = f"has {path.stat().st_size} bytes, expected {size}"
        elif _crc(path) != crc:
            found[name] = "does not match its checksum"
    return found


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            crc = zlib.crc32(block, crc)
    return crc


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _on_first_rank(action: Any) -> str:
    """Run `action` on rank 0; what went wrong, if anything, on every rank."""
    problem = ""
    if _rank() == 0:
        try:
            action()
        except OSError as error:
            problem = str(error)
    if not dist.is_initialized():
        return problem
    box = [problem]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _merge(own: dict[str, Any]) -> dict[str, Any]:
    """The union of every rank's dict."""
    if not dist.is_initialized():
        return own
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return {key: value for part in parts for key, value in part.items()}
