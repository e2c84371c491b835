"""The ragged all-to-all with autograd, split in two nodes so that work can stand between them in both directions.

    forward    start: launch the exchange        wait: wait for it
    backward   wait:  launch the reverse one     start: wait for it

Whatever is placed between start and wait in forward runs, in backward, while the reverse exchange is under way.
Ranks with nothing to send or receive take part like any other.
"""

# S rows sent   R rows received   D width

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(kw_only=True)
class Exchange:
    """One exchange in flight: who gets how many rows, and the handle of the collective under way."""

    group: dist.ProcessGroup
    send_rows: tuple[int, ...]
    receive_rows: tuple[int, ...]
    work: dist.Work | None = field(default=None, repr=False)
    received: Tensor | None = field(default=None, repr=False)

    def launch(self, rows: Tensor, *, reverse: bool) -> Tensor:
        """Start moving `rows`; the tensor returned holds them once `finish` has returned it."""
        send, receive = (self.receive_rows, self.send_rows) if reverse else (self.send_rows, self.receive_rows)
        if rows.shape[0] != sum(send):
            raise ValueError(f"the exchange sends {sum(send)} rows ({list(send)} per rank), got {rows.shape[0]}")
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        self.work = dist.all_to_all_single(
            received, rows.contiguous(), list(receive), list(send), group=self.group, async_op=True
        )
        self.received = received
        return received

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


def exchange_counts(counts_PE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Row p of the result is what rank p counted for this rank: the transpose of `counts` over the group.

    counts_PE  int64 (ranks, local experts): rows this rank holds for each expert of each rank
    """
    received_PE = torch.empty_like(counts_PE)
    dist.all_to_all_single(received_PE, counts_PE.contiguous(), group=group)
    return received_PE


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
