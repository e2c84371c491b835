"""What a model's parameters cost to store, and which are quantized."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_runtime.tensor import QuantizedTensor

__all__ = ["StorageReport", "StoredParameter", "storage_report"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredParameter:
    """One parameter of this rank: `kind` is its format and directions, or its dtype."""

    name: str
    shape: tuple[int, ...]
    kind: str
    num_bytes: int
    quantized: bool

    @property
    def per_value(self) -> float:
        """Bytes for one value."""
        return self.num_bytes / max(prod(self.shape), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageReport:
    """Every parameter of this rank, those that are quantized and those that are not."""

    parameters: tuple[StoredParameter, ...]

    @property
    def quantized(self) -> tuple[StoredParameter, ...]:
        """Stored as a format's bytes."""
        return tuple(p for p in self.parameters if p.quantized)

    @property
    def plain(self) -> tuple[StoredParameter, ...]:
        """Stored as values of their dtype."""
        return tuple(p for p in self.parameters if not p.quantized)

    def __str__(self) -> str:
        lines = []
        for title, held in (("quantized", self.quantized), ("not quantized", self.plain)):
            lines.append(f"{title}: {len(held)} parameters, {_total(held):,} bytes")
            kinds: dict[tuple[str, str], list[StoredParameter]] = {}
            for parameter in held:
                kinds.setdefault((_without_numbers(parameter.name), parameter.kind), []).append(parameter)
            lines += [
                f"  {len(same):>4} x {name}  {kind}  {_total(same):,} bytes, {same[0].per_value:.3f} a value"
                for (name, kind), same in kinds.items()
            ]
        return "\n".join(lines)


def storage_report(model: nn.Module) -> StorageReport:
    """What this rank stores of `model`, parameter by parameter; a tied one is counted once."""
    return StorageReport(parameters=tuple(_stored(name, parameter) for name, parameter in model.named_parameters()))


@torch.no_grad()
def _stored(name: str, parameter: Tensor) -> StoredParameter:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if isinstance(local, QuantizedTensor):
        directions = " and ".join(name for name in ("rowwise", "columnwise") if getattr(local, name))
        kind, num_bytes, quantized = f"{local.quantizer.format.name} {directions}", local.stored_bytes, True
    else:
        kind, quantized = str(local.dtype).removeprefix("torch."), False
        num_bytes = local.numel() * local.element_size()
    return StoredParameter(name=name, shape=tuple(local.shape), kind=kind, num_bytes=num_bytes, quantized=quantized)


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _total(held: Sequence[StoredParameter]) -> int:
    return sum(parameter.num_bytes for parameter in held)
