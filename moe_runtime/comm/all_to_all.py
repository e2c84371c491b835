"""The ragged all-to-all with autograd, split in two nodes so that work can stand between them in both directions.

    forward    start: launch the exchange        wait: wait for it
    backward   wait:  launch the reverse one     start: wait for it

Whatever is placed between start and wait in forward runs, in backward, while the reverse exchange is under way.
Ranks with nothing to send or receive take part like any other.

gloo delivers what was sent, whatever the receiver expected: too many rows abort its process, too few leave the rest of
its buffer as it was. So on the CPU ranks first compare where they are and how many rows each sends and expects.
"""

# S rows sent   R rows received   D width   P ranks of the group

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_runtime.comm.watch import UNNAMED, Collective, Site
from moe_runtime.core.errors import CollectiveMismatchError

Cargo = Literal["counts", "rows to experts", "weights to experts", "rows from experts"]
_CARGOES: tuple[Cargo, ...] = get_args(Cargo)


@dataclass(kw_only=True)
class Exchange:
    """One exchange in flight: who gets how many rows, and the handle of the collective under way."""

    group: dist.ProcessGroup
    send_rows: tuple[int, ...]
    receive_rows: tuple[int, ...]
    cargo: Cargo = "rows to experts"
    site: Site = UNNAMED
    work: dist.Work | None = field(default=None, repr=False)
    received: Tensor | None = field(default=None, repr=False)

    def launch(self, rows: Tensor, *, reverse: bool) -> Tensor:
        """Start moving `rows`; the tensor returned holds them once `finish` has returned it."""
        send, receive = (self.receive_rows, self.send_rows) if reverse else (self.send_rows, self.receive_rows)
        if rows.shape[0] != sum(send):
            raise ValueError(f"the exchange sends {sum(send)} rows ({list(send)} per rank), got {rows.shape[0]}")
        collective = self._describe(send, receive, reverse=reverse)
        if rows.device.type == "cpu":
            _compare(collective, _CARGOES.index(self.cargo), self.site, self.group, reverse=reverse)
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        work = dist.all_to_all_single(
            received, rows.contiguous(), list(receive), list(send), group=self.group, async_op=True
        )
        assert work is not None
        self.site.launched(collective, work)
        self.work, self.received = work, received
        return received

    def _describe(self, send: tuple[int, ...], receive: tuple[int, ...], *, reverse: bool) -> Collective:
        return Collective(
            name=f"gradient of {self.cargo}" if reverse else self.cargo,
            layer=self.site.layer,
            ranks=tuple(dist.get_process_group_ranks(self.group)),
            send_rows=send,
            receive_rows=receive,
        )

    def finish(self) -> Tensor:
        """Wait for the collective under way (on a GPU: make the current stream wait); the rows received."""
        if self.work is None or self.received is None:
            raise RuntimeError("no exchange is under way: start must run once before each wait")
        self.work.wait()
        received, self.work, self.received = self.received, None, None
        return received


def start(rows_SD: Tensor, exchange: Exchange) -> Tensor:
    """Launch the exchange of `rows`; the result (R, D) must pass through `wait` before anything reads it."""
    return _Start.apply(rows_SD, exchange)


def wait(pending_RD: Tensor, exchange: Exchange) -> Tensor:
    """The received rows (R, D), ready to read."""
    return _Wait.apply(pending_RD, exchange)


def exchange_counts(counts_PE: Tensor, group: dist.ProcessGroup, site: Site = UNNAMED) -> Tensor:
    """Row p of the result is what rank p counted for this rank: the transpose of `counts` over the group.

    counts_PE  int64 (ranks, local experts): rows this rank holds for each expert of each rank
    """
    collective = Collective(name="counts", layer=site.layer, ranks=tuple(dist.get_process_group_ranks(group)))
    if counts_PE.device.type == "cpu":
        _compare(collective, _CARGOES.index("counts"), site, group, reverse=False)
    received_PE = torch.empty_like(counts_PE)
    work = dist.all_to_all_single(received_PE, counts_PE.contiguous(), group=group, async_op=True)
    _finish(work, collective, site)
    return received_PE


def _compare(collective: Collective, cargo: int, site: Site, group: dist.ProcessGroup, *, reverse: bool) -> None:
    """CollectiveMismatchError, the same on every rank of the group, unless all are here with sizes that meet."""
    size = len(collective.ranks)
    rows = [collective.send_rows or (0,) * size, collective.receive_rows or (0,) * size]
    mine = torch.tensor([cargo, reverse, site.index, *rows[0], *rows[1]])
    said_P = [torch.empty_like(mine) for _ in range(size)]
    _finish(dist.all_gather(said_P, mine, group=group, async_op=True), collective, site)
    if (sentence := _disagreement([said.tolist() for said in said_P], collective.ranks, site.layers)) is not None:
        raise CollectiveMismatchError(sentence)


def _disagreement(said_P: Sequence[Sequence[int]], ranks: Sequence[int], layers: Sequence[str]) -> str | None:
    """What ranks that said (cargo, reverse, layer, rows sent to each, rows expected of each) do not agree on."""

    def place(said: Sequence[int]) -> str:
        cargo, reverse, layer = said[:3]
        named = f"'{layers[layer]}'" if 0 <= layer < len(layers) else f"number {layer}"
        return f"'{'gradient of ' * reverse}{_CARGOES[cargo]}' of layer {named}"

    for rank, said in zip(ranks, said_P, strict=True):
        if said[:3] != said_P[0][:3]:
            return f"rank {ranks[0]} is in {place(said_P[0])}, rank {rank} in {place(said)}: one skipped a collective"
    size = len(ranks)
    for sender, said in enumerate(said_P):
        for receiver, expected in enumerate(said_P):
            sends, expects = said[3 + receiver], expected[3 + size + sender]
            if sends != expects:
                return (
                    f"{place(said)}: rank {ranks[sender]} sends {sends} rows to rank {ranks[receiver]}, "
                    f"which expects {expects}"
                )
    return None


def _finish(work: dist.Work | None, collective: Collective, site: Site) -> None:
    assert work is not None
    site.launched(collective, work)
    work.wait()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.launch(rows_SD, reverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, placeholder_RD: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.finish(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending_RD: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        received_RD = exchange.finish()
        return received_RD.view_as(received_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows_RD: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.launch(drows_RD, reverse=True)
        # The gradient that travels has as many rows as were sent, the one autograd wants here as many as were
        # received: a placeholder without memory stands for it, and `start` returns the real one.
        return drows_RD.new_zeros(()).expand(drows_RD.shape), None
