"""The whole layer, router and all, on a GPU: no host waits, graphs that follow the routing, the same bits."""

# T tokens   K top-k   D model width

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_runtime.ep import Capacity
from moe_runtime.kernels.combine import gather_sum
from moe_runtime.kernels.permute import gather_rows, route
from moe_runtime.nn import MoEConfig, MoELayer, RoutedExpertsConfig, RouterConfig, SharedExpertsConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch says so whenever the mode is set.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]

WIDTH, EXPERTS, TOKENS = 128, 8, 256
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "renormalized": {"norm_topk_prob": True, "scaling_factor": 2.5},
    "sigmoid with bias": {"score": "sigmoid", "norm_topk_prob": True, "expert_bias": True},
}


def layer(router: dict[str, Any], capacity: Capacity | None = None) -> MoELayer:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_experts": EXPERTS, "hidden_size": WIDTH}
    config = MoEConfig(
        router=RouterConfig(**sizes, top_k=2, **router),
        experts=RoutedExpertsConfig(**sizes, intermediate_size=64, capacity=capacity),
        shared=SharedExpertsConfig(hidden_size=WIDTH, intermediate_size=64),
    )
    return MoELayer(config).to("cuda", torch.bfloat16)


def inputs(seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(TOKENS, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16)


def run(module: MoELayer, x_TD: Tensor, dy_TD: Tensor) -> list[Tensor]:
    """Output, and gradients of the tokens and of every parameter."""
    y_TD = module(x_TD).y
    return [y_TD.detach(), *torch.autograd.grad(y_TD, [x_TD, *module.parameters()], dy_TD)]


@pytest.mark.parametrize("capacity", [None, Capacity(factor=0.75)], ids=["all rows", "capacity"])
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())
def test_hundred_repeats_give_the_same_bits(router: dict[str, Any], capacity: Capacity | None) -> None:
    module, x_TD, dy_TD = layer(router, capacity), inputs(0).requires_grad_(), inputs(1)
    first = run(module, x_TD, dy_TD)
    for _ in range(99):
        assert all(torch.equal(a, b) for a, b in zip(run(module, x_TD, dy_TD), first, strict=True))


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())
def test_forward_and_backward_never_wait_for_the_device(router: dict[str, Any]) -> None:
    module, x_TD, dy_TD = layer(router), inputs(0).requires_grad_(), inputs(1)
    run(module, x_TD, dy_TD)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(module, x_TD, dy_TD)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())
def test_a_captured_graph_follows_the_routing(router: dict[str, Any]) -> None:
    module, x_TD, dy_TD = layer(router), inputs(0).requires_grad_(), inputs(1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(module, x_TD, dy_TD)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(module, x_TD, dy_TD)
    routings = set()
    for seed in range(2, 7):
        with torch.no_grad():
            x_TD.copy_(inputs(seed))
        graph.replay()
        replayed = [value.clone() for value in captured]
        routings.add(str(module(x_TD).ids_TK.tolist()))
        eager = run(module, x_TD, dy_TD)
        assert all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True)), seed
    assert len(routings) == 5


def test_tokens_come_back_past_2_to_the_31_elements() -> None:
    """38,000 tokens x 8 choices x 7168 features: rows from 299,593 on lie past what 32 bits address."""
    tokens, top_k, width = 38_000, 8, 7168
    generator = torch.Generator("cuda").manual_seed(0)
    x_TD = torch.randn(tokens, width, generator=generator, device="cuda", dtype=torch.bfloat16)
    ids_TK = torch.rand(tokens, 64, generator=generator, device="cuda").argsort(1)[:, :top_k]
    routed = route(ids_TK, 64)
    y_RD = gather_rows(x_TD, routed.slot_R, routed.ends_E, top_k=top_k)
    assert y_RD.numel() > 2**31
    sample = torch.tensor([0, 1, 299_592, 299_593, 299_594, tokens * top_k - 1], device="cuda")
    assert torch.equal(y_RD[sample], x_TD[routed.slot_R[sample].long() // top_k])
    # Eight equal rows sum to eight times one, exactly.
    assert torch.equal(gather_sum(y_RD, routed.row_TK), x_TD * top_k)
