"""A checkpoint as files: names, manifest, checksums, publishing by rename, and which old ones go.

    <root>/step-000100/           *.distcp and .metadata (torch.distributed.checkpoint), manifest.json
    <root>/.step-000100.tmp/      one being written, or being removed; never looked at, removed by the next save
    <root>/.step-000100.old/      what another save of the same step is replacing this instant

The manifest is written last. It holds the caller's facts, the shape of every entry, and size and CRC-32 of every file.
Nothing here knows tensors or other ranks.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moe_runtime.core.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"^(?:step-(?P<step>\d+)|\.step-(?P<old>\d+)\.old)$")
_CRC_BLOCK_BYTES = 2**22


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that was whole once, or looks so: a file is missing, cut, changed, or asks for code."""


def final_path(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` stands when it is whole."""
    return root / f"step-{step:06d}"


def partial_path(root: Path, step: int) -> Path:
    """Where it is written."""
    return root / f".step-{step:06d}.tmp"


def whole(root: Path) -> list[Path]:
    """Every folder under `root` with a manifest, newest step first; its other files are not looked at."""
    found: list[tuple[int, bool, Path]] = []
    for path in root.glob("*step-*"):
        match = _NAME.match(path.name)
        if match and (path / MANIFEST).is_file():
            found.append((int(match["step"] or match["old"]), match["step"] is not None, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest; CheckpointError where there is none, DamagedCheckpointError where it does not say what it must."""
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{checkpoint} is no whole checkpoint: {error}") from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{checkpoint} is damaged: {MANIFEST} is no JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        got = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise CheckpointError(f"{checkpoint} has format {got}, expected {FORMAT}")
    for key, kind in (("step", int), ("facts", dict), ("shapes", dict), ("files", dict)):
        if not isinstance(manifest.get(key), kind):
            raise DamagedCheckpointError(f"{checkpoint} is damaged: {MANIFEST} has no {key}")
    for name, described in manifest["files"].items():
        if Path(name).name != name:
            raise DamagedCheckpointError(f"{checkpoint} is damaged: {MANIFEST} names a file outside it, {name}")
        if not (isinstance(described, list) and [type(value) for value in described] == [int, int]):
            raise DamagedCheckpointError(f"{checkpoint} is damaged: {MANIFEST} gives no size and checksum of {name}")
    return manifest


def checksums(paths: Iterable[Path]) -> dict[str, list[int]]:
    """[bytes, CRC-32] by file name."""
    return {path.name: [path.stat().st_size, _crc(path)] for path in paths}


def damage(checkpoint: Path, files: Mapping[str, list[int]], names: Iterable[str]) -> dict[str, str]:
    """What is wrong with each of `names` that is not as `files`, the manifest's, has it."""
    found: dict[str, str] = {}
    for name in names:
        path, (size, crc) = checkpoint / name, files[name]
        try:
            if not path.is_file():
                found[name] = "is missing"
            elif path.stat().st_size != size:
                found[name] = f"has {path.stat().st_size} bytes, expected {size}"
            elif _crc(path) != crc:
                found[name] = "does not match its checksum"
        except OSError as error:
            found[name] = f"cannot be read: {error.strerror}"
    return found


def make_room(root: Path, step: int) -> None:
    """The empty folder to write `step` into; what earlier saves left half done is removed."""
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob(".step-*.tmp"):
        shutil.rmtree(stale)
    for replaced in root.glob(".step-*.old"):
        current = root / replaced.name.removeprefix(".").removesuffix(".old")
        if current.exists():
            remove(replaced)
        else:
            replaced.rename(current)
    partial_path(root, step).mkdir(mode=0o700)


def publish(root: Path, step: int, manifest: Mapping[str, Any]) -> None:
    """Make the written folder the checkpoint of `step`: at every instant the old one or the new one is found whole."""
    partial, final = partial_path(root, step), final_path(root, step)
    with (partial / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    for path in partial.iterdir():
        path.chmod(0o600)
    _sync_folder(partial)
    old = root / f".step-{step:06d}.old"
    if final.exists():
        remove(old)
        final.rename(old)
    partial.rename(final)
    _sync_folder(root)
    remove(old)


def prune(root: Path, step: int, *, keep: int, keep_every: int) -> None:
    """After the save of `step`, remove all checkpoints up to it but the `keep` newest and every `keep_every`-th step.

    `keep` 0 removes none. Later steps, which a run that went back has left, are neither counted nor removed.
    """
    if not keep:
        return
    steps = sorted(int(match["step"]) for path in root.glob("step-*") if (match := _NAME.match(path.name)))
    earlier = [number for number in steps if number <= step]
    for number in earlier[:-keep]:
        if not (keep_every and number % keep_every == 0):
            remove(final_path(root, number))


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint's folder if it exists: renamed out of sight first, so that no half is taken for whole."""
    if not checkpoint.exists():
        return
    doomed = checkpoint.with_name(f".{checkpoint.name.lstrip('.')}.gone.tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_CRC_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
