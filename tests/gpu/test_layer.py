"""The layer on a GPU: right values and gradients, no host waits, the same bits every time."""

import pytest
import torch
from torch import Tensor

import moe_runtime as mr

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch says so whenever the mode is set.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]

# Relative norm of the error against fp64, worst seen over these cases: 4e-3 in bf16.
TOLERANCE = 1e-2

ROUTINGS = ["mixed", "one_owner", "first_and_last_empty", "dropped", "none"]


def _ids(case: str, tokens: int, experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    ids_TK = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :2]
    if case == "one_owner":
        return torch.full_like(ids_TK, 2)
    if case == "first_and_last_empty":
        return 1 + ids_TK % (experts - 2)
    if case == "dropped":
        return torch.where(torch.rand(ids_TK.shape, generator=generator) < 0.5, -1, ids_TK)
    return torch.full_like(ids_TK, -1) if case == "none" else ids_TK


def _expected(module: mr.RoutedExperts, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, dy_TD: Tensor) -> list[Tensor]:
    """Output and gradients of a dense loop in fp64."""
    x, gates = (t.detach().double().cpu().requires_grad_() for t in (x_TD, gates_TK))
    up, down = (
        linear.weight.detach().double().cpu().requires_grad_()
        for linear in (module.experts.gate_up, module.experts.down)
    )
    rows = []
    for t, choices in enumerate(ids_TK.tolist()):
        total = 0 * x[t] + 0 * up.sum() + 0 * down.sum() + 0 * gates[t].sum()
        for k, e in enumerate(choices):
            if e >= 0:
                g, u = (up[e] @ x[t]).chunk(2)
                total = total + gates[t, k] * (down[e] @ (torch.nn.functional.silu(g) * u))
        rows.append(total)
    y = torch.stack(rows)
    y.backward(dy_TD.double().cpu())
    grads = [value.grad for value in (x, gates, up, down)]
    return [y.detach(), *(grad for grad in grads if grad is not None)]


def _run(module: mr.RoutedExperts, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, dy_TD: Tensor) -> list[Tensor]:
    module.zero_grad()
    x, gates = x_TD.detach().requires_grad_(), gates_TK.detach().requires_grad_()
    y = module(x, ids_TK, gates)
    y.backward(dy_TD)
    found = [y.detach(), x.grad, gates.grad, module.experts.gate_up.weight.grad, module.experts.down.weight.grad]
    return [value for value in found if value is not None]


def _inputs(case: str, tokens: int = 96, experts: int = 8, width: int = 64) -> tuple:
    torch.manual_seed(0)
    config = mr.RoutedExpertsConfig(num_experts=experts, hidden_size=width, intermediate_size=48)
    module = mr.RoutedExperts(config, dtype=torch.bfloat16, device="cuda")
    x_TD = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
    dy_TD = torch.randn_like(x_TD)
    gates_TK = torch.rand(tokens, 2, device="cuda")
    return module, x_TD, _ids(case, tokens, experts).cuda(), gates_TK, dy_TD


@pytest.mark.parametrize("case", ROUTINGS)
def test_values_and_gradients_match_a_dense_loop(case: str) -> None:
    module, *inputs = _inputs(case)
    # Dirty memory, so that what a kernel leaves unwritten is not zero by luck.
    torch.full((2**24,), float("nan"), dtype=torch.bfloat16, device="cuda")
    got, expected = _run(module, *inputs), _expected(module, *inputs)
    for name, a, b in zip(("y", "dx", "dgates", "dgate_up", "ddown"), got, expected, strict=True):
        assert torch.isfinite(a).all(), name
        error = (a.double().cpu() - b).norm() / b.norm().clamp(min=1e-12) if b.norm() else a.norm().cpu()
        assert error < TOLERANCE, f"{name}: {error:.1e}"
    empty = [e for e in range(8) if not (inputs[1] == e).any()]
    for gradient in got[3:]:
        assert not gradient[empty].any(), "an expert without rows gets exact zeros"


def test_forward_and_backward_never_wait_for_the_device() -> None:
    module, *inputs = _inputs("mixed")
    _run(module, *inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _run(module, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_repeats_have_the_same_bits() -> None:
    module, *inputs = _inputs("mixed", tokens=512)
    first = [value.clone() for value in _run(module, *inputs)]
    for _ in range(20):
        for a, b in zip(_run(module, *inputs), first, strict=True):
            assert torch.equal(a, b)


def test_splits_on_the_device_are_never_read_by_the_host() -> None:
    linear = mr.GroupedLinear(4, 64, 32, dtype=torch.bfloat16, device="cuda")
    x_RD = torch.randn(40, 64, dtype=torch.bfloat16, device="cuda")
    x_RD[30:] = float("nan")
    splits_E = torch.tensor([10, 0, 15, 5], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y_RF = linear(x_RD, splits_E)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(y_RF).all() and not y_RF[30:].any()
    assert torch.equal(y_RF, linear(x_RD, [10, 0, 15, 5]))
