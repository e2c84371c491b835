"""What ranks run for test_moe_layer.py."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import moe_runtime as mr
from moe_runtime.comm.all_to_all import Exchange
from moe_runtime.ep import Capacity
from moe_runtime.nn import (
    AuxLoss,
    BatchScope,
    LoadMeter,
    MoEConfig,
    MoELayer,
    RoutedExpertsConfig,
    RouterConfig,
    SharedExpertsConfig,
    step_selection_biases,
)
from moe_runtime.nn.balance import expert_counts
from moe_runtime.nn.routing import router_losses

WIDTH, INNER, EXPERTS, TOKENS = 16, 8, 8, 12
LOSSES = tuple(AuxLoss(kind=kind, coefficient=0.5) for kind in ("global_batch", "z"))


def build(gates_on: str = "output", capacity: Capacity | None = None, losses: tuple[AuxLoss, ...] = LOSSES) -> MoELayer:
    torch.manual_seed(0)
    sizes = {"num_experts": EXPERTS, "hidden_size": WIDTH}
    module = MoELayer(
        MoEConfig(
            router=RouterConfig(**sizes, top_k=2, norm_topk_prob=True, expert_bias=True, aux_losses=losses),
            experts=RoutedExpertsConfig(
                **sizes,
                intermediate_size=INNER,
                bias=True,
                capacity=capacity,
                gates_on=gates_on,  # pyright: ignore[reportArgumentType]
            ),
            shared=SharedExpertsConfig(hidden_size=WIDTH, intermediate_size=INNER, gate=True),
        )
    )
    with torch.no_grad():
        module.router.weight.mul_(20)
    return module


def place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def tokens_of(rank: int, world: int, sharing: str) -> slice:
    """Even parts; or all tokens on the last rank, so that the others have none."""
    if sharing == "last" and world > 1:
        return slice(0, TOKENS if rank == world - 1 else 0)
    return slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)


CAPACITIES = {
    "none": None,
    "all fit": Capacity(factor=float(EXPERTS), minimum=TOKENS),
    "padded": Capacity(factor=float(EXPERTS), minimum=TOKENS, pad=True),
}


def layer(routing: str, sharing: str, gates_on: str, capacity: str) -> dict[str, Tensor]:
    """Loss and every gradient of the layer over all ranks' tokens; expert parallel over all of them."""
    rank, world = place()
    module = build(gates_on, CAPACITIES[capacity])
    x_TD, target_TD = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
    assert module.router.expert_bias is not None
    if routing == "one owner":
        module.router.expert_bias[5] += 10.0
    padding_T = torch.zeros(TOKENS, dtype=torch.bool)
    if routing == "dropped":
        padding_T[::3] = True
    group = None
    if world > 1:
        group = dist.group.WORLD
        module.experts.shard_experts(group)
    part = tokens_of(rank, world, sharing)
    x = x_TD[part].clone().requires_grad_()
    scope = BatchScope(num_tokens=int((~padding_T).sum()), data_group=group)
    out = module(x, padding=padding_T[part], scope=scope)
    loss = (out.y - target_TD[part]).square().sum() + out.losses.total
    loss.backward()
    found = {"loss": loss.detach(), "x": _in_order(x.grad, part, TOKENS), "counts": out.counts_E}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        if name.startswith("experts."):
            first = module.experts.first_expert
            found[name] = _in_order(parameter.grad, slice(first, first + EXPERTS // world), EXPERTS)
        else:
            found[name] = parameter.grad.clone()
    for value in found.values():
        if world > 1:
            dist.all_reduce(value)
    return found


def _in_order(value: Tensor | None, part: slice, total: int) -> Tensor:
    assert value is not None
    whole = value.new_zeros(total, *value.shape[1:])
    whole[part] = value
    return whole


def two_owners_of_one_token() -> tuple[list[float], list[list[float]]]:
    """D5: one token on rank 0, slot 0 to rank 0's expert (y = 2), slot 1 to rank 1's (y = 5), weights [.6, .4]."""
    rank, world = place()
    config = mr.RoutedExpertsConfig(num_experts=2, hidden_size=1, intermediate_size=1, activation="relu2")
    module = mr.RoutedExperts(config)
    with torch.no_grad():
        module.experts.gate_up.weight.fill_(1.0)
        module.experts.down.weight.copy_(torch.tensor([2.0, 5.0]).view(2, 1, 1))
    if world > 1:
        module.shard_experts(dist.group.WORLD)
    count = 1 if rank == 0 else 0
    gates_TK = torch.tensor([[0.6, 0.4]])[:count].requires_grad_()
    out_TD = module(torch.ones(count, 1), torch.tensor([[0, 1]])[:count], gates_TK)
    out_TD.sum().backward()
    assert gates_TK.grad is not None
    return out_TD.flatten().tolist(), gates_TK.grad.tolist()


class Model(nn.Module):
    """A layer in a model that `distribute` can wrap."""

    def __init__(self, gates_on: str) -> None:
        super().__init__()
        self.layer = build(gates_on, losses=())

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.layer(x_TD).y


def router_after_a_step(data: str, expert: int, gates_on: str, scales: list[float]) -> list[tuple[Tensor, Tensor]]:
    """D4, D6: each rank's loss is its scale times the same sum; the router's gradient and its weight after a step."""
    rank, world = place()
    model = Model(gates_on)
    plan = mr.ParallelPlan(data=data, expert=expert)  # pyright: ignore[reportArgumentType]
    wrapped = mr.distribute(model, plan)
    x_TD = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    # Gradients of replicas are averaged: the loss is their sum once each part is multiplied by their number.
    (wrapped(x_TD).square().sum() * scales[rank] * world).backward()
    weight = model.layer.router.weight
    assert weight.grad is not None
    torch.optim.SGD([weight], lr=0.1, foreach=False).step()
    return [_whole(weight.grad), _whole(weight.detach())]


class Stack(nn.Module):
    """Two layers, each one a unit of FSDP2: their outputs are tuples, which it must look into."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([build(), build()])

    def forward(self, x_TD: Tensor, scope: BatchScope) -> tuple[Tensor, Tensor]:
        total = x_TD.new_zeros(())
        for layer in self.layers:
            out = layer(x_TD, scope=scope)
            x_TD, total = x_TD + out.y, total + out.losses.total
        return x_TD, total


def stacked(data: str, expert: int) -> dict[str, Tensor]:
    """Gradients of what is no expert's, from outputs and auxiliary losses of two wrapped layers."""
    rank, world = place()
    model = Stack()
    x_TD = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    wrapped = mr.distribute(model, mr.ParallelPlan(data=data, expert=expert))  # pyright: ignore[reportArgumentType]
    scope = BatchScope(num_tokens=TOKENS, data_group=dist.group.WORLD if world > 1 else None)
    y_TD, total = wrapped(x_TD[rank * TOKENS // world : (rank + 1) * TOKENS // world], scope)
    ((y_TD.square().sum() / TOKENS + total) * world).backward()
    return {n: _whole(p.grad) for n, p in model.named_parameters() if ".experts." not in n}


def _whole(value: Any) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def losses_in_parts(kind: str, split: str) -> tuple[float, Tensor]:
    """One loss and its gradient over all logits, cut along sequences ("data") or inside them ("context")."""
    rank, world = place()
    logits_BSE = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(2))
    logits_BSE.requires_grad_()
    ids_BSK = logits_BSE.topk(2).indices
    ids_BSK[1, 4:] = -1  # padding
    group = dist.group.WORLD if world > 1 else None
    rows = slice(rank * 4 // world, (rank + 1) * 4 // world) if split == "data" else slice(None)
    columns = slice(rank * 6 // world, (rank + 1) * 6 // world) if split == "context" else slice(None)
    logits, ids = logits_BSE[rows, columns], ids_BSK[rows, columns]
    scope = BatchScope(
        num_tokens=22, num_sequences=4, data_group=group, context_group=group if split == "context" else None
    )
    config = RouterConfig(
        num_experts=5,
        hidden_size=1,
        top_k=2,
        aux_losses=(AuxLoss(kind=kind, coefficient=1.0),),  # pyright: ignore[reportArgumentType]
    )
    losses = router_losses(config, logits.flatten(0, 1), ids.flatten(0, 1), scope=scope, num_sequences=len(logits))
    losses.total.backward()
    assert logits_BSE.grad is not None
    total = losses.total.detach().clone()
    if world > 1:
        dist.all_reduce(total)
        dist.all_reduce(logits_BSE.grad)
    return total.item(), logits_BSE.grad


def biases_after_a_step() -> tuple[list[int], list[float]]:
    """Global int64 counts of two microbatches on every rank, and the one step of the biases that they make."""
    rank, world = place()
    ids_TK = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3]])
    meter, bias_E = LoadMeter(1, 4, torch.device("cpu")), torch.zeros(4)
    part = slice(rank * 4 // world, (rank + 1) * 4 // world)
    for _ in range(2):
        meter.add_counts([expert_counts(ids_TK[part], 4)])
    counts_LE = meter.global_counts()
    step_selection_biases([bias_E], counts_LE, 0.5)
    return counts_LE[0].tolist(), bias_E.tolist()


def order_of_backward() -> tuple[list[str], list[str]]:
    """What stands between launching and finishing each exchange, in forward and in backward."""
    module, events = build(), []
    module.experts.shard_experts(dist.group.WORLD)
    launch, finish = Exchange.launch, Exchange.finish

    def launched(self: Exchange, rows: Tensor, *, reverse: bool) -> Tensor:
        events.append("launch")
        return launch(self, rows, reverse=reverse)

    def finished(self: Exchange) -> Tensor:
        events.append("finish")
        return finish(self)

    assert module.shared is not None
    module.shared.down.register_forward_hook(lambda *_: events.append("shared"))
    module.shared.down.weight.register_hook(lambda *_: events.append("shared"))
    Exchange.launch, Exchange.finish = launched, finished
    try:
        out = module(torch.randn(3, WIDTH).requires_grad_())
        forward = list(events)
        events.clear()
        out.y.sum().backward()
    finally:
        Exchange.launch, Exchange.finish = launch, finish
    return forward, events
