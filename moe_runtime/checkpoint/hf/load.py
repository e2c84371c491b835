"""Fill a model from a Hugging Face folder: each rank reads the part of each tensor that it holds, and no more."""

# E experts over the whole group   F output features   D input features

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moe_runtime.checkpoint.files import MANIFEST
from moe_runtime.checkpoint.hf.names import Names, names_of
from moe_runtime.checkpoint.hf.reader import Box, Reader, blocks, check_no_nan
from moe_runtime.checkpoint.hf.run import RunCheckpoint
from moe_runtime.checkpoint.tensors import local_of, named_parameters, parts_of, split_member
from moe_runtime.comm.layout import layout_of
from moe_runtime.core.errors import CheckpointError
from moe_runtime.formats import MXFP4, FP8Block
from moe_runtime.tensor import GroupedTensor, QuantizedTensor, Quantizer

__all__ = ["LoadReport", "agree", "load", "pack_experts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What a rank loaded. `packed`: tensors whose bytes were taken as they are, not dequantized."""

    num_tensors: int
    bytes_read: int
    packed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Target:
    """What this rank holds of a model's tensor: `local` is the part `box` of tensor `name`."""

    name: str
    local: Tensor
    box: Box


@torch.no_grad()
def load(
    model: nn.Module,
    folder: str | Path,
    *,
    names: Names | None = None,
    device: torch.device | str | None = None,
    ignore: Sequence[str] = (),
) -> LoadReport:
    """Fill every tensor of `model` from a Hugging Face folder, in either name style, or from a run's checkpoint.

    Every rank calls it. The model may be on meta (made real on `device`, the CPU unless given), sharded by `distribute`
    or not, its experts in high precision or quantized. Values are dequantized if need be, and cast to the model's
    dtype; experts that are stored in the folder's own format take its bytes. Beside the model at most 16 MiB of values,
    or a few rows, are held at a time, and one expert where experts are quantized; of a checkpoint one whole tensor.

    names   the model's map, where none is attached to it
    ignore  regular expressions of keys that may be left over in the folder
    Raises CheckpointError on every rank, naming keys, for missing, unmatched and duplicate keys, wrong shapes and NaN.
    """
    names = names_of(model) if names is None else names
    problem, report = "", None
    try:
        with _opened(Path(folder), names, ignore) as reader:
            _make_real(model, names, reader.tensors, torch.device(device or "cpu"))
            report = _fill(model, reader)
    except CheckpointError as error:
        problem = str(error)
    agree(problem)
    assert report is not None
    return report


def _opened(path: Path, names: Names, ignore: Sequence[str]) -> AbstractContextManager[Reader | RunCheckpoint]:
    is_checkpoint = (path / MANIFEST).is_file()
    return nullcontext(RunCheckpoint(path, names)) if is_checkpoint else Reader(path, names, ignore=ignore)


def agree(problem: str) -> None:
    """CheckpointError on every rank where any rank has a problem; every rank calls it."""
    problems: list[str] = [problem]
    if dist.is_initialized():
        gathered: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, problem)
        problems = [text or "" for text in gathered]
    first = next((text for text in problems if text), "")
    if first:
        raise CheckpointError(first)


def _make_real(model: nn.Module, names: Names, held: frozenset[str], device: torch.device) -> None:
    on_meta = [name for name, tensor in _tensors(model) if tensor.is_meta]
    if not on_meta:
        return
    if names.fill_rest is not None:
        names.fill_rest(model, device, held)
        return
    other = [name for name in on_meta if split_member(name)[0] not in held]
    if other:
        raise CheckpointError(f"{', '.join(other[:3])} is on meta and no folder holds it: make it real before load()")
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from named_parameters(model)
    yield from ((name.removeprefix("module."), buffer) for name, buffer in model.named_buffers())


def _fill(model: nn.Module, reader: Reader | RunCheckpoint) -> LoadReport:
    packed: list[str] = []
    done: set[str] = set()
    for target in _targets(model):
        if target.name not in reader:
            if target.name in reader.names.own:
                continue
            raise CheckpointError(f"{target.name} is in the model and not in its map of Hugging Face names")
        _check_shape(target, reader)
        if isinstance(target.local, QuantizedTensor):
            if _fill_quantized(target, target.local, reader):
                packed.append(target.name)
        elif target.local.numel():
            _fill_plain(target, reader)
        done.add(target.name)
    missed = sorted(reader.tensors - done)
    if missed:
        raise CheckpointError(f"{', '.join(missed[:3])} is in the map of Hugging Face names and not in the model")
    return LoadReport(num_tensors=len(done), bytes_read=reader.bytes_read, packed=tuple(packed))


def _targets(model: nn.Module) -> Iterator[_Target]:
    layout = layout_of(model)
    for name, parameter in named_parameters(model):
        key, parts = parts_of(name, parameter, layout)
        local = local_of(parameter.detach())
        shape, offset = _place(next(iter(parts.values())))
        if isinstance(local, QuantizedTensor):
            # Parts are whole experts; payloads differ from the weight in their other dimensions only.
            shape, offset = (shape[0], *local.shape[1:]), (offset[0], *(0 for _ in local.shape[1:]))
        yield _target(key, local, shape, offset)
    persistent = {name.removeprefix("module.") for name in model.state_dict(keep_vars=True)}
    for name, buffer in model.named_buffers():
        key = name.removeprefix("module.")
        if key in persistent:
            yield _target(key, buffer, tuple(buffer.shape), (0,) * buffer.dim())


def _target(key: str, local: Tensor, shape: tuple[int, ...], offset: tuple[int, ...]) -> _Target:
    box = tuple((start, start + size) for start, size in zip(offset, shape, strict=True))
    name, expert = split_member(key)
    if expert is None:
        return _Target(name, local, box)
    return _Target(name, local, ((expert, expert + 1), *box))


def _place(value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and global offset of this rank's part."""
    if not isinstance(value, DTensor):
        return tuple(value.shape), (0,) * value.dim()
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(shape), tuple(offset)


def _check_shape(target: _Target, reader: Reader | RunCheckpoint) -> None:
    whole = reader.names.shapes[target.name]
    if len(target.box) != len(whole) or any(stop > size for (_, stop), size in zip(target.box, whole, strict=True)):
        raise CheckpointError(f"{target.name} has shape {whole} in its map, and the model holds {target.box} of it")


def _fill_plain(target: _Target, reader: Reader | RunCheckpoint) -> None:
    local = target.local if target.local.dim() == len(target.box) else target.local[None]
    # Ordinary in-place copies into the storage that the optimizer and the wrappers know.
    local = local.plain() if isinstance(local, GroupedTensor) else local.detach()
    for part in blocks(target.box, torch.float32.itemsize):
        values = reader.read(target.name, part)
        check_no_nan(target.name, values, reader.path)
        index = tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(part, target.box, strict=True))
        local[index].copy_(values)


def _fill_quantized(target: _Target, local: QuantizedTensor, reader: Reader | RunCheckpoint) -> bool:
    """Expert by expert; True where the folder's bytes were taken as they are."""
    first, last = target.box[0]
    fmt, kept = local.quantizer.format, local.records.init.wanted
    members = [local] if local.dim() == 2 else list(local.unbind(0))
    if kept and local.dim() == 3:
        # Initial values belong to the whole tensor: they are kept, so holding them once more costs what they do.
        values = reader.read(target.name, target.box)
        check_no_nan(target.name, values, reader.path)
        local.copy_(values)
        return False
    all_packed = True
    for expert, member in zip(range(first, last), members, strict=True):
        given = None if kept else reader.read_packed(target.name, expert, fmt, local.dtype)
        if given is None:
            all_packed = False
            box = ((expert, expert + 1), *target.box[1:])
            values = reader.read(target.name, box)[0]
            check_no_nan(target.name, values, reader.path)
            member.copy_(values)
        else:
            check_no_nan(target.name, given.dequantize(torch.bfloat16), reader.path)
            member.copy_(given)
    return all_packed and last > first


def pack_experts(
    model: nn.Module, folder: str | Path, *, names: Names | None = None, ignore: Sequence[str] = ()
) -> tuple[str, ...]:
    """Give experts that the folder holds as quantized bytes frozen parameters, on meta, of that format.

    Between building a model on meta and distributing it; `load` then takes the bytes as they are. They are stored
    row-wise only: a base to train adapters on, in high precision or under a recipe with a `backward_override`.
    Returns the tensors it replaced; ones whose sizes are no whole blocks are left to be dequantized.
    """
    names = names_of(model) if names is None else names
    replaced: list[str] = []
    with Reader(Path(folder), names, ignore=ignore) as reader:
        for name, parameter in list(named_parameters(model)):
            tensor, expert = split_member(name)
            shape = names.shapes.get(tensor, ())
            if len(shape) != 3 or tensor not in reader or not reader.is_packed(tensor):
                continue
            if not parameter.is_meta or isinstance(parameter, DTensor):
                raise ValueError(f"{name} must be on meta and not distributed yet to be packed")
            fmt = MXFP4() if reader.is_mxfp4(tensor) else FP8Block(two_dimensional=True)
            block_rows, block_cols = fmt.block
            if reader.row_step(tensor) % block_rows or shape[2] % block_cols:
                continue
            quantizer = Quantizer(format=fmt, columnwise=False)
            kind = GroupedTensor.pack if expert is None else QuantizedTensor.quantized
            packed = kind(parameter.detach(), quantizer)
            owner, _, short = name.rpartition(".")
            setattr(model.get_submodule(owner), short, nn.Parameter(packed, requires_grad=False))
            replaced.append(name)
    return tuple(replaced)
