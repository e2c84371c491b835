"""Packed and separate expert weights are one model: the same bits after every step, whichever state they start from."""

# T tokens   D model width   E experts   K top-k

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_runtime as mr
from moe_runtime.optim import MasterWeights, clip_grad_norm_

EXPERTS, STEPS = 12, 5  # more than 10 experts: names as text would sort 10 before 2
# Width and expert width. Torch itself rounds bfloat16 `add_(x, alpha=a)` differently in the vectors and in the last
# elements of a tensor, so an optimizer without fp32 masters is elementwise only in whole vectors.
ODD, WHOLE_VECTORS = (16, 24), (64, 32)


class Block(nn.Module):
    """A router and experts with biases, as a model holds them."""

    def __init__(self, packed: bool, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
        super().__init__()
        width, inner = sizes
        router = mr.RouterConfig(num_experts=EXPERTS, hidden_size=width, top_k=2, norm_topk_prob=True)
        experts = mr.RoutedExpertsConfig(
            num_experts=EXPERTS,
            hidden_size=width,
            intermediate_size=inner,
            bias=True,
            single_grouped_weight=packed,
        )
        self.router = mr.Router(router, dtype=dtype)
        self.experts = mr.RoutedExperts(experts, dtype=dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        _, gates_TK, ids_TK = self.router(x_TD)
        return x_TD + self.experts(x_TD, ids_TK, gates_TK)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, weight_decay=0.01),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, nesterov=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.02, foreach=True),
    "masters": lambda p: MasterWeights(torch.optim.AdamW, p, lr=0.02),
}


def blocks(first: bool, dtype: torch.dtype = torch.float32, sizes: tuple[int, int] = ODD) -> tuple[Block, Block]:
    """A packed and a separate block of one state, which `first` says comes from the packed one."""
    torch.manual_seed(3)
    pair = Block(True, dtype, sizes), Block(False, dtype, sizes)
    source, target = pair if first else reversed(pair)
    with torch.no_grad():
        source.router.weight.mul_(20)
        for parameter in target.parameters():
            parameter.fill_(float("nan"))
    target.load_state_dict(source.state_dict())
    return pair


def gathered(block: Block, value_of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """What `value_of` says of each parameter, under the packed names."""
    named = {name: value_of(p) for name, p in block.named_parameters()}
    result = {}
    for name, value in named.items():
        assert value is not None, name
        if name[-1].isdigit():
            family = name.rstrip("0123456789")
            result[family] = torch.stack([named[f"{family}{e}"] for e in range(EXPERTS)])
        else:
            result[name] = value.detach()
    return result


def rows(block: Block, num_tokens: int, seed: int) -> Tensor:
    weight_ED = block.router.weight
    x_TD = torch.randn(num_tokens, weight_ED.shape[1], generator=torch.Generator().manual_seed(seed))
    return x_TD.to(weight_ED.dtype)


def step(block: Block, optimizer: torch.optim.Optimizer, seed: int, max_norm: float = 0.05) -> Tensor:
    optimizer.zero_grad()
    block(rows(block, 32, seed)).float().square().mean().backward()
    norm = clip_grad_norm_(block, max_norm)
    optimizer.step()
    return norm


@pytest.mark.parametrize("max_norm", [0.05, float("inf")], ids=["clipped", "measured"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["packed first", "separate first"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps(name: str, first: bool, dtype: torch.dtype, max_norm: float) -> None:
    pair = blocks(first, dtype, ODD if dtype == torch.float32 or name == "masters" else WHOLE_VECTORS)
    optimizers = [OPTIMIZERS[name](block.parameters()) for block in pair]
    start = gathered(pair[0], lambda p: p.detach().clone())
    for seed in range(STEPS):
        norms = [step(block, optimizer, seed, max_norm) for block, optimizer in zip(pair, optimizers, strict=True)]
        assert torch.equal(*norms) and float(norms[0]) > 0.05, "the bound of 0.05 clips"
        for value_of in (lambda p: p.grad, lambda p: p.detach()):
            packed, separate = (gathered(block, value_of) for block in pair)
            assert packed.keys() == separate.keys()
            assert all(torch.equal(packed[key], separate[key]) for key in packed), f"step {seed}"
    assert not any(torch.equal(value, start[key]) for key, value in gathered(pair[0], lambda p: p.detach()).items())

    kinds = {"momentum_buffer"} if name.startswith("sgd") else {"exp_avg", "exp_avg_sq"}
    for kind in kinds:
        packed, separate = (
            gathered(block, lambda p, o=optimizer, k=kind: o.state[p][k])
            for block, optimizer in zip(pair, optimizers, strict=True)
        )
        assert all(torch.equal(packed[key], separate[key]) for key in packed), kind


@pytest.mark.parametrize("first", [True, False], ids=["to separate", "to packed"])
def test_changing_the_layout_in_the_middle(first: bool) -> None:
    source, target = blocks(True) if first else reversed(blocks(True))
    optimizer = torch.optim.SGD(source.parameters(), lr=0.3)
    for seed in range(2):
        step(source, optimizer, seed)
    target.load_state_dict(source.state_dict())
    other = torch.optim.SGD(target.parameters(), lr=0.3)
    for seed in (2, 3):
        step(source, optimizer, seed)
        step(target, other, seed)
    left, right = (gathered(block, lambda p: p.detach()) for block in (source, target))
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_training_goes_on_after_evaluation_as_if_it_had_not_been() -> None:
    pair = blocks(True)[0], blocks(True)[0]
    optimizers = [torch.optim.AdamW(block.parameters(), lr=0.02) for block in pair]
    for seed in range(3):
        for evaluates, (block, optimizer) in enumerate(zip(pair, optimizers, strict=True)):
            step(block, optimizer, seed)
            if evaluates:
                block.eval()
                with torch.no_grad():
                    block(rows(block, 4, 9))
                block.train()
    left, right = (gathered(block, lambda p: p.detach()) for block in pair)
    assert all(torch.equal(left[key], right[key]) for key in left)
