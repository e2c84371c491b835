"""Write a model, or anything that can be read as one, as a Hugging Face folder in either name style."""

# E experts over the whole group   F output features   D input features

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from moe_runtime.checkpoint.hf.load import agree
from moe_runtime.checkpoint.hf.names import Names, Piece, Style, names_of
from moe_runtime.checkpoint.hf.reader import Box, Source, check_no_nan
from moe_runtime.checkpoint.hf.writer import MAX_SHARD_BYTES, Shard, ShardWriter, Spec, plan_shards, write_index
from moe_runtime.checkpoint.tensors import global_view, local_of, named_parameters, split_member
from moe_runtime.comm.layout import ParallelLayout, layout_of
from moe_runtime.core.errors import CheckpointError
from moe_runtime.tensor import QuantizedTensor

__all__ = ["SaveOptions", "save", "write"]

_CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """How a folder is written.

    style  names: one tensor an expert where the architecture has them so, or one a layer
    dtype  of floating-point tensors, but for those that stay in float32; None: as they are
    max_shard_bytes  of a file; a tensor that is larger has its own
    drop   regular expressions of tensors that may be left out because Hugging Face's class does not have them
    """

    style: Style = "per_expert"
    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    drop: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.style not in ("per_expert", "fused"):
            raise ValueError(f"style must be 'per_expert' or 'fused', got {self.style!r}")
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be at least 1, got {self.max_shard_bytes}")


@torch.no_grad()
def save(
    model: nn.Module, folder: str | Path, *, names: Names | None = None, options: SaveOptions | None = None
) -> Path:
    """Write `model` to a new folder that `from_pretrained` opens; every rank calls it. Returns the folder.

    Quantized experts are written as the values they stand for. Of one tensor at a time the ranks gather what its files
    need: experts go to files of the rank that holds them where each has its own tensor, else to rank 0's.
    Raises CheckpointError on every rank for a folder that is not empty or cannot be written, and for a selection bias
    that is not zero, which the Hugging Face class has no place for, unless `options.drop` names it.
    """
    names, options = names_of(model) if names is None else names, options or SaveOptions()
    live = _LiveModel(model, names)
    kept = sorted(name for name in names.own if not _may_drop(name, options))
    agree(next(filter(None, [_unplaced(name, live.gather(name, over_experts=True)[0]) for name in kept]), ""))
    specs = [spec for name in names.shapes if name not in names.own for spec in live.specs(name, options)]
    return _to_new_folder(Path(folder), names, specs, options, lambda writer: _write_live(live, names, options, writer))


@torch.no_grad()
def write(
    source: Source,
    folder: str | Path,
    *,
    names: Names,
    options: SaveOptions | None = None,
    files: Sequence[Path] = (),
) -> Path:
    """Write what `source` says of each tensor of `names` to a new folder, one tensor at a time, in this process.

    files  copied into the folder as they are: a tokenizer's
    """
    options = options or SaveOptions()
    for name in names.own:
        if name in source and not _may_drop(name, options):
            values = source.read(name, tuple((0, size) for size in names.shapes[name]))
            agree(_unplaced(name, values))
    pieces = names.pieces[options.style]
    held = [(name, piece) for name in names.shapes if name not in names.own for piece in pieces[name]]
    specs = [
        Spec(
            key=piece.key,
            dtype=_dtype(name, source.dtype(name), names, options),
            shape=piece.disk_shape(names.shapes[name]),
        )
        for name, piece in held
    ]

    def write_all(writer: ShardWriter) -> None:
        for (name, piece), spec in zip(held, specs, strict=True):
            values = source.read(name, piece.box(names.shapes[name]))
            check_no_nan(name, values, Path(folder))
            writer.add(spec.key, _as_on_disk(values, piece).to(spec.dtype))
        for file in files:
            shutil.copyfile(file, writer.folder / file.name)

    return _to_new_folder(Path(folder), names, specs, options, write_all)


def _to_new_folder(
    folder: Path, names: Names, specs: Sequence[Spec], options: SaveOptions, fill: Callable[[ShardWriter], None]
) -> Path:
    """Write beside, rename when whole: a folder that was cut short is never taken for one."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    beside = folder.with_name(f".{folder.name}.tmp")
    shards = plan_shards(specs, options.max_shard_bytes)
    agree(_on_first_rank(rank, folder, lambda: _make_room(folder, beside)))
    writer = ShardWriter(beside, [shard for shard in shards if shard.specs[0].writer == rank])
    problem = ""
    try:
        fill(writer)
    except (OSError, CheckpointError) as error:
        problem = _sentence(folder, error)
    finally:
        writer.close()
    try:
        agree(problem)
        agree(_on_first_rank(rank, folder, lambda: _publish(beside, folder, names, shards)))
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
        raise
    return folder


def _on_first_rank(rank: int, folder: Path, action: Callable[[], None]) -> str:
    if rank:
        return ""
    try:
        action()
    except (OSError, CheckpointError) as error:
        return _sentence(folder, error)
    return ""


def _sentence(folder: Path, error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{folder} could not be written: {error}"


def _make_room(folder: Path, beside: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already and is not empty: expected a new folder")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)


def _publish(beside: Path, folder: Path, names: Names, shards: Sequence[Shard]) -> None:
    write_index(beside, shards)
    config = json.loads(names.config)
    config.pop("torch_dtype", None)
    config["dtype"] = str(_main_dtype(shards)).removeprefix("torch.")
    (beside / _CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if folder.exists():
        folder.rmdir()
    beside.rename(folder)


def _main_dtype(shards: Sequence[Shard]) -> torch.dtype:
    """What most bytes are: the dtype that `from_pretrained` gives the whole model."""
    sizes: dict[torch.dtype, int] = {}
    for spec in (spec for shard in shards for spec in shard.specs if spec.dtype.is_floating_point):
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _dtype(name: str, own: torch.dtype, names: Names, options: SaveOptions) -> torch.dtype:
    if options.dtype is None or not own.is_floating_point:
        return own
    return torch.float32 if name in names.fp32 else options.dtype


def _as_on_disk(values: Tensor, piece: Piece) -> Tensor:
    values = values if piece.expert is None else values[0]
    return values.transpose(-1, -2) if piece.transposed else values


# ---- a live model ----


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """A tensor of a live model: its parameters on this rank (one, or one an expert in id order)."""

    parameters: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


class _LiveModel:
    """The tensors of a model whose ranks each hold a part."""

    def __init__(self, model: nn.Module, names: Names) -> None:
        self.layout: ParallelLayout = layout_of(model)
        self._names = names
        self._held: dict[str, _Held] = {}
        for name, parameter in named_parameters(model):
            self._add(name, parameter.detach())
        persistent = {name.removeprefix("module.") for name in model.state_dict(keep_vars=True)}
        for name, buffer in model.named_buffers():
            if (key := name.removeprefix("module.")) in persistent:
                self._add(key, buffer)
        lacking = [name for name in names.shapes if name not in self._held]
        extra = [name for name in self._held if name not in names.shapes]
        if lacking or extra:
            raise ValueError(f"the model's tensors are not those of its map of names: {(lacking + extra)[0]} is in one")

    def _add(self, name: str, tensor: Tensor) -> None:
        held = self._held.setdefault(split_member(name)[0], _Held())
        held.names.append(name)
        held.parameters.append(tensor)

    def splits_experts(self, name: str) -> bool:
        """Whether ranks hold different experts of it."""
        return self.layout.expert > 1 and self._held[name].names[0] in self.layout.expert_parameters

    def specs(self, name: str, options: SaveOptions) -> Iterator[Spec]:
        """What is written of a tensor; every rank finds the same."""
        shape = self._names.shapes[name]
        own = self._held[name].parameters[0].dtype
        for piece in self._names.pieces[options.style][name]:
            writer = 0
            if piece.expert is not None and self.splits_experts(name):
                assert self.layout.expert_mesh is not None
                owner = piece.expert // (shape[0] // self.layout.expert)
                # The first rank of those that hold the expert: replica 0, expert-data rank 0.
                writer = int(self.layout.expert_mesh.mesh[0, owner, 0])
            yield Spec(
                key=piece.key,
                dtype=_dtype(name, own, self._names, options),
                shape=piece.disk_shape(shape),
                writer=writer,
            )

    def gather(self, name: str, *, over_experts: bool) -> tuple[Tensor, int]:
        """The whole tensor, or this expert rank's experts of it, and the first one's id. Every rank calls it."""
        held = self._held[name]
        if split_member(held.names[0])[1] is not None:
            mine = torch.stack([_whole(_values(parameter)) for parameter in held.parameters])
            value = mine
            if over_experts and self.splits_experts(name):
                group = self.layout.expert_group
                assert group is not None
                parts = [torch.empty_like(mine) for _ in range(self.layout.expert)]
                dist.all_gather(parts, mine.contiguous(), group=group)
                return torch.cat(parts), 0
            return value, self._first(name, mine.shape[0])
        parameter = _values(held.parameters[0])
        if over_experts and self.splits_experts(name):
            return _whole(global_view(held.names[0], parameter, self.layout)[1]), 0
        value = _whole(parameter)
        return value, self._first(name, value.shape[0]) if value.dim() else 0

    def _first(self, name: str, count: int) -> int:
        return self.layout.expert_rank * count if self.splits_experts(name) else 0


def _values(parameter: Tensor) -> Tensor:
    """High-precision values of a parameter, sharded as it is."""
    local = local_of(parameter)
    if not isinstance(local, QuantizedTensor):
        return parameter
    values = local.dequantize()
    if not isinstance(parameter, DTensor):
        return values
    return DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _whole(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local()


def _write_live(live: _LiveModel, names: Names, options: SaveOptions, writer: ShardWriter) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    failed: OSError | None = None
    for name, shape in names.shapes.items():
        if name in names.own:
            continue
        pieces = names.pieces[options.style][name]
        value, first = live.gather(name, over_experts=any(piece.expert is None for piece in pieces))
        for piece, spec in zip(pieces, live.specs(name, options), strict=True):
            if spec.writer != rank or failed is not None:
                continue
            part = value[_inside(piece.box(shape), first)] if shape else value
            try:
                writer.add(spec.key, _as_on_disk(part, piece).to(spec.dtype))
            except OSError as error:
                failed = error  # the others still gather with this rank
    if failed is not None:
        raise failed


def _inside(box: Box, first: int) -> tuple[slice, ...]:
    (start, stop), *rest = box
    shift = first if start >= first else 0
    return (slice(start - shift, stop - shift), *(slice(a, b) for a, b in rest))


def _may_drop(name: str, options: SaveOptions) -> bool:
    return any(re.search(pattern, name) for pattern in options.drop)


def _unplaced(name: str, values: Tensor) -> str:
    """What is wrong with leaving out a tensor that the Hugging Face class does not have."""
    if not values.any():
        return ""
    return (
        f"{name} is not zero and the Hugging Face class has no place for it, so that the written model would route "
        "differently; name it in `drop` to leave it out"
    )
