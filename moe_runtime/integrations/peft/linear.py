"""PEFT's own adapters beside ordinary linear layers: the only lines that touch its classes."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moe_runtime.nn import LoRAConfig

__all__ = ["BASE", "add_pefts_own", "initialize_linears", "inject", "peft"]

BASE = "base_layer"
"""Where PEFT's layer keeps the one that it stands in place of."""


def peft() -> Any:
    """The package. ImportError names the extra."""
    # Here, because experts alone need none of it.
    try:
        import peft as package
    except ImportError as error:
        raise ImportError("adapters of ordinary linear layers need: pip install 'moe-runtime[peft]'") from error
    return package


def inject(model: nn.Module, names: Sequence[str], config: LoRAConfig) -> None:
    """Put PEFT's layers in place of the linear layers named."""
    package = peft()
    # Its layers need a device for their own: without one, on meta, they would be made on the CPU and stay there.
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    options = package.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.use_rslora,
        lora_dropout=config.dropout,
        target_modules=list(names),
        init_lora_weights=False,
    )
    package.inject_adapter_in_model(options, model, low_cpu_mem_usage=on_meta)
    for name in names:
        layer = model.get_submodule(name)
        like = layer.get_submodule(BASE).get_parameter("weight")
        for factor in _factors(layer):
            factor.to(dtype=like.dtype)
    initialize_linears(model, names, config.seed)


def add_pefts_own(model: nn.Module, config: LoRAConfig) -> None:
    """What PEFT itself puts beside the parameters that `config.target_modules` names, all else frozen: a yardstick.

    It makes each update as a matrix of the weight's size. Nothing else here works on what it leaves.
    """
    options = peft().LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.use_rslora,
        target_modules=[],
        target_parameters=list(config.target_modules),
    )
    peft().inject_adapter_in_model(options, model)


@torch.no_grad()
def initialize_linears(model: nn.Module, names: Sequence[str], seed: int) -> None:
    """Fill those of the layers' adapters that are real: A uniform in +-1/sqrt(in), from a seed of each; B with 0."""
    for name in names:
        a, b = _factors(model.get_submodule(name))
        if a.weight.is_meta:
            continue
        generator = torch.Generator().manual_seed(_seed(seed, name))
        bound = 1 / math.sqrt(a.weight.shape[1])
        _keep_part(a.weight, torch.empty(a.weight.shape).uniform_(-bound, bound, generator=generator))
        _keep_part(b.weight, torch.zeros(b.weight.shape))


def _factors(layer: nn.Module) -> tuple[Any, Any]:
    held: Any = layer
    return held.lora_A["default"], held.lora_B["default"]


def _keep_part(target: Tensor, full: Tensor) -> None:
    if not isinstance(target, DTensor):
        target.copy_(full)
        return
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    target.to_local().copy_(full[tuple(slice(start, start + n) for start, n in zip(offset, shape, strict=True))])


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
