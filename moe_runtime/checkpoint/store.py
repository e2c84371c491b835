"""Checkpoints on disk: a folder a step, written beside and renamed when whole, verified before it is read.

`save` writes at once. `AsyncSaver` copies the state to the host and writes while training goes on. What the files are,
and which old ones are removed, is in `files`.
"""

import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from moe_runtime.checkpoint import files, metadata, tensors
from moe_runtime.checkpoint.files import DamagedCheckpointError
from moe_runtime.core.errors import CheckpointError
from moe_runtime.core.log import get_logger

_LOGGER = get_logger(__name__)


def save(
    root: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    facts: Mapping[str, Any],
    *,
    keep: int = 0,
    keep_every: int = 0,
) -> Path:
    """Write the state after `step` steps under `root`; every rank calls it. Returns the new folder.

    facts       JSON values to find again in `read_facts`: data position, configuration
    keep        newest checkpoints kept, older ones removed; 0 keeps all
    keep_every  steps whose multiples are kept for ever; 0 for none
    Raises CheckpointError on every rank if any rank failed; earlier checkpoints are untouched and no part stays behind.
    """
    writing = _Writing(root=root, step=step, facts=dict(facts), keep=keep, keep_every=keep_every)
    return _write_whole(writing, _entries(model, optimizer), _Ranks())


class AsyncSaver:
    """Saves as `save` does, on a thread: training waits only for a copy of its state in host memory.

    At most one save is under way: the next save waits for it. So one copy exists, of the bytes that this rank holds; it
    is kept until `close` and written over. What a save raised, the next `save` or `wait` raises, on every rank. Make
    it, and call its methods, on every rank at the same point.
    """

    def __init__(self, *, timeout_seconds: float) -> None:
        group: Any = None
        if dist.is_initialized():
            # The thread's collectives must not mix with those of training.
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._ranks = _Ranks(group)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None
        self._staged: dict[str, Tensor] = {}

    @property
    def has_failed(self) -> bool:
        """Whether the save under way has ended on this rank, with an error that `wait` will raise."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def save(
        self,
        root: Path,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        facts: Mapping[str, Any],
        *,
        keep: int = 0,
        keep_every: int = 0,
    ) -> Path:
        """Wait for the save before, copy the state, and start to write it. Returns where it will be; see `save`."""
        self.wait()
        self._staged = {name: self._stage(name, value) for name, value in _entries(model, optimizer).items()}
        writing = _Writing(root=root, step=step, facts=dict(facts), keep=keep, keep_every=keep_every)
        self._pending = self._thread.submit(_write_whole, writing, self._staged, self._ranks)
        return files.final_path(root, step)

    def wait(self) -> Path | None:
        """The folder of the save under way, once it is whole; None if there is none. Raises what it raised."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        """Give up the thread and the copy; a save under way is finished first, its error dropped."""
        self._pending = None
        self._thread.shutdown()
        self._staged = {}

    def _stage(self, name: str, value: Tensor) -> Tensor:
        """`value` in host memory, over the last save's copy where that fits: fresh pages cost more than copying."""
        before = self._staged.get(name)
        if before is None or type(before) is not type(value) or not _same_layout(before, value):
            return value.to("cpu", copy=True)
        tensors.local_of(before).copy_(tensors.local_of(value))
        return before


def _same_layout(staged: Tensor, value: Tensor) -> bool:
    own, other = tensors.local_of(staged), tensors.local_of(value)
    is_same = (own.shape, own.dtype, staged.shape) == (other.shape, other.dtype, value.shape)
    return is_same and getattr(staged, "placements", None) == getattr(value, "placements", None)


def latest(root: Path) -> Path | None:
    """The newest checkpoint under `root` that was written to its end, or None; `load_latest` looks at its files too."""
    found = files.whole(root)
    return found[0] if found else None


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """What `save` was given, and "step". Raises CheckpointError for a folder that is no whole checkpoint."""
    manifest = files.read_manifest(checkpoint)
    return {**manifest["facts"], "step": manifest["step"]}


def verify(checkpoint: Path) -> dict[str, list[int]]:
    """Global shape of every entry of a whole, undamaged checkpoint; CheckpointError for any other. In one process."""
    manifest = files.read_manifest(checkpoint)
    _raise_damage(checkpoint, files.damage(checkpoint, manifest["files"], sorted(manifest["files"])))
    return manifest["shapes"]


def entry_dtypes(checkpoint: Path) -> dict[str, torch.dtype]:
    """The dtype of every entry."""
    described = metadata.read(checkpoint, files.read_manifest(checkpoint)["files"]).state_dict_metadata
    return {
        name: entry.properties.dtype for name, entry in described.items() if isinstance(entry, TensorStorageMetadata)
    }


def read_entries(checkpoint: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Entries of a checkpoint by name, whole, without the model they belong to. In one process."""
    manifest = files.read_manifest(checkpoint)
    described = metadata.read(checkpoint, manifest["files"])
    dtypes = entry_dtypes(checkpoint)
    entries: dict[str, Any] = {name: torch.empty(manifest["shapes"][name], dtype=dtypes[name]) for name in names}
    _read(checkpoint, described, entries, no_dist=True)
    return entries


def load(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Fill model, optimizer and this rank's random state in place; every rank calls it. Returns `read_facts`.

    Any expert and data degree may load what any other saved. Raises CheckpointError, before anything is changed, for a
    damaged file, for metadata that ask for code, or for the checkpoint of a model whose entries differ.
    """
    ranks = _Ranks()
    manifest = ranks.from_first(lambda: files.read_manifest(checkpoint))
    if not optimizer.state:
        tensors.create_optimizer_state(optimizer)
    entries = _entries(model, optimizer)
    # A stranger's metadata are refused before anybody believes its shapes.
    described = ranks.all_or_none(lambda: metadata.read(checkpoint, manifest["files"]))
    own = sorted(manifest["files"])[ranks.rank :: ranks.size]
    _raise_damage(checkpoint, ranks.merge(files.damage(checkpoint, manifest["files"], own)))
    _check_shapes(checkpoint, manifest["shapes"], ranks.merge(tensors.shapes(entries)))
    saved = {key: value for key, value in entries.items() if key in manifest["shapes"]}
    _read(checkpoint, described, saved, no_dist=not dist.is_initialized())
    tensors.forget_init_values(model)
    _restore_random_state(saved)
    return {**manifest["facts"], "step": manifest["step"]}


def load_latest(root: Path, model: nn.Module, optimizer: Optimizer) -> tuple[Path, dict[str, Any]]:
    """`load` the newest whole and undamaged checkpoint under `root`: (its folder, its facts). Every rank calls it.

    Damaged ones are named in a warning and passed over. Raises CheckpointError where none is left, or where the newest
    undamaged one belongs to another model.
    """
    for checkpoint in _Ranks().from_first(lambda: files.whole(root)):
        try:
            return checkpoint, load(checkpoint, model, optimizer)
        except DamagedCheckpointError as error:
            _LOGGER.warning("%s; trying the one before it", error)
    raise CheckpointError(f"nothing to resume: {root} holds no whole, undamaged checkpoint")


# ---- writing ----


@dataclass(frozen=True, kw_only=True, slots=True)
class _Writing:
    """One save: what is written where, besides the tensors."""

    root: Path
    step: int
    facts: dict[str, Any]
    keep: int
    keep_every: int


def _write_whole(writing: _Writing, entries: dict[str, Tensor], ranks: "_Ranks") -> Path:
    root, step = writing.root, writing.step
    partial = files.partial_path(root, step)
    problem = ranks.on_first(lambda: files.make_room(root, step))
    if not problem:
        problem = _write(partial, entries, ranks)
    if not problem:
        manifest = {
            "format": files.FORMAT,
            "step": step,
            "facts": writing.facts,
            "shapes": ranks.merge(tensors.shapes(entries)),
            "files": ranks.merge(files.checksums(_own_files(partial, ranks.rank))),
        }
        problem = ranks.on_first(lambda: files.publish(root, step, manifest))
    if problem:
        ranks.on_first(lambda: shutil.rmtree(partial, ignore_errors=True))
        raise CheckpointError(f"the checkpoint of step {step} could not be written to {root}: {problem}")
    problem = ranks.on_first(lambda: files.prune(root, step, keep=writing.keep, keep_every=writing.keep_every))
    if problem and ranks.rank == 0:
        _LOGGER.warning("old checkpoints under %s could not be removed: %s", root, problem)
    _LOGGER.info("checkpoint %s", files.final_path(root, step))
    return files.final_path(root, step)


def _write(partial: Path, entries: dict[str, Tensor], ranks: "_Ranks") -> str:
    # torch collects what any rank raised and raises it on all, so no rank goes on alone.
    try:
        with _one_process_is_fine():
            writer = dcp.FileSystemWriter(partial, sync_files=True)
            dcp.save(entries, storage_writer=writer, process_group=ranks.group, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        rank, failure = sorted(error.failures.items())[0]
        # torch's writer says of a full disk only that a position is not as it should be.
        return f"rank {rank}: {failure[0]} ({shutil.disk_usage(partial.parent).free:,} bytes are free there)"
    except OSError as error:
        return str(error)
    return ""


def _own_files(folder: Path, rank: int) -> list[Path]:
    mine = sorted(folder.glob(f"__{rank}_*"))
    return [*mine, folder / metadata.FILE] if rank == 0 else mine


# ---- reading ----


def _read(checkpoint: Path, described: Metadata, entries: dict[str, Any], *, no_dist: bool) -> None:
    try:
        with _one_process_is_fine():
            dcp.load(entries, storage_reader=metadata.Reader(checkpoint, described), no_dist=no_dist)
    except CheckpointException as error:
        rank, failure = sorted(error.failures.items())[0]
        if isinstance(failure[0], pickle.UnpicklingError):
            # torch reads tensors with weights_only, and says at length what a file asked for instead.
            asked = re.search(r"GLOBAL ([\w.]+)", str(failure[0]))
            what = f"{asked[1]}, which no tensor needs" if asked else "what no tensor needs"
            problem = f"{checkpoint} is damaged: a tensor's file asks for {what}, and is refused"
            raise DamagedCheckpointError(problem) from error
        raise CheckpointError(f"{checkpoint} cannot be read: rank {rank}: {failure[0]}") from error


def _raise_damage(checkpoint: Path, problems: Mapping[str, str]) -> None:
    for name, what in sorted(problems.items()):
        raise DamagedCheckpointError(f"{checkpoint} is damaged: {name} {what}")


def _entries(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    entries = {f"model.{name}": value for name, value in tensors.model_tensors(model).items()}
    entries.update((f"optim.{name}", value) for name, value in tensors.optimizer_tensors(model, optimizer).items())
    rank = _Ranks().rank
    entries[f"random.{rank}.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        entries[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return entries


def _restore_random_state(entries: Mapping[str, Tensor]) -> None:
    rank = _Ranks().rank
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


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """torch warns whenever there is no process group, though a single process needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


# ---- ranks ----


@dataclass(frozen=True)
class _Ranks:
    """What the ranks of a group, by default all of them, must agree on; one process agrees with itself."""

    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def on_first(self, action: Callable[[], object]) -> str:
        """Run `action` on rank 0; what went wrong, if anything, on every rank."""
        problem = ""
        if self.rank == 0:
            try:
                action()
            except OSError as error:
                problem = str(error)
        return self._broadcast(problem)

    def from_first(self, action: Callable[[], Any]) -> Any:
        """What `action` returns, or the CheckpointError it raises, on rank 0: the same on every rank."""
        result: Any = None
        if self.rank == 0:
            try:
                result = action()
            except CheckpointError as error:
                result = error
        result = self._broadcast(result)
        if isinstance(result, CheckpointError):
            raise result
        return result

    def all_or_none(self, action: Callable[[], Any]) -> Any:
        """This rank's result of `action`; a CheckpointError of any rank is raised on all."""
        result, error = None, None
        try:
            result = action()
        except CheckpointError as raised:
            error = raised
        for other in self._gather(error):
            if other is not None:
                raise other
        return result

    def merge(self, own: dict[str, Any]) -> dict[str, Any]:
        """The union of every rank's dict."""
        return {key: value for part in self._gather(own) for key, value in part.items()}

    def _broadcast(self, value: Any) -> Any:
        if not dist.is_initialized():
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def _gather(self, own: Any) -> list[Any]:
        if not dist.is_initialized():
            return [own]
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, own, group=self.group)
        return parts
