"""A routing as a frozen value: what every layer chose, kept, and given back to a later forward in place of choosing."""

# T tokens   K top-k

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class RoutingChoice(NamedTuple):
    """What one layer chose. Given back to a router, it is followed.

    ids_TK    int64 expert ids; -1 for padding
    gates_TK  weights, taken as they are and without a gradient; None: made of the scores of the ids, with one
    """

    ids_TK: Tensor
    gates_TK: Tensor | None = None


class _Chosen(Protocol):
    @property
    def ids_TK(self) -> Tensor: ...
    @property
    def gates_TK(self) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoutingRecord:
    """Ids and weights of each layer in forward order, without gradients."""

    layers: tuple[RoutingChoice, ...]

    @classmethod
    def of(cls, outputs: Iterable[_Chosen]) -> "RoutingRecord":
        """From the outputs of the layers, as `MoELayer` returns them. Copies: what is recorded cannot change."""
        return cls(
            layers=tuple(RoutingChoice(out.ids_TK.detach().clone(), out.gates_TK.detach().clone()) for out in outputs)
        )

    def replay(self, layer: int, *, gates: bool = False) -> RoutingChoice:
        """The choice of one layer, to hand to its forward.

        gates  follow the recorded weights too; by default they are made anew from the scores of the recorded ids, so
               that the router trains, and are the recorded ones, bit for bit, as long as its inputs and weights are
        """
        choice = self.layers[layer]
        return choice if gates else RoutingChoice(choice.ids_TK)
