"""What a watched collective is called in reports, and who hears of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective of this rank.

    ranks  global ranks of its group, in group order; send_rows and receive_rows have one entry for each
    """

    name: str
    layer: str
    ranks: tuple[int, ...]
    send_rows: tuple[int, ...] = ()
    receive_rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        rows = f", sends {list(self.send_rows)} rows, expects {list(self.receive_rows)}" if self.send_rows else ""
        return f"'{self.name}' of layer '{self.layer}' among ranks {list(self.ranks)}{rows}"


class CollectiveWatch(Protocol):
    """Hears of every collective that is launched, in the thread that launches it."""

    def launched(self, collective: Collective, work: dist.Work) -> None:
        """`work` is under way; it is over when `work.is_completed()`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where in a model an exchange stands: one of its layers, whose order is the same on every rank."""

    layers: Sequence[str] = ("",)
    index: int = 0
    watch: CollectiveWatch | None = None

    @property
    def layer(self) -> str:
        """Full name of the layer in the model."""
        return self.layers[self.index]

    def launched(self, collective: Collective, work: dist.Work) -> None:
        """Tell the watch, if there is one."""
        if self.watch is not None:
            self.watch.launched(collective, work)


UNNAMED = Site()
