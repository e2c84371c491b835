"""What a model's tensors are called in Hugging Face folders, asked of transformers' own conversion tables.

transformers holds experts fused and reverts that when it saves: its tables say which keys of the older, per-expert
layout make a fused one. Here they become the plain data of `checkpoint.hf.Names`. What transformers cannot know is
added: that our experts stand one level deeper, and always as (experts, out, in).
"""

# E experts over the whole group   F output features   D input features

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    PrefixChange,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
)

from moe_runtime.checkpoint.hf import Names, Piece, attach_names
from moe_runtime.core.errors import UnsupportedError
from moe_runtime.integrations.transformers.experts import TEMPLATE, experts_layout
from moe_runtime.integrations.transformers.initial_values import initialize
from moe_runtime.nn import RoutedExperts

_FP8_BLOCK = (128, 128)
# Older folders hold what every model computes for itself.
_ALWAYS_IGNORED = (r"rotary_emb\.inv_freq$",)

# A tensor of ours: its key in transformers 5, whether it is transposed there, its shape.
_Entries = dict[str, tuple[str, bool, tuple[int, ...]]]


def attach_checkpoint_names(model: nn.Module, template: PreTrainedModel) -> None:
    """Let `checkpoint.hf` know the names of a model just built on meta; they are made when first asked for."""
    entries: _Entries = dict(_entries(model, template))
    attach_names(model, functools.partial(_names, template, entries))


def _entries(model: nn.Module, template: nn.Module) -> Iterator[tuple[str, tuple[str, bool, tuple[int, ...]]]]:
    experts = {name: module for name, module in model.named_modules() if isinstance(module, RoutedExperts)}
    for name, module in experts.items():
        layout = experts_layout(template.get_submodule(name))
        for ours, theirs in (("gate_up", layout.up_name), ("down", "down_proj")):
            linear = getattr(module.experts, ours)
            shape = (module.config.num_experts, linear.out_features, linear.in_features)
            yield f"{name}.experts.{ours}.weight", (f"{name}.{theirs}", layout.is_transposed, shape)
            if linear.use_bias:
                yield f"{name}.experts.{ours}.bias", (f"{name}.{theirs}_bias", False, shape[:2])
    persistent = model.state_dict(keep_vars=True).keys()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        inside = any(name.startswith(f"{prefix}.") for prefix in experts)
        if name in persistent and not inside:
            yield name, (name, False, tuple(tensor.shape))


def _names(template: PreTrainedModel, entries: _Entries) -> Names:
    table = _Table(template)
    theirs = template.state_dict(keep_vars=True).keys()
    own = frozenset(name for name, (key, _, _) in entries.items() if key not in theirs)
    by_key = {key: name for name, (key, _, _) in entries.items()}
    fused = {name: (Piece(key=key, transposed=turned),) for name, (key, turned, _) in entries.items()}
    per_expert = {
        name: fused[name] if name in own else tuple(table.pieces(key, turned, shape))
        for name, (key, turned, shape) in entries.items()
    }
    strict = [*(template._keep_in_fp32_modules_strict or ()), *(template._keep_in_fp32_modules or ())]
    in_fp32 = re.compile("|".join(rf"(^|\.){module}($|\.)" for module in strict) or "(?!)")
    config = json.loads(template.config.to_json_string())
    quantization = config.pop("quantization_config", None) or {}
    rows, cols = quantization.get("weight_block_size") or _FP8_BLOCK
    return Names(
        shapes={name: shape for name, (_, _, shape) in entries.items()},
        pieces={"per_expert": per_expert, "fused": fused},
        tied={table.renamed(other): by_key[key] for other, key in _tied(template).items()},
        own=own,
        fp32=frozenset(name for name, (key, _, _) in entries.items() if in_fp32.search(key)),
        ignored=(*_ALWAYS_IGNORED, *(template._keys_to_ignore_on_load_unexpected or ())),
        prefix=template.base_model_prefix,
        fp8_block=(int(rows), int(cols)),
        dtype=dtype if isinstance(dtype := getattr(template.config, "dtype", None), torch.dtype) else torch.bfloat16,
        config=json.dumps({**config, "architectures": [type(template).__name__]}),
        fill_rest=_fill_rest,
    )


def _fill_rest(model: nn.Module, device: Any, held: frozenset[str]) -> None:
    assert isinstance(model, PreTrainedModel) and TEMPLATE in model.__dict__
    initialize(model, seed=0, device=torch.device(device), leave=held)


def _tied(template: nn.Module) -> Mapping[str, str]:
    """Second names of tied parameters, and the first of each."""
    first = {id(parameter): name for name, parameter in template.named_parameters()}
    return {
        name: first[id(parameter)]
        for name, parameter in template.named_parameters(remove_duplicate=False)
        if first[id(parameter)] != name
    }


class _Table:
    """transformers' conversions of one model, reverted: from its names in memory to those that it saves."""

    def __init__(self, template: PreTrainedModel) -> None:
        conversions = get_model_conversion_mapping(template, add_legacy=False)
        # In the order in which transformers reverts them; prefixes are added only to what was loaded with them.
        reverted = [
            conversion.reverse_transform()
            for conversion in reversed(conversions)
            if not isinstance(conversion, PrefixChange)
        ]
        self._renamings = [entry for entry in reverted if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in reverted if isinstance(entry, WeightConverter)]

    def renamed(self, key: str) -> str:
        """The key on disk of a tensor that is only renamed."""
        for renaming in self._renamings:
            key, _ = renaming.rename_source_key(key)
        return key

    def pieces(self, key: str, transposed: bool, shape: tuple[int, ...]) -> Iterator[Piece]:
        """The tensors on disk that make up the one called `key` in memory; `shape` is ours."""
        for converter in self._converters:
            renamed, pattern = converter.rename_source_key(key)
            if pattern is not None:
                break
        else:
            yield Piece(key=self.renamed(key), transposed=transposed)
            return
        num_parts = _num_parts(key, converter, transposed)
        rows = shape[1] // num_parts
        for expert in range(shape[0]):
            for part in range(num_parts):
                name = renamed.replace(converter.target_patterns[0], converter.target_patterns[part])
                yield Piece(
                    key=self.renamed(name.replace("*", str(expert))),
                    expert=expert,
                    rows=(part * rows, (part + 1) * rows),
                )


def _num_parts(key: str, converter: WeightConverter, transposed: bool) -> int:
    """Projections that a fused tensor is divided into. UnsupportedError for anything but experts taken apart."""
    *before, last = converter.operations
    chunks = [operation for operation in before if isinstance(operation, Chunk) and operation.dim == 1]
    by_expert = isinstance(last, SplitModulelist) and last.dim == 0
    if not by_expert or len(chunks) != len(before) or len(before) > 1 or transposed:
        raise UnsupportedError(
            f"{key}: expected a conversion that takes experts apart (Chunk(dim=1) and SplitModulelist(dim=0)), "
            f"got {converter.operations}"
        )
    return len(converter.target_patterns)
