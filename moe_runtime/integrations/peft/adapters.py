"""add_lora: find the layers named, freeze everything, put adapters beside them."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moe_runtime.checkpoint.hf import Names, Piece, attach_names, names_of
from moe_runtime.checkpoint.tensors import named_parameters
from moe_runtime.integrations.peft.linear import BASE, initialize_linears, inject
from moe_runtime.nn import GroupedLoRA, LoRAConfig, StorageReport, storage_report
from moe_runtime.nn.adapters import AdaptedLinear, adapted_linears, adapter_parameters, grouped_linears

__all__ = ["LoRAReport", "add_lora", "check_frozen_base", "lora_config", "unwrapped"]

_CONFIG = "lora_config"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRAReport:
    """What `add_lora` did: layers that have an adapter, parameters that train of all, and how the base is stored.

    Counts are of this process: before `distribute`, of the whole model.
    """

    adapted: tuple[str, ...]
    trained_parameters: int
    trained_bytes: int
    storage: StorageReport

    def __str__(self) -> str:
        return (
            f"{len(self.adapted)} layers adapted, {self.trained_parameters:,} parameters train "
            f"({self.trained_bytes:,} bytes)\n{self.storage}"
        )


def add_lora(model: nn.Module, config: LoRAConfig) -> LoRAReport:
    """Freeze `model` and put a trainable adapter beside every layer that `config` names; before `distribute`.

    Grouped layers get a `GroupedLoRA`, ordinary linear layers PEFT's. The model may be on meta: then its adapters are
    filled when `checkpoint.hf.load` fills the rest.
    Raises ValueError for a name that matches nothing (with the nearest known), a rank that a layer is too small for, a
    model that has adapters, that is sharded, or whose weight gradients a coordinator owns already.
    """
    _check_new(model)
    grouped, linear = _targets(model, config)
    for name, (layer, _) in grouped.items():
        _check_rank(name, layer.in_features, layer.out_features, config)
    for name in linear:
        weight = model.get_submodule(name).get_parameter("weight")
        _check_rank(name, weight.shape[1], weight.shape[0], config)
    model.requires_grad_(False)
    if linear:
        inject(model, linear, config)
    for name, found in grouped.items():
        shared = {"gate_up": "a", "down": "b"}.get(name.rpartition(".")[2]) if config.share_outer else None
        lora = GroupedLoRA(found.linear, config, shared=shared)  # pyright: ignore[reportArgumentType]
        if not lora.a.weight.is_meta:
            lora.initialize(f"{name}.lora", first_expert=found.first_expert)
    for _, parameter in adapter_parameters(model):
        parameter.requires_grad_(True)
    setattr(model, _CONFIG, config)
    _attach_names(model, linear)
    trained = [parameter for _, parameter in adapter_parameters(model)]
    return LoRAReport(
        adapted=(*grouped, *linear),
        trained_parameters=sum(p.numel() for p in trained),
        trained_bytes=sum(p.numel() * p.element_size() for p in trained),
        storage=storage_report(model),
    )


def lora_config(model: nn.Module) -> LoRAConfig:
    """What `add_lora` was given for this model, or for what it wraps. ValueError where it has no adapters."""
    config = getattr(unwrapped(model), _CONFIG, None)
    if config is None:
        raise ValueError(f"{type(model).__name__} has no adapters: call add_lora(model, config) first")
    return config


def unwrapped(model: nn.Module) -> nn.Module:
    """What DDP wraps, whose parameters have the names that adapters are known by; or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def check_frozen_base(model: nn.Module) -> None:
    """ValueError, naming it, for a parameter that trains and is no adapter: adapters alone would not hold the model."""
    adapters = {id(parameter) for _, parameter in adapter_parameters(model)}
    trained = [name for name, p in named_parameters(model) if p.requires_grad and id(p) not in adapters]
    if trained:
        raise ValueError(
            f"{trained[0]} is no adapter and requires a gradient: expected a frozen base, whose adapters alone are "
            f"saved, got {len(trained)} trainable parameters in it"
        )


def _check_new(model: nn.Module) -> None:
    if adapted_linears(model) or hasattr(model, _CONFIG):
        raise ValueError("the model has adapters already: merge or load them, or begin with a new model")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("the model is sharded already: call add_lora before distribute")
    if any("wgrad_coordinator" in module.__dict__ for module in model.modules()):
        raise ValueError("the model has a coordinator already: call add_lora before attaching one")


def _targets(model: nn.Module, config: LoRAConfig) -> tuple[dict[str, AdaptedLinear], list[str]]:
    """Grouped and ordinary layers that the config names. A name of grouped layers does not reach ordinary ones."""
    all_grouped = grouped_linears(model)
    all_linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    grouped: dict[str, AdaptedLinear] = {}
    linear: dict[str, None] = {}
    for target in config.target_modules:
        these = _matching(target, all_grouped)
        grouped |= {name: all_grouped[name] for name in these}
        others = [] if these else _matching(target, all_linear)
        linear.update(dict.fromkeys(others))
        if not these and not others:
            known = sorted({name.rpartition(".")[2] for name in (*all_grouped, *all_linear)})
            near = difflib.get_close_matches(target, known, n=1, cutoff=0.0)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"target_modules must name layers among {', '.join(known)}; got {target!r}{hint}")
    return grouped, list(linear)


def _matching(target: str, names: Any) -> list[str]:
    return [name for name in names if name == target or name.endswith(f".{target}")]


def _check_rank(name: str, in_features: int, out_features: int, config: LoRAConfig) -> None:
    if config.rank > min(in_features, out_features):
        raise ValueError(
            f"rank must be at most min(in, out) = {min(in_features, out_features)} of {name}, got {config.rank}"
        )


# ---- names in Hugging Face folders ----


def _attach_names(model: nn.Module, linear: Sequence[str]) -> None:
    """Keep the model's map of Hugging Face names, if it has one, true of what it looks like now."""
    try:
        names = names_of(model)
    except ValueError:
        return
    renamed = {f"{name}.{kind}": f"{name}.{BASE}.{kind}" for name in linear for kind in ("weight", "bias")}
    adapters = {name: tuple(parameter.shape) for name, parameter in adapter_parameters(model)}
    absent = {name: (Piece(key=name),) for name in adapters}
    attach_names(
        model,
        replace(
            names,
            shapes={renamed.get(name, name): shape for name, shape in names.shapes.items()} | adapters,
            pieces={
                style: {renamed.get(name, name): found for name, found in pieces.items()} | absent
                for style, pieces in names.pieces.items()
            },
            tied={other: renamed.get(name, name) for other, name in names.tied.items()},
            own=names.own | adapters.keys(),
            fp32=frozenset(renamed.get(name, name) for name in names.fp32),
            fill_rest=_filling(names, frozenset(adapters), tuple(linear)),
        ),
    )


def _filling(names: Names, adapters: frozenset[str], linear: tuple[str, ...]) -> Any:
    def fill(model: nn.Module, device: Any, held: frozenset[str]) -> None:
        if names.fill_rest is not None:
            names.fill_rest(model, device, held | adapters)
        else:
            model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        for name, found in adapted_linears(model).items():
            found.lora.initialize(f"{name}.lora", first_expert=found.first_expert)
        initialize_linears(model, linear, lora_config(model).seed)

    return fill
