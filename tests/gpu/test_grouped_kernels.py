"""hopper.cu and the grouped Triton kernels on a GPU against float64, expert by expert, in poisoned memory."""

# T tokens   R routed rows   D model width   F expert width   H = 2 F   E experts

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moe_runtime.kernels.gemm_dact import Preactivation, gemm_dact
from moe_runtime.kernels.gemm_gather_act import gemm_gather_act
from moe_runtime.kernels.grouped_gemm import ragged_k_gemm_tn, ragged_m_gemm_nn, ragged_m_gemm_nt
from moe_runtime.kernels.swiglu import Layout
from moe_runtime.testing import assert_close_per_expert, nan_filled_memory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOLERANCE = 1e-2
BACKENDS = ("cuda", "triton")
COUNTS = {
    "plain": (130, 257, 64, 1, 300),
    "first_empty": (0, 200, 90),
    "middle_empty": (100, 0, 0, 77),
    "last_empty": (129, 40, 0),
    "all_empty": (0, 0, 0),
    "one_owner": (0, 1000, 0, 0),
    "one_row": (0, 1, 0),
    "many": tuple((7 * e) % 90 for e in range(40)),
}
TAIL, TOKENS = 5, 57
NAN = float("nan")


def spread(values: Tensor, index_R: Tensor, num_rows: int) -> Tensor:
    """Rows by index; NaN past the experts'."""
    rows = values[index_R.clamp(max=len(values) - 1).long()]
    rows[num_rows:] = NAN
    return rows


class Problem:
    """Operands of every product for one list of counts, and what the products are."""

    def __init__(self, counts: Sequence[int], width: int, expert_width: int) -> None:
        self.counts, num_rows = counts, sum(counts)
        generator = torch.Generator("cuda").manual_seed(num_rows + width)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) * scale

        experts, rows = len(counts), num_rows + TAIL
        self.ends_E = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
        index_R = torch.randint(0, TOKENS, (rows,), generator=generator, device="cuda", dtype=torch.int32)
        index_R[num_rows:] = 2**30
        self.index_R = index_R
        self.x_TD, self.dy_TD = normal(TOKENS, width), normal(TOKENS, width)
        self.x_RD, self.dy_RD = (spread(values, index_R, num_rows) for values in (self.x_TD, self.dy_TD))
        self.w_EHD = normal(experts, 2 * expert_width, width, scale=width**-0.5)
        self.w_EDF = normal(experts, width, expert_width, scale=expert_width**-0.5)
        self.gate_R = torch.rand(rows, generator=generator, device="cuda")
        self.gate_R[num_rows:] = NAN
        self.dh_RH = normal(rows, 2 * expert_width)
        self.dh_RH[num_rows:] = NAN

    def parts(self, rows: Tensor) -> list[Tensor]:
        """Each expert's rows in float64."""
        return list(rows[: sum(self.counts)].double().split(list(self.counts)))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """With zeros for the tail."""
        return torch.cat([*parts, parts[0].new_zeros(TAIL, *parts[0].shape[1:])])

    def close(self, got: Tensor, parts: Sequence[Tensor], what: str, tolerance: float = TOLERANCE) -> None:
        wanted = self.join(parts)
        assert got.isfinite().all(), what
        assert not got[sum(self.counts) :].any(), what
        assert_close_per_expert(got.double(), wanted, tolerance, ends=self.ends_E, name=what)


@pytest.fixture(params=COUNTS.values(), ids=list(COUNTS))
def problem(request: pytest.FixtureRequest) -> Problem:
    return Problem(request.param, 200, 72)


@pytest.mark.parametrize("backend", BACKENDS)
def test_products(problem: Problem, backend: str) -> None:
    p = problem
    with nan_filled_memory():
        y_RH = ragged_m_gemm_nt(p.x_RD, p.w_EHD, p.ends_E, backend=backend)
        dx_RD = ragged_m_gemm_nn(p.dh_RH, p.w_EHD, p.ends_E, backend=backend)
        dw_EHD = ragged_k_gemm_tn(p.dh_RH, p.x_RD, p.ends_E, backend=backend)
    w_EHD = p.w_EHD.double()
    p.close(y_RH, [x @ w_EHD[e].T for e, x in enumerate(p.parts(p.x_RD))], "fprop")
    p.close(dx_RD, [dh @ w_EHD[e] for e, dh in enumerate(p.parts(p.dh_RH))], "dgrad")
    exact = torch.stack([dh.T @ x for dh, x in zip(p.parts(p.dh_RH), p.parts(p.x_RD), strict=True)])
    assert_close_per_expert(dw_EHD.double(), exact, TOLERANCE, name="wgrad")
    assert not dw_EHD[[e for e, count in enumerate(p.counts) if not count]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_gradients_into_a_buffer(problem: Problem, backend: str, offset: int, dtype: torch.dtype) -> None:
    p = problem
    exact = torch.stack([dh.T @ x for dh, x in zip(p.parts(p.dh_RH), p.parts(p.x_RD), strict=True)])
    flat = torch.full((exact.numel() + offset,), NAN, device="cuda", dtype=dtype)
    into = flat[offset:].view(exact.shape)
    found = ragged_k_gemm_tn(p.dh_RH, p.x_RD, p.ends_E, into_EFD=into, backend=backend)
    assert found.data_ptr() == into.data_ptr()
    assert_close_per_expert(into.double(), exact, TOLERANCE if dtype == torch.bfloat16 else 1e-5, name="store")
    flat.fill_(1.0)
    ragged_k_gemm_tn(p.dh_RH, p.x_RD, p.ends_E, into_EFD=into, accumulate=True, backend=backend)
    assert_close_per_expert(into.double(), exact + 1, TOLERANCE if dtype == torch.bfloat16 else 1e-5, name="add")


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_gradients_of_rows_by_index_are_those_of_rows_written_out(problem: Problem, backend: str) -> None:
    p = problem
    plain = ragged_k_gemm_tn(p.dh_RH, p.x_RD, p.ends_E, backend=backend)
    by_index = ragged_k_gemm_tn(p.dh_RH, p.x_TD, p.ends_E, x_index_R=p.index_R, backend=backend)
    assert torch.equal(plain, by_index)
    plain = ragged_k_gemm_tn(p.dy_RD, p.dh_RH, p.ends_E, backend=backend)
    by_index = ragged_k_gemm_tn(p.dy_TD, p.dh_RH, p.ends_E, dy_index_R=p.index_R, backend=backend)
    assert torch.equal(plain, by_index)
    into = torch.zeros_like(plain, dtype=torch.float32)
    by_index = ragged_k_gemm_tn(p.dy_TD, p.dh_RH, p.ends_E, dy_index_R=p.index_R, into_EFD=into, backend=backend)
    assert torch.equal(plain, into.to(plain.dtype))


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "by_index"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fused_activation(problem: Problem, backend: str, gathered: bool, layout: Layout) -> None:
    p, interleaved = problem, layout == "interleaved"
    x, dy, index_R = (p.x_TD, p.dy_TD, p.index_R) if gathered else (p.x_RD, p.dy_RD, None)
    w_EHD, w_EDF = p.w_EHD.double(), p.w_EDF.double()
    h = [x @ w_EHD[e].T for e, x in enumerate(p.parts(p.x_RD))]
    gates = p.parts(p.gate_R)
    with nan_filled_memory():
        h_RH, a_RF = gemm_gather_act(
            x, p.w_EHD, p.ends_E, p.gate_R, row_index_R=index_R, layout=layout, backend=backend
        )
    p.close(h_RH, h, "h")
    given_RH = h_RH.clone()
    given_RH[sum(p.counts) :] = NAN
    with nan_filled_memory():
        got = gemm_dact(
            dy,
            p.w_EDF,
            Preactivation(given_RH, p.gate_R, layout),
            p.ends_E,
            row_index_R=index_R,
            backend=backend,
        )
    a, dh, dgate = [], [], []
    for e, (h_e, gate, dy_e) in enumerate(zip(p.parts(given_RH), gates, p.parts(p.dy_RD), strict=True)):
        g, u = (h_e[:, 0::2], h_e[:, 1::2]) if interleaved else h_e.chunk(2, 1)
        sigmoid = torch.sigmoid(g)
        da = dy_e @ w_EDF[e]
        a.append(gate[:, None] * g * sigmoid * u)
        dgate.append((da * g * sigmoid * u).sum(1))
        dp = gate[:, None] * da
        halves = (dp * u * sigmoid * (1 + g * (1 - sigmoid)), dp * g * sigmoid)
        dh.append(torch.stack(halves, 2).flatten(1) if interleaved else torch.cat(halves, 1))
    assert got.a_RF is not None and got.dgate_R is not None
    p.close(a_RF, a, "a")
    p.close(got.dh_RH, dh, "dh")
    p.close(got.a_RF, a, "a again")
    p.close(got.dgate_R, dgate, "dgate", 3e-2)
    assert torch.equal(got.a_RF, a_RF)
