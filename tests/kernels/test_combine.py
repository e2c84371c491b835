"""The sum over choices: its order and its one rounding are part of the contract, so results are compared bit by bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_runtime.kernels.combine import gather_sum
from moe_runtime.kernels.permute import gather_rows, route

NAN = float("nan")


def random_rows(num_tokens: int, top_k: int, dropped: float = 0.2) -> Tensor:
    """A Route's row_TK: distinct rows, -1 where dropped."""
    generator = torch.Generator().manual_seed(num_tokens * 31 + top_k)
    row_TK = torch.randperm(num_tokens * top_k, generator=generator, dtype=torch.int32).view(num_tokens, top_k)
    return row_TK.masked_fill_(torch.rand(row_TK.shape, generator=generator) < dropped, -1)


def summed(y_RD: Tensor, row_TK: Tensor) -> Tensor:
    """The definition as a loop, in float32."""
    out_TD = torch.zeros(len(row_TK), y_RD.shape[1])
    for t, rows in enumerate(row_TK.tolist()):
        for r in rows:
            if r >= 0:
                out_TD[t] += y_RD[r].float()
    return out_TD.to(y_RD.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [0, 1, 17, 512, 513, 1100])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 2), (3, 0), (1, 1), (5, 2), (4, 3), (3, 7), (2, 9)])
def test_gather_sum(backend: str, num_tokens: int, top_k: int, width: int, dtype: torch.dtype) -> None:
    y_RD = torch.randn(num_tokens * top_k, width).to(dtype)
    row_TK = random_rows(num_tokens, top_k)
    out_TD = gather_sum(y_RD, row_TK, backend=backend)
    assert torch.equal(out_TD, summed(y_RD, row_TK))
    assert out_TD.dtype == dtype


def test_gather_sum_adds_in_order_of_k(backend: str) -> None:
    y_RD = torch.tensor([[1e8], [1.0], [-1e8]])
    rows = [[0, 1, 2], [0, 2, 1], [1, 0, 2]]
    out_TD = gather_sum(y_RD, torch.tensor(rows, dtype=torch.int32), backend=backend)
    assert out_TD.flatten().tolist() == [0.0, 1.0, 0.0]


def test_gather_sum_rounds_bfloat16_once(backend: str) -> None:
    y_RD = torch.tensor([[1.0], [2.0**-9], [2.0**-9]], dtype=torch.bfloat16)
    out_TD = gather_sum(y_RD, torch.tensor([[0, 1, 2]], dtype=torch.int32), backend=backend)
    assert out_TD.item() == 1.0  # 1 + 2^-8 is a tie: to even
    y_RD = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    out_TD = gather_sum(y_RD, torch.tensor([[0, 1, 2]], dtype=torch.int32), backend=backend)
    assert out_TD.item() == 1.0 + 2.0**-7  # rounding after each addition would give 1


def test_gather_sum_rounds_bfloat16_as_torch_does(backend: str) -> None:
    bits = torch.tensor(
        [0x3F800001, 0x3F808000, 0x3F818000, 0x7F7F7FFF, 0x7F800000, 0x00000001, 0x00018000, 0x80018000]
    )
    fp32 = bits.to(torch.int32).view(torch.float32)
    fp32 = torch.cat((fp32, torch.randn(500) * 10.0 ** torch.randint(-38, 38, (500,))))
    high = fp32.to(torch.bfloat16)
    low = (fp32 - high.float()).nan_to_num(0.0).to(torch.bfloat16)
    total = high.float() + low.float()
    out_TD = gather_sum(torch.stack((high, low)), torch.tensor([[0, 1]], dtype=torch.int32), backend=backend)
    torch.testing.assert_close(out_TD[0], total.to(torch.bfloat16), rtol=0, atol=0)


def test_gather_sum_reads_only_named_rows(backend: str) -> None:
    y_RD = torch.full((6, 3), NAN)
    y_RD[2], y_RD[4] = 1.0, 2.0
    row_TK = torch.tensor([[2, -1], [-1, -1], [4, 2]], dtype=torch.int32)
    out_TD = gather_sum(y_RD, row_TK, backend=backend)
    assert out_TD[:, 0].tolist() == [1.0, 0.0, 3.0]
    assert not out_TD.isnan().any()


def test_gather_sum_keeps_nan_and_infinity(backend: str) -> None:
    y_RD = torch.tensor([[NAN, float("inf"), float("inf")], [1.0, 1.0, float("-inf")]])
    for dtype in (torch.float32, torch.bfloat16):
        out_TD = gather_sum(y_RD.to(dtype), torch.tensor([[0, 1]], dtype=torch.int32), backend=backend)
        assert out_TD.isnan().tolist() == [[True, False, True]]
        assert out_TD[0, 1] == float("inf")


@pytest.mark.parametrize("row", [[[0, 1]], [[-1, -1]]])
def test_gather_sum_without_rows(backend: str, row: list[list[int]]) -> None:
    row_TK = torch.tensor(row, dtype=torch.int32).clamp(max=-1)
    assert torch.equal(gather_sum(torch.empty(0, 4), row_TK, backend=backend), torch.zeros(1, 4))


def test_gather_sum_strided(backend: str) -> None:
    base = torch.randn(24, 24)
    row_TK = random_rows(6, 2)
    odd = torch.randn(12 * 5 + 1).to(torch.bfloat16)[1:].view(12, 5)
    for y_RD in (base[:12, ::3], base[:, :12].t()[:, :7], base[:1, :9].expand(12, 9), base[:12, :1].expand(12, 8), odd):
        for rows in (row_TK, row_TK.t().contiguous().t()):
            assert torch.equal(gather_sum(y_RD, rows, backend=backend), summed(y_RD, row_TK))


def test_gather_sum_is_the_gradient_of_gather_rows(backend: str) -> None:
    ids_TK = torch.tensor([[1, 0, -1], [2, 2, 1], [-1, -1, -1], [0, 1, 2]])
    routed = route(ids_TK, 3)
    x_TD, dy_RD, dout_TD = torch.randn(4, 6), torch.randn(12, 6), torch.randn(4, 6)
    x_TD.requires_grad_()
    gather_rows(x_TD, routed.slot_R, routed.ends_E, top_k=3, backend="reference").backward(dy_RD)
    assert x_TD.grad is not None
    torch.testing.assert_close(gather_sum(dy_RD, routed.row_TK, backend=backend), x_TD.grad)
    y_RD = torch.randn(12, 6, requires_grad=True)
    gather_sum(y_RD, routed.row_TK, backend="reference").backward(dout_TD)
    assert y_RD.grad is not None
    dy_again_RD = gather_rows(dout_TD, routed.slot_R, routed.ends_E, top_k=3, backend=backend)
    assert torch.equal(dy_again_RD, y_RD.grad)


def test_gather_sum_thread_counts(backend: str, at_thread_counts: Any) -> None:
    y_RD, row_TK = torch.randn(3000, 129), random_rows(1000, 3)
    first, *rest = at_thread_counts(lambda: gather_sum(y_RD, row_TK, backend=backend))
    assert all(torch.equal(first, other) for other in rest)


def test_gather_sum_refuses_wrong_arguments(backend: str, native_ops: Any) -> None:
    with pytest.raises(ValueError, match=r"expected y \(R, D\) and row \(T, K\), got \(3,\)"):
        gather_sum(torch.zeros(3), torch.zeros(1, 1, dtype=torch.int32), backend=backend)
    with pytest.raises(ValueError, match=r"row must lie in \[-1, number of rows=3\), got a larger one for token 1"):
        native_ops.gather_sum(torch.zeros(3, 2), torch.tensor([[0], [3]], dtype=torch.int32))
    with pytest.raises(ValueError, match="row must be Int, got Long"):
        native_ops.gather_sum(torch.zeros(3, 2), torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="y must be float32 or bfloat16, got Double"):
        native_ops.gather_sum(torch.zeros(3, 2, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.int32))


@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 2), (5, 3)])
def test_opcheck(native_ops: Any, num_tokens: int, top_k: int) -> None:
    y_RD = torch.randn(num_tokens * top_k, 6)
    torch.library.opcheck(native_ops.gather_sum.default, (y_RD, random_rows(num_tokens, top_k)))
