"""Adapter folders that PEFT opens, written and read: adapter_config.json and adapter_model.safetensors."""

# E experts   r rank   F out features   D in features

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_runtime.checkpoint.hf import Folder, Names, Piece, Style, names_of
from moe_runtime.checkpoint.hf.load import agree
from moe_runtime.checkpoint.hf.writer import Shard, ShardWriter, Spec
from moe_runtime.core.errors import CheckpointError
from moe_runtime.integrations.peft.adapters import add_lora, lora_config, unwrapped
from moe_runtime.integrations.peft.linear import BASE
from moe_runtime.integrations.peft.packing import Factors, from_fused, from_pieces, padded, to_fused, to_pieces
from moe_runtime.integrations.peft.state import load_lora_state_dict, lora_state_dict
from moe_runtime.nn import LoRAConfig
from moe_runtime.nn.adapters import adapted_linears, grouped_linears

__all__ = ["export_peft", "import_peft"]

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B = "lora_A.weight", "lora_B.weight"

# What an adapter's config must not say, as no layer here would do it.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
}


# Out ------------------------------------------------------------------------------------------------------------------


def export_peft(model: nn.Module, folder: str | Path, *, style: Style = "fused", base: str = "") -> Path:
    """Write the adapters to a new folder that `PeftModel.from_pretrained` opens; every rank calls it.

    style  of experts: "fused" is for transformers 5, whose experts are one parameter a layer; "per_expert" names a
           linear layer for each expert and projection, as transformers 4 and servers have them
    base   name or path of the base model, for who reads the folder
    PEFT has no dropout for fused experts, so that their folder says 0. A factor that experts share is written for each.
    Raises CheckpointError on every rank for a folder that is not empty or cannot be written.
    """
    model, folder = unwrapped(model), Path(folder)
    names, config = names_of(model), lora_config(model)
    state = lora_state_dict(model)
    tensors: dict[str, Tensor] = {}
    modules: set[str] = set()
    parameters: set[str] = set()
    for name in adapted_linears(model):
        shape = names.shapes[f"{name}.weight"]
        factors = _expanded(state[f"{name}.lora.a.weight"], state[f"{name}.lora.b.weight"], shape[0])
        pieces = names.pieces[style][f"{name}.weight"]
        if pieces[0].expert is None:
            parameters.add(pieces[0].key)
            inside = _is_inner(name, adapted_linears(model))
            tensors |= _pair(_fused_stem(pieces[0], inside=inside), *to_fused(factors))
            continue
        for key, (a, b) in to_pieces(factors, pieces).items():
            modules.add(key.removesuffix(".weight"))
            tensors |= _pair(key.removesuffix(".weight"), a, b)
    for name in _adapted_linear_names(state):
        key = names.pieces[style][f"{name}.{BASE}.weight"][0].key.removesuffix(".weight")
        modules.add(key)
        tensors |= _pair(key, state[f"{name}.lora_A.default.weight"], state[f"{name}.lora_B.default.weight"])
    every = {piece.key for pieces in names.pieces[style].values() for piece in pieces}
    text = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "bias": "none",
        "r": config.rank,
        "lora_alpha": int(config.alpha) if float(config.alpha).is_integer() else config.alpha,
        "use_rslora": config.use_rslora,
        "lora_dropout": 0.0 if parameters else config.dropout,
        "target_modules": _shortest(modules, {key.removesuffix(".weight") for key in every}),
        "target_parameters": _shortest(parameters, every, depth=2) or None,
    }
    agree(_on_first_rank(lambda: _write(folder, text, tensors)))
    return folder


def _expanded(a: Tensor, b: Tensor, num_experts: int) -> Factors:
    return Factors(a.expand(num_experts, -1, -1), b.expand(num_experts, -1, -1))


def _is_inner(name: str, adapted: Mapping[str, Any]) -> bool:
    """Whether PEFT's wrapper of this parameter stands inside another one: of two, the first that the class declares."""
    around, _, leaf = name.rpartition(".")
    return leaf == "gate_up" and f"{around}.down" in adapted


def _fused_stem(piece: Piece, *, inside: bool) -> str:
    return piece.key.rpartition(".")[0] + (f".{BASE}" if inside else "")


def _pair(stem: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {f"{_PREFIX}{stem}.{_A}": a, f"{_PREFIX}{stem}.{_B}": b}


def _adapted_linear_names(state: Mapping[str, Tensor]) -> list[str]:
    suffix = ".lora_A.default.weight"
    return [name.removesuffix(suffix) for name in state if name.endswith(suffix)]


def _shortest(chosen: set[str], every: set[str], depth: int = 1) -> list[str]:
    """Ends of names that mean `chosen` among `every`, and no others; whole names where those would mean more."""
    found: set[str] = set()
    for name in chosen:
        end = ".".join(name.split(".")[-depth:])
        alike = {other for other in every if other == end or other.endswith(f".{end}")}
        found.add(end if alike <= chosen else name)
    return sorted(found)


def _on_first_rank(action: Any) -> str:
    if dist.is_initialized() and dist.get_rank():
        return ""
    try:
        action()
    except (OSError, CheckpointError) as error:
        return str(error)
    return ""


def _write(folder: Path, text: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already and is not empty: expected a new folder")
    beside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    specs = [Spec(key=key, dtype=t.dtype, shape=tuple(t.shape)) for key, t in sorted(tensors.items())]
    writer = ShardWriter(beside, [Shard(file=WEIGHTS_FILE, specs=tuple(specs))])
    try:
        for key, tensor in sorted(tensors.items()):
            writer.add(key, tensor)
    finally:
        writer.close()
    (beside / CONFIG_FILE).write_text(json.dumps(text, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if folder.exists():
        folder.rmdir()
    beside.rename(folder)


# In -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Given:
    """A folder's adapters by our names: of grouped layers, and of ordinary ones."""

    grouped: dict[str, Factors]
    linear: dict[str, tuple[Tensor, Tensor]]

    @property
    def rank(self) -> int:
        """The largest."""
        ranks = [factors.rank for factors in self.grouped.values()] + [a.shape[0] for a, _ in self.linear.values()]
        return max(ranks)


def import_peft(model: nn.Module, folder: str | Path) -> LoRAConfig:
    """Fill adapters from a folder that PEFT or `export_peft` wrote, in either name style; every rank calls it.

    A model without adapters gets those that the folder has (before `distribute`, and once its parameters are real); one
    that has adapters must have the same ones. Where a folder holds projections apart that are fused here, with an A of
    their own each, ranks add up, and others are padded to the largest: the update is the same. Returns the config.
    Raises CheckpointError on every rank for a folder of another base, another kind of adapter, or none at all.
    """
    model = unwrapped(model)
    problem, config, given = "", None, None
    try:
        text = _read_config(Path(folder))
        given = _read(Path(folder), model, names_of(model), text)
        config = _config(text, given)
        if adapted_linears(model):
            _check_same(lora_config(model), config, Path(folder))
    except CheckpointError as error:
        problem = str(error)
    agree(problem)
    assert given is not None and config is not None
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model must be real before adapters are imported, got parameters on meta: load() first")
    if not adapted_linears(model):
        add_lora(model, config)
    try:
        load_lora_state_dict(model, _state(given, config, shared=lora_config(model).share_outer))
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return lora_config(model)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        text = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"expected an adapter folder with a {CONFIG_FILE}, got {folder}: {error}") from error
    if not isinstance(text, dict) or text.get("peft_type") != "LORA":
        raise CheckpointError(f"{path} must describe an adapter of peft_type 'LORA', got {text!r:.80}")
    for key, allowed in _REFUSED.items():
        if text.get(key) not in allowed:
            raise CheckpointError(f"{path}: {key} must be {allowed[0]!r}, got {text[key]!r}, which no layer here does")
    return text


def _read(folder: Path, model: nn.Module, names: Names, text: Mapping[str, Any]) -> _Given:
    given = _Given({}, {})
    with Folder(folder) as opened:
        values = {
            key.removeprefix(_PREFIX): opened.read(key, tuple((0, n) for n in opened.shape(key))) for key in opened
        }
    bad = next((key for key, value in values.items() if not bool(value.isfinite().all())), None)
    if bad is not None:
        raise CheckpointError(f"{folder}: {bad} holds values that are not finite")
    pairs = _pairs(folder, values)
    for name in grouped_linears(model):
        factors = _grouped(folder, names, name, int(text["r"]), pairs)
        if factors is not None:
            given.grouped[name] = factors
    for name in [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]:
        own = name.removesuffix(f".{BASE}")
        for style in names.pieces.values():
            key = style[f"{name}.weight"][0].key.removesuffix(".weight") if f"{name}.weight" in style else ""
            if key in pairs:
                given.linear[own] = pairs.pop(key)
                _check_pair(folder, key, *given.linear[own], (int(text["r"]), *names.shapes[f"{name}.weight"]))
    if pairs or not (given.grouped or given.linear):
        rest = next(iter(pairs), "nothing")
        raise CheckpointError(f"{folder} belongs to another base: it holds adapters of {rest}, which the model has not")
    return given


def _pairs(folder: Path, values: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    stems = dict.fromkeys(key.removesuffix(f".{_A}").removesuffix(f".{_B}") for key in values)
    pairs = {}
    for stem in stems:
        a, b = values.get(f"{stem}.{_A}"), values.get(f"{stem}.{_B}")
        if a is None or b is None or a.dim() != 2 or b.dim() != 2:
            raise CheckpointError(f"{folder}: expected matrices {stem}.{_A} and {stem}.{_B}, got another or one alone")
        pairs[stem] = (a, b)
    return pairs


def _grouped(
    folder: Path, names: Names, name: str, rank: int, pairs: dict[str, tuple[Tensor, Tensor]]
) -> Factors | None:
    """The factors of a grouped layer, whose pairs are taken out of `pairs`; None where it has none."""
    shape = names.shapes[f"{name}.weight"]
    num_experts, rows, cols = shape
    per_expert = [p for p in names.pieces["per_expert"][f"{name}.weight"] if p.expert is not None]
    held = {p.key: pairs.pop(key) for p in per_expert if (key := p.key.removesuffix(".weight")) in pairs}
    (fused,) = names.pieces["fused"][f"{name}.weight"]
    for stem in (_fused_stem(fused, inside=True), _fused_stem(fused, inside=False)):
        # The widths say which of the two parameters of a module this is.
        if not held and stem in pairs and (pairs[stem][0].shape[1], pairs[stem][1].shape[0]) == (cols, rows):
            a, b = pairs.pop(stem)
            if a.shape[0] != b.shape[1] or a.shape[0] != num_experts * rank:
                raise CheckpointError(
                    f"{folder} belongs to another base: {stem} should have rank {rank} for each of {num_experts} "
                    f"experts, got factors {tuple(a.shape)} and {tuple(b.shape)}"
                )
            return from_fused(a, b, num_experts)
    if not held:
        return None
    boxes = {piece.key: piece.rows or (0, rows) for piece in per_expert}
    for key, (a, b) in held.items():
        start, stop = boxes[key]
        _check_pair(folder, key, a, b, (rank, stop - start, cols))
    return from_pieces(held, per_expert, shape)


def _check_pair(folder: Path, key: str, a: Tensor, b: Tensor, sizes: tuple[int, ...]) -> None:
    rank, rows, cols = sizes
    if a.shape != (rank, cols) or b.shape != (rows, rank):
        raise CheckpointError(
            f"{folder} belongs to another base: {key} should have factors ({rank}, {cols}) and ({rows}, {rank}), got "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )


def _config(text: Mapping[str, Any], given: _Given) -> LoRAConfig:
    rank, alpha, rslora = int(text["r"]), float(text["lora_alpha"]), bool(text.get("use_rslora", False))
    growth = given.rank / rank
    return LoRAConfig(
        given.rank,
        alpha * (math.sqrt(growth) if rslora else growth),
        use_rslora=rslora,
        dropout=float(text.get("lora_dropout") or 0.0),
        target_modules=(*given.grouped, *given.linear),
    )


def _check_same(own: LoRAConfig, given: LoRAConfig, folder: Path) -> None:
    if (own.rank, round(own.scale, 9)) != (given.rank, round(given.scale, 9)):
        raise CheckpointError(
            f"{folder} has adapters of another configuration: expected rank {own.rank} and scale {own.scale:g}, got "
            f"rank {given.rank} and scale {given.scale:g}"
        )


def _state(given: _Given, config: LoRAConfig, *, shared: bool) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, factors in given.grouped.items():
        a, b = padded(factors, config.rank)
        leaf = name.rpartition(".")[2]
        for kind, value, is_shared in (("a", a, leaf == "gate_up"), ("b", b, leaf == "down")):
            if shared and is_shared:
                if not all(torch.equal(value[0], other) for other in value):
                    raise ValueError(f"experts of {name} should have factor {kind} in common, and theirs differ")
                value = value[:1]
            state[f"{name}.lora.{kind}.weight"] = value
    for name, (a, b) in given.linear.items():
        wide = padded(Factors(a[None], b[None]), config.rank)
        state |= {f"{name}.lora_A.default.weight": wide.a[0], f"{name}.lora_B.default.weight": wide.b[0]}
    return state
