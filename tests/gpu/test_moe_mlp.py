"""The experts as one function on a GPU: values, gradients, graphs, memory, and sizes past 2^31 elements."""

# T tokens   K top-k   R routed rows   D model width   F expert width   H = 2 F   E experts

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from moe_runtime.ep.rows import gather_gates
from moe_runtime.functional import HeldWeight, TokenRows, moe_mlp
from moe_runtime.kernels.permute import route
from moe_runtime.testing import assert_close_per_expert, nan_filled_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch says so whenever the mode is set.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]

# Against fp32 products of the same bfloat16 operands. Worst seen: 5e-3.
TOLERANCE = 1.5e-2
NAMES = ("y", "dx", "dgates", "dgate_up", "ddown")


class Case(NamedTuple):
    """One layer's inputs."""

    x_TD: Tensor
    ids_TK: Tensor
    gates_TK: Tensor
    w_EHD: Tensor
    w_EDF: Tensor
    dy_TD: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.x_TD, self.gates_TK, self.w_EHD, self.w_EDF


def make(ids_TK: Tensor, experts: int, width: int, expert_width: int, *, seed: int = 0) -> Case:
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens, top_k = ids_TK.shape

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) * scale

    return Case(
        normal(tokens, width).requires_grad_(),
        ids_TK,
        torch.rand(tokens, top_k, generator=generator, device="cuda").requires_grad_(),
        normal(experts, 2 * expert_width, width, scale=width**-0.5).requires_grad_(),
        normal(experts, width, expert_width, scale=expert_width**-0.5).requires_grad_(),
        normal(tokens, width),
    )


def random_ids(tokens: int, top_k: int, experts: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator, device="cuda").argsort(1)[:, :top_k]


def layer(case: Case) -> Tensor:
    routed = route(case.ids_TK, len(case.w_EHD))
    tokens = TokenRows((routed.slot_R // case.ids_TK.shape[1]).to(torch.int32), routed.row_TK)
    gate_R = gather_gates(case.gates_TK, routed)
    return moe_mlp(case.x_TD, gate_R, routed.ends_E, HeldWeight(case.w_EHD), HeldWeight(case.w_EDF), tokens=tokens)


def run(case: Case) -> tuple[Tensor, ...]:
    y_TD = layer(case)
    return (y_TD.detach(), *torch.autograd.grad(y_TD, case.leaves, case.dy_TD))


def expected(case: Case) -> tuple[Tensor, ...]:
    """y and gradients, expert by expert in fp32."""
    x_TD, ids_TK, gates_TK, w_EHD, w_EDF, dy_TD = (value.detach() for value in case)
    y_TD, dx_TD = torch.zeros_like(x_TD, dtype=torch.float32), torch.zeros_like(x_TD, dtype=torch.float32)
    dgates_TK = torch.zeros_like(gates_TK)
    d_up, d_down = torch.zeros_like(w_EHD, dtype=torch.float32), torch.zeros_like(w_EDF, dtype=torch.float32)
    for e in range(len(w_EHD)):
        token, choice = (ids_TK == e).nonzero(as_tuple=True)
        x, gate, dy = x_TD[token].float(), gates_TK[token, choice][:, None], dy_TD[token].float()
        up, down = w_EHD[e].float(), w_EDF[e].float()
        g, u = (x @ up.T).chunk(2, 1)
        sigmoid = torch.sigmoid(g)
        product = g * sigmoid * u
        y_TD.index_add_(0, token, (gate * product) @ down.T)
        da = dy @ down
        dgates_TK[token, choice] = (da * product).sum(1)
        dp = gate * da
        dh = torch.cat((dp * u * sigmoid * (1 + g * (1 - sigmoid)), dp * g * sigmoid), 1)
        dx_TD.index_add_(0, token, dh @ up)
        d_up[e], d_down[e] = dh.T @ x, dy.T @ (gate * product)
    return y_TD, dx_TD, dgates_TK, d_up, d_down


def routing(name: str, tokens: int, experts: int) -> Tensor:
    ids_TK = random_ids(tokens, 2, experts)
    if name == "one_owner":
        return torch.full_like(ids_TK, 2)
    if name == "first_and_last_empty":
        return 1 + ids_TK % (experts - 2)
    if name == "middle_empty":
        return torch.where(ids_TK == 3, 4, ids_TK)
    if name == "dropped":
        return torch.where(random_ids(tokens, 2, 9, seed=1) < 4, -1, ids_TK)
    return torch.full_like(ids_TK, -1) if name == "none" else ids_TK


ROUTINGS = ("mixed", "one_owner", "first_and_last_empty", "middle_empty", "dropped", "none")


@pytest.mark.parametrize(("width", "expert_width"), [(200, 72), (2880, 264), (64, 1408)])
@pytest.mark.parametrize("name", ROUTINGS)
def test_values_and_gradients(name: str, width: int, expert_width: int) -> None:
    case = make(routing(name, 333, 7), 7, width, expert_width)
    with nan_filled_memory():
        got = run(case)
    for what, a, b in zip(NAMES, got, expected(case), strict=True):
        if a.dim() == 3:
            assert_close_per_expert(a, b, TOLERANCE, name=what)
        else:
            assert float((a - b).norm()) <= TOLERANCE * float(b.norm()), what


def test_one_token_of_one_expert() -> None:
    case = make(torch.zeros(1, 1, dtype=torch.int64, device="cuda"), 1, 64, 16)
    for what, a, b in zip(NAMES, run(case), expected(case), strict=True):
        assert float((a - b).norm()) <= TOLERANCE * float(b.norm()), what


def test_rows_of_an_exchange_match_rows_of_tokens() -> None:
    case = make(random_ids(300, 2, 5), 5, 128, 64)
    routed = route(case.ids_TK, 5)
    token_R = routed.slot_R // 2
    rows = (case.x_TD.detach()[token_R]).requires_grad_()
    gate_R = case.gates_TK.detach().reshape(-1)[routed.slot_R].requires_grad_()
    y_RD = moe_mlp(rows, gate_R, routed.ends_E, HeldWeight(case.w_EHD), HeldWeight(case.w_EDF))
    found = torch.autograd.grad(y_RD, (case.w_EHD, case.w_EDF), case.dy_TD[token_R])
    _, _, _, *wanted = run(case)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_graphs_follow_new_routings_bit_for_bit() -> None:
    case = make(random_ids(500, 2, 8), 8, 256, 128)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(case)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(case)
    for name in ROUTINGS:
        case.ids_TK.copy_(routing(name, 500, 8))
        graph.replay()
        replayed = [value.clone() for value in captured]
        assert all(torch.equal(a, b) for a, b in zip(replayed, run(case), strict=True)), name


@pytest.fixture
def no_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("no_syncs")
def test_never_waits_for_the_gpu() -> None:
    run(make(random_ids(300, 2, 8), 8, 128, 64))


def test_a_hundred_runs_give_the_same_bits() -> None:
    case = make(random_ids(4096, 4, 16), 16, 512, 384)
    first = run(case)
    for _, again in zip(range(100), map(run, itertools.repeat(case)), strict=False):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_saved_bytes_beyond_inputs_are_h_and_a_few_a_row() -> None:
    case = make(random_ids(512, 4, 8), 8, 256, 128)
    held: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        y_TD = layer(case)
    for given in (*case, y_TD):
        held.pop(given.untyped_storage().data_ptr(), None)
    rows = case.ids_TK.numel()
    # The allocator's blocks are whole multiples of 512 bytes.
    assert 4 * rows * 128 < sum(held.values()) <= rows * (4 * 128 + 24) + 4 * 512


def test_more_than_two_to_the_31_elements() -> None:
    tokens, top_k, width = 38_000, 8, 7168
    case = make(random_ids(tokens, top_k, 9), 9, width, 64)
    assert tokens * top_k * width > 2**31
    y_TD, dx_TD, dgates_TK, d_up, d_down = run(case)
    picked = torch.cat((torch.arange(0, 40), torch.arange(tokens - 40, tokens))).cuda()
    few = Case(
        case.x_TD.detach()[picked],
        case.ids_TK[picked],
        case.gates_TK.detach()[picked],
        case.w_EHD,
        case.w_EDF,
        case.dy_TD[picked],
    )
    for what, a, b in zip(NAMES, (y_TD[picked], dx_TD[picked], dgates_TK[picked]), expected(few)[:3], strict=False):
        assert float((a - b).norm()) <= TOLERANCE * float(b.norm()), what
    # The last expert's rows lie past 2^31 elements.
    token = (case.ids_TK == 8).nonzero()[:, 0]
    only = case._replace(ids_TK=torch.where(case.ids_TK == 8, 8, -1))
    assert len(token) > 1000
    _, _, _, up, down = expected(only)
    assert_close_per_expert(d_up[8:], up[8:], TOLERANCE)
    assert_close_per_expert(d_down[8:], down[8:], TOLERANCE)


def test_many_experts() -> None:
    case = make(random_ids(700, 3, 512), 512, 4096, 64)
    for what, a, b in zip(NAMES, run(case), expected(case), strict=True):
        assert float((a - b).norm()) <= TOLERANCE * float(b.norm()), what
