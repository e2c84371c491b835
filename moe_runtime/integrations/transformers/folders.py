"""A Hugging Face folder made of another: names, dtype, dequantized; or a mixture of experts made of a dense model."""

# E experts   G slices of the dense width   X copies of each   F expert width   D model width

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from moe_runtime.checkpoint.hf import Box, Names, Reader, SaveOptions, names_of, write
from moe_runtime.core.errors import ConfigError, UnsupportedError
from moe_runtime.integrations.transformers.experts import experts_modules
from moe_runtime.integrations.transformers.models import build, load_config, on_meta
from moe_runtime.integrations.transformers.names import attach_checkpoint_names

CONFIG_FILE = "config.json"
_COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")

# Dense model type -> the mixture whose attention, norms and embeddings are the same.
_TARGETS: Mapping[str, str] = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
# What the target's class would silently not do.
_REFUSED: Mapping[str, Mapping[str, object]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {},
    "qwen3": {"use_sliding_window": False},
}
_CARRIED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_dropout",
    "attention_bias",
    "sliding_window",
)


def convert(
    source: str | Path, destination: str | Path, *, options: SaveOptions | None = None, ignore: Sequence[str] = ()
) -> Path:
    """Write the Hugging Face folder `source` anew, one tensor at a time, and copy its tokenizer's files.

    ignore  regular expressions of keys of `source` that may be left over
    Quantized tensors are written as values, in `options.dtype` or the dtype that the config names. Raises ConfigError
    for a config that transformers refuses, CheckpointError for weights that do not fit it.
    """
    source = Path(source)
    names = names_of(describe(_config_of(source)))
    with Reader(source, names, ignore=ignore) as reader:
        return write(reader, destination, names=names, options=options, files=_files(source))


def describe(config: PretrainedConfig, *, balance_bias: bool = False) -> PreTrainedModel:
    """The model of a config on meta, dense or not, that knows its Hugging Face names."""
    dtype = config.dtype
    if not isinstance(dtype, torch.dtype):
        dtype = torch.float32
    model = on_meta(config, dtype)
    if experts_modules(model):
        return build(config, balance_bias=balance_bias, dtype=dtype)
    attach_checkpoint_names(model, model)
    return model


def _config_of(folder: Path) -> PretrainedConfig:
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"expected a Hugging Face folder with a {CONFIG_FILE}, got {str(folder)!r}")
    return load_config(config_file=str(folder / CONFIG_FILE))


def _files(folder: Path) -> list[Path]:
    """What belongs to a model besides its weights and its config."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in _COPIED and path.name != CONFIG_FILE and not path.name.endswith(".index.json")
    )


# Upcycling -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class UpcycleConfig:
    """A mixture that computes what the dense model does: its width cut into slices, each slice copied.

    granularity  slices of the dense width; an expert is one slice
    expansion    copies of each slice: granularity x expansion experts
    top_k        experts of a token, a multiple of granularity: that many whole copies, weighted; None: one copy
    router_std   of the router's weights, drawn from `seed`, the same for all slices of a copy
    """

    granularity: int = 1
    expansion: int = 8
    top_k: int | None = None
    router_std: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("granularity", "expansion"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.chosen % self.granularity or not 1 <= self.chosen <= self.num_experts:
            raise ConfigError(
                f"top_k must be a multiple of granularity = {self.granularity}, so that a token meets every slice, "
                f"and at most granularity x expansion = {self.num_experts}; got {self.chosen}"
            )
        if not self.router_std > 0:
            raise ConfigError(f"router_std must be positive, or copies of a slice would tie; got {self.router_std}")

    @property
    def num_experts(self) -> int:
        """Of a layer."""
        return self.granularity * self.expansion

    @property
    def chosen(self) -> int:
        """Experts of a token."""
        return self.granularity if self.top_k is None else self.top_k


def upcycle(
    source: str | Path, destination: str | Path, config: UpcycleConfig, *, options: SaveOptions | None = None
) -> Path:
    """Write a mixture of experts that is, before its first step, the dense model of the folder `source`.

    Expert e is slice e % granularity of copy e // granularity, its down-projection times granularity. All slices of a
    copy have one router row, so a token meets whole copies, whose routing weights sum to 1. Raises ConfigError for a
    dense model whose width the slices do not divide, UnsupportedError for one of another architecture.
    """
    source = Path(source)
    dense_config = _config_of(source)
    target = _mixture_config(dense_config, config)
    dense_names, names = names_of(describe(dense_config)), names_of(describe(target))
    with Reader(source, dense_names) as reader:
        mixture = _Mixture(reader, names, config)
        return write(mixture, destination, names=names, options=options, files=_files(source))


def _mixture_config(dense: PretrainedConfig, config: UpcycleConfig) -> PretrainedConfig:
    model_type = dense.model_type
    if model_type not in _TARGETS:
        raise UnsupportedError(f"a dense model must be one of {', '.join(_TARGETS)} to be upcycled, got {model_type!r}")
    for name, value in _REFUSED[model_type].items():
        if getattr(dense, name, value) != value:
            raise UnsupportedError(
                f"{_TARGETS[model_type]} has no {name}: expected {value} in the dense model, got {getattr(dense, name)}"
            )
    width: int = dense.intermediate_size  # pyright: ignore[reportAttributeAccessIssue]
    if width % config.granularity:
        raise ConfigError(f"granularity must divide intermediate_size = {width}, got {config.granularity}")
    fields: dict[str, Any] = {name: getattr(dense, name) for name in _CARRIED if hasattr(dense, name)}
    fields |= {"num_experts_per_tok": config.chosen, "dtype": dense.dtype}
    if _TARGETS[model_type] == "mixtral":
        fields |= {"num_local_experts": config.num_experts, "intermediate_size": width // config.granularity}
        fields.pop("attention_bias", None)
    else:
        fields |= {
            "num_experts": config.num_experts,
            "intermediate_size": width,
            "moe_intermediate_size": width // config.granularity,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return load_config(model_type=_TARGETS[model_type], fields=fields)


class _Mixture:
    """The tensors of the upcycled model, made of the dense one's as they are read."""

    _ROUTER, _UP, _DOWN = ".gate.weight", ".experts.experts.gate_up.weight", ".experts.experts.down.weight"

    def __init__(self, dense: Reader, names: Names, config: UpcycleConfig) -> None:
        self._dense, self._names, self._config = dense, names, config

    def __contains__(self, name: object) -> bool:
        return name in self._names.shapes

    def dtype(self, name: str) -> torch.dtype:
        """As the dense model has it; the router's is that of the projection it stands before."""
        return self._dense.dtype(self._sources(name)[0])

    def _sources(self, name: str) -> tuple[str, ...]:
        for suffix, projections in (
            (self._ROUTER, ("gate_proj",)),
            (self._UP, ("gate_proj", "up_proj")),
            (self._DOWN, ("down_proj",)),
        ):
            if name.endswith(suffix):
                return tuple(f"{name.removesuffix(suffix)}.{projection}.weight" for projection in projections)
        return (name,)

    def read(self, name: str, box: Box) -> Tensor:
        """A part of a tensor of the mixture."""
        if name.endswith(self._ROUTER):
            return self._router(name)[tuple(slice(start, stop) for start, stop in box)]
        if not name.endswith((self._UP, self._DOWN)):
            return self._dense.read(name, box)
        (first, last), *inside = box
        return torch.stack([self._expert(name, expert, tuple(inside)) for expert in range(first, last)])

    def _expert(self, name: str, expert: int, box: Box) -> Tensor:
        part, sources = expert % self._config.granularity, self._sources(name)
        if name.endswith(self._DOWN):
            width = self._names.shapes[name][2]
            rows, (start, stop) = box
            values = self._dense.read(sources[0], (rows, (part * width + start, part * width + stop)))
            return values * self._config.granularity
        width = self._names.shapes[name][1] // 2
        (start, stop), cols = box
        found = []
        for half, source in enumerate(sources):
            low, high = max(start - half * width, 0), min(stop - half * width, width)
            if low < high:
                found.append(self._dense.read(source, ((part * width + low, part * width + high), cols)))
        return torch.cat(found)

    def _router(self, name: str) -> Tensor:
        """(E, D): one row a copy, the same for each of its slices."""
        config, (_, hidden) = self._config, self._names.shapes[name]
        digest = hashlib.sha256(f"{config.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        rows_XD = torch.randn(config.expansion, hidden, generator=generator) * config.router_std
        return rows_XD.repeat_interleave(config.granularity, 0)
