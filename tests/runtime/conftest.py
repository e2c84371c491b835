"""Small models with delayed layers, and what every test of the coordinator does with them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import moe_runtime as mr

SPLITS = (3, 0, 2)


class Stack(nn.Module):
    """Two grouped layers with a residual; `twice` uses the first one two times in a forward."""

    def __init__(self, *, delayed: bool, discrete: bool = False, twice: bool = False, width: int = 8) -> None:
        super().__init__()
        self.twice = twice
        self.first, self.second = (
            mr.GroupedLinear(
                len(SPLITS), width, width, single_grouped_weight=not discrete, delay_wgrad_compute=delayed, bias=True
            )
            for _ in range(2)
        )

    def forward(self, x_RD: Tensor) -> Tensor:
        x_RD = x_RD + self.first(x_RD, SPLITS)
        if self.twice:
            x_RD = x_RD + self.first(x_RD.tanh(), SPLITS)
        return self.second(x_RD, SPLITS)


@pytest.fixture
def make() -> Callable[..., tuple[Stack, mr.WgradCoordinator]]:
    """make(schedule, budget_bytes=None, **options of Stack) -> (model from seed 0, the coordinator attached to it)."""

    def build(schedule: str, budget_bytes: int | None = None, **options: bool) -> tuple[Stack, mr.WgradCoordinator]:
        torch.manual_seed(0)
        model = Stack(delayed=schedule == "deferred", **options)
        coordinator = mr.WgradCoordinator(schedule, budget_bytes)  # pyright: ignore[reportArgumentType]
        return model, coordinator.attach(model)

    return build


@pytest.fixture
def rows() -> Callable[..., Tensor]:
    """rows(seed): (5, 8) rows for a Stack."""

    def build(seed: int = 0) -> Tensor:
        return torch.randn(sum(SPLITS), 8, generator=torch.Generator().manual_seed(seed))

    return build


@pytest.fixture
def grads() -> Callable[[nn.Module], dict[str, Tensor | None]]:
    """grads(model): a copy of every gradient."""

    def build(model: nn.Module) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}

    return build


@pytest.fixture
def assert_same() -> Callable[[dict, dict], None]:
    """assert_same(got, expected): the same names, and the same bits."""

    def check(got: dict, expected: dict) -> None:
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert (got[name] is None) == (value is None), name
            assert value is None or torch.equal(got[name], value), name

    return check


class Planted(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, dx: Tensor) -> Tensor:
        raise ArithmeticError("planted")


@pytest.fixture
def fail_halfway() -> Callable[[Stack, Tensor], None]:
    """fail_halfway(model, x): a backward that hands in the second layer's job and raises before the first's."""

    def run(model: Stack, x_RD: Tensor) -> None:
        handle = model.second.register_forward_pre_hook(lambda _, args: (Planted.apply(args[0]), *args[1:]))
        try:
            loss = model(x_RD).square().sum()
        finally:
            handle.remove()
        with pytest.raises(ArithmeticError, match="planted"):
            loss.backward()

    return run
