"""Which of a model's parameters are adapters, and where the grouped ones are."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from moe_runtime.nn.grouped_linear import GroupedLinear
from moe_runtime.nn.grouped_lora import GroupedLoRA
from moe_runtime.nn.routed_experts import RoutedExperts

__all__ = ["AdaptedLinear", "adapted_linears", "adapter_parameters", "grouped_linears"]


class AdaptedLinear(NamedTuple):
    """A GroupedLinear in a model, and the id over all ranks of its first expert. `lora` is its adapter."""

    linear: GroupedLinear
    first_expert: int

    @property
    def lora(self) -> GroupedLoRA:
        """The adapter."""
        lora = self.linear.lora
        assert isinstance(lora, GroupedLoRA)
        return lora


def grouped_linears(model: nn.Module) -> dict[str, AdaptedLinear]:
    """Every GroupedLinear of `model` by name, adapted or not; factors of adapters are none of them."""
    found: dict[str, AdaptedLinear] = {}
    owners = {name: module for name, module in model.named_modules() if isinstance(module, RoutedExperts | GroupedLoRA)}
    for name, module in model.named_modules():
        around = [owner for prefix, owner in owners.items() if name.startswith(f"{prefix}." if prefix else "")]
        if not isinstance(module, GroupedLinear) or any(isinstance(owner, GroupedLoRA) for owner in around):
            continue
        first = next((owner.first_expert for owner in around if isinstance(owner, RoutedExperts)), 0)
        found[name] = AdaptedLinear(module, first)
    return found


def adapted_linears(model: nn.Module) -> dict[str, AdaptedLinear]:
    """Every GroupedLinear that has an adapter, by name."""
    return {name: found for name, found in grouped_linears(model).items() if found.linear.lora is not None}


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of all adapters: grouped ones, and PEFT's beside ordinary layers."""
    grouped = {id(p) for found in adapted_linears(model).values() for p in found.lora.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in grouped or ".lora_A." in name or ".lora_B." in name:
            yield name, parameter
