"""Bring each token to its experts and the results back. Dispatchers own no parameters and are no modules.

    start    choose rows and launch their exchange          (one autograd node)
    wait     rows ready, sorted by local expert             (one autograd node)
    combine  out[t] = sum over the token's rows, back on its own rank

At expert degree 1 there is no exchange. `start` and `wait` are apart so that a caller can place work between them.
"""

# T tokens   K top-k   D model width   R routed rows   E local experts   P ranks of the expert group

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe_runtime.comm import all_to_all
from moe_runtime.comm.all_to_all import Cargo, Exchange
from moe_runtime.comm.watch import UNNAMED, Site
from moe_runtime.ep.capacity import Capacity, route_within
from moe_runtime.ep.plan import DispatchPlan
from moe_runtime.ep.rows import gather, gather_gates, sum_rows
from moe_runtime.kernels.permute import Route, route


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """Rows for the local experts: `x_RD` sorted by expert, `gate_R` their routing weights, and the plan to go back."""

    x_RD: Tensor
    gate_R: Tensor
    plan: DispatchPlan
    exchanges: tuple[Exchange, ...] = ()


class Dispatcher(Protocol):
    """What `RoutedExperts` needs: a local dispatcher or an all-to-all one."""

    def start(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Dispatched: ...
    def wait(self, pending: Dispatched) -> Dispatched: ...
    def combine(self, y_RD: Tensor, plan: DispatchPlan) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class LocalDispatcher:
    """Every expert is here: dispatch is a gather, combine a sum."""

    num_experts: int
    capacity: Capacity | None = None

    def plan(self, ids_TK: Tensor, gates_TK: Tensor) -> tuple[DispatchPlan, Tensor]:
        """Where each slot goes, and each row's routing weight (R,): all that a product needs that gathers by itself."""
        local = route_within(ids_TK, gates_TK, self.num_experts, self.capacity)
        return DispatchPlan(local=local), gather_gates(gates_TK, local)

    def start(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Dispatched:
        """Rows sorted by expert; ids of -1 and what is over capacity are dropped."""
        plan, gate_R = self.plan(ids_TK, gates_TK)
        return Dispatched(x_RD=gather(x_TD, plan.local), gate_R=gate_R, plan=plan)

    def wait(self, pending: Dispatched) -> Dispatched:
        """Nothing is under way."""
        return pending

    def combine(self, y_RD: Tensor, plan: DispatchPlan) -> Tensor:
        """out[t] = sum_k y[row[t, k]]"""
        return sum_rows(y_RD, plan.local)


@dataclass(frozen=True, kw_only=True)
class AllToAllDispatcher:
    """Experts are split over `group` in id order: rank p owns experts [p * E, (p + 1) * E).

    One exchange of counts, then rows and routing weights. The host must know how many rows each rank gets, so on a GPU
    every dispatch waits for the device once. A capacity bounds, and pads, the rows that this rank's tokens send to each
    expert. `site` names the layer in reports.
    """

    num_experts: int
    group: dist.ProcessGroup
    capacity: Capacity | None = None
    site: Site = UNNAMED

    def start(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Dispatched:
        """Launch the exchange of rows and weights; read nothing of the result before `wait`."""
        local = route_within(ids_TK, gates_TK, self.num_experts, self.capacity)
        counts_PE = local.ends_E.to(torch.int64).diff(prepend=local.ends_E.new_zeros(1))
        counts_PE = counts_PE.view(dist.get_world_size(self.group), -1)
        received_PE = all_to_all.exchange_counts(counts_PE, self.group, self.site)
        sent_E, received_host_PE = counts_PE.sum(1).tolist(), received_PE.cpu()
        plan = DispatchPlan(
            local=local._replace(slot_R=local.slot_R[: sum(sent_E)]),
            received=_by_expert(received_host_PE, x_TD.device),
            send_rows=tuple(sent_E),
            receive_rows=tuple(received_host_PE.sum(1).tolist()),
        )
        exchanges = (self._exchange(plan, "rows to experts"), self._exchange(plan, "weights to experts"))
        return Dispatched(
            x_RD=all_to_all.start(gather(x_TD, plan.local), exchanges[0]),
            gate_R=all_to_all.start(gather_gates(gates_TK, plan.local), exchanges[1]),
            plan=plan,
            exchanges=exchanges,
        )

    def wait(self, pending: Dispatched) -> Dispatched:
        """Rows and weights received, sorted by local expert."""
        assert pending.plan.received is not None
        rows, gates = (
            all_to_all.wait(held, exchange)
            for held, exchange in zip((pending.x_RD, pending.gate_R), pending.exchanges, strict=True)
        )
        return Dispatched(
            x_RD=gather(rows, pending.plan.received),
            gate_R=gather_gates(gates[:, None], pending.plan.received),
            plan=pending.plan,
        )

    def combine(self, y_RD: Tensor, plan: DispatchPlan) -> Tensor:
        """out[t] = sum_k y[row[t, k]], the rows having come back to the token's rank first."""
        assert plan.received is not None
        back = self._exchange(plan, "rows from experts")
        rows = all_to_all.wait(all_to_all.start(sum_rows(y_RD, plan.received), back), back)
        return sum_rows(rows, plan.local)

    def _exchange(self, plan: DispatchPlan, cargo: Cargo) -> Exchange:
        send, receive = plan.send_rows, plan.receive_rows
        if cargo == "rows from experts":
            send, receive = receive, send
        return Exchange(group=self.group, send_rows=send, receive_rows=receive, cargo=cargo, site=self.site)


def _by_expert(received_PE: Tensor, device: torch.device) -> Route:
    """Rows arrive sorted by rank, then expert; the route that sorts them by expert, then rank."""
    num_ranks, num_local = received_PE.shape
    owner = torch.arange(num_local).repeat(num_ranks).repeat_interleave(received_PE.reshape(-1))
    return route(owner[:, None].to(device), num_local)
