"""What was routed where: hooks that record choices, and the biases that balancing moves."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from moe_runtime.core.errors import UnsupportedError
from moe_runtime.integrations.transformers.experts import (
    experts_modules,
    is_told_ids,
    router_modules,
    router_recorder,
)
from moe_runtime.nn import RoutedExperts


class RoutingRecorder:
    """Records, while it is on, what each layer's router chose: expert ids, and logits where the model names them.

    Hooks sit on module instances. It must be on only during the original forward, or recomputation counts twice.
    """

    def __init__(self, model: nn.Module) -> None:
        self.ids_TK: list[Tensor] = []
        self.logits_TE: list[Tensor] = []
        self._on = False
        ids_pass = [is_told_ids(module) for module in experts_modules(model).values()]
        for module in experts_modules(model).values():
            if is_told_ids(module):
                module.register_forward_pre_hook(self._saw_experts, with_kwargs=True)
        index = getattr(router_recorder(model), "index", 0)
        for module in router_modules(model).values():
            module.register_forward_hook(
                lambda module, _a, out, index=index: self._saw_router(module, out, index, all(ids_pass))
            )

    @contextmanager
    def recording(self) -> Iterator["RoutingRecorder"]:
        """Record one forward; earlier records are dropped."""
        self.ids_TK, self.logits_TE, self._on = [], [], True
        try:
            yield self
        finally:
            self._on = False

    def _saw_experts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._on:
            # Positional second argument in every class; two classes name it differently as a keyword.
            ids_TK = args[1] if len(args) > 1 else kwargs.get("top_k_index", kwargs.get("router_indices"))
            if not isinstance(ids_TK, Tensor):
                raise TypeError(
                    f"{type(module).__name__} should receive expert ids as its second argument, got {ids_TK!r}"
                )
            self.ids_TK.append(ids_TK)

    def _saw_router(self, module: nn.Module, output: Any, index: int, experts_know: bool) -> None:
        if not self._on:
            return
        logits_TE = output[index] if isinstance(output, tuple) else output
        self.logits_TE.append(logits_TE)
        if not experts_know:
            self.ids_TK.append(logits_TE.topk(int(module.top_k), dim=-1).indices)  # pyright: ignore[reportArgumentType]


def selection_biases(model: nn.Module) -> list[Tensor]:
    """The per-expert selection bias of each router that has one, in forward order; the caller updates them in place."""
    biases = (
        getattr(module, "expert_bias", getattr(module, "e_score_correction_bias", None))
        for module in router_modules(model).values()
    )
    return [bias_E for bias_E in biases if bias_E is not None]


def num_experts(model: nn.Module) -> int:
    """Experts of an MoE layer over all ranks; UnsupportedError for a model whose layers differ."""
    counts = {
        module.config.num_experts if isinstance(module, RoutedExperts) else module.get_parameter("down_proj").shape[0]
        for module in experts_modules(model).values()
    }
    if len(counts) != 1:
        raise UnsupportedError(f"every MoE layer must have as many experts, got {sorted(counts)}")
    return counts.pop()
