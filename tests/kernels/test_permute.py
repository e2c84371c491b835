"""Routing is checked against its definition, gathering against a loop; both at sizes that a model never has."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_runtime.kernels.permute import Route, gather_rows, route

# (tokens, top_k, experts): no token, no choice, one of everything, odd sizes, more than one chunk of the counting sort
SIZES = [(0, 2, 3), (4, 0, 3), (1, 1, 1), (7, 3, 5), (1, 6, 64), (9000, 4, 7)]


def random_ids(num_tokens: int, top_k: int, num_experts: int, dropped: float = 0.2) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens + top_k)
    ids_TK = torch.randint(num_experts, (num_tokens, top_k), generator=generator)
    return ids_TK.masked_fill_(torch.rand(ids_TK.shape, generator=generator) < dropped, -1)


def check_route(ids_TK: Tensor, num_experts: int, routed: Route) -> None:
    """The definition, in Python: a stable sort by id with negative ids last, its inverse, and its counts."""
    ids = ids_TK.reshape(-1).tolist()
    slots = sorted(range(len(ids)), key=lambda s: (ids[s] if ids[s] >= 0 else num_experts, s))
    assert routed.slot_R.tolist() == slots
    row = {s: r for r, s in enumerate(slots)}
    assert routed.row_TK.reshape(-1).tolist() == [row[s] if ids[s] >= 0 else -1 for s in range(len(ids))]
    assert routed.ends_E.tolist() == [sum(0 <= i <= e for i in ids) for e in range(num_experts)]
    assert routed.row_TK.shape == ids_TK.shape
    assert {t.dtype for t in routed} == {torch.int32}


def test_route_example(backend: str) -> None:
    routed = route(torch.tensor([[1, 0], [1, -1]]), 2, backend=backend)
    assert [t.tolist() for t in routed] == [[1, 0, 2, 3], [[1, 0], [2, -1]], [1, 3]]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), num_experts=st.integers(1, 6), top_k=st.integers(1, 4), dtype=st.sampled_from(("int32", "int64"))
)
def test_route_is_the_stable_sort(backend: str, data: st.DataObject, num_experts: int, top_k: int, dtype: str) -> None:
    rows = st.lists(st.integers(-2, num_experts - 1), min_size=top_k, max_size=top_k)
    ids = data.draw(st.lists(rows, max_size=12))
    ids_TK = torch.tensor(ids, dtype=getattr(torch, dtype)).reshape(len(ids), top_k)
    check_route(ids_TK, num_experts, route(ids_TK, num_experts, backend=backend))


@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), SIZES)
def test_route_sizes(backend: str, num_tokens: int, top_k: int, num_experts: int) -> None:
    ids_TK = random_ids(num_tokens, top_k, num_experts)
    check_route(ids_TK, num_experts, route(ids_TK, num_experts, backend=backend))


@pytest.mark.parametrize("dropped", [0.0, 1.0])
def test_route_all_or_nothing_dropped(backend: str, dropped: float) -> None:
    ids_TK = random_ids(11, 2, 4, dropped)
    check_route(ids_TK, 4, route(ids_TK, 4, backend=backend))


def test_route_strided_ids(backend: str) -> None:
    ids_TK = random_ids(6, 4, 3)
    for strided in (ids_TK.t(), ids_TK[::2, 1::2], ids_TK[:1].expand(5, 4), ids_TK[:, :1].expand(6, 3)):
        check_route(strided, 3, route(strided, 3, backend=backend))


@pytest.mark.parametrize("num_tokens", [3, 40_000])
def test_route_names_the_first_id_that_is_too_large(backend: str, num_tokens: int) -> None:
    ids_TK = torch.zeros(num_tokens, 2, dtype=torch.int64)
    ids_TK[1, 1] = ids_TK[-1, 0] = 9
    with pytest.raises(ValueError, match=r"\[-1, num_experts=8\), got 9 for token 1, choice 1"):
        route(ids_TK, 8, backend=backend)


def test_route_refuses_wrong_arguments(backend: str) -> None:
    with pytest.raises(ValueError, match="expected ids"):
        route(torch.zeros(4, dtype=torch.int64), 2, backend=backend)
    with pytest.raises(ValueError, match="num_experts"):
        route(torch.zeros(4, 1, dtype=torch.int64), 0, backend=backend)
    with pytest.raises(TypeError, match=r"int64 or int32, got torch\.float32"):
        route(torch.zeros(4, 1), 2, backend=backend)


def test_route_thread_counts(backend: str, at_thread_counts: Any) -> None:
    ids_TK = random_ids(30_000, 4, 33)
    first, *rest = at_thread_counts(lambda: route(ids_TK, 33, backend=backend))
    assert all(torch.equal(a, b) for other in rest for a, b in zip(first, other, strict=True))


def gathered(x_TD: Tensor, routed: Route, top_k: int) -> Tensor:
    """The gather as a loop."""
    y_RD = x_TD.new_zeros(len(routed.slot_R), x_TD.shape[1])
    for r, slot in enumerate(routed.slot_R.tolist()[: int(routed.ends_E[-1])]):
        y_RD[r] = x_TD[slot // top_k]
    return y_RD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [0, 1, 7, 64, 129])
@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [size for size in SIZES[:5] if size[1]])
def test_gather_rows(
    backend: str, num_tokens: int, top_k: int, num_experts: int, width: int, dtype: torch.dtype
) -> None:
    x_TD = torch.randn(num_tokens, width, dtype=dtype)
    routed = route(random_ids(num_tokens, top_k, num_experts), num_experts)
    y_RD = gather_rows(x_TD, routed.slot_R, routed.ends_E, top_k=top_k, backend=backend)
    assert torch.equal(y_RD, gathered(x_TD, routed, top_k))
    assert y_RD.dtype == dtype


def test_gather_rows_past_the_end_are_zero_whatever_x_holds(backend: str) -> None:
    ids_TK = torch.tensor([[0, -1], [-1, -1], [1, 0]])
    routed = route(ids_TK, 2)
    x_TD = torch.full((3, 5), float("nan"))
    y_RD = gather_rows(x_TD, routed.slot_R, routed.ends_E, top_k=2, backend=backend)
    assert y_RD[:3].isnan().all()
    assert torch.equal(y_RD[3:], torch.zeros(3, 5))


def test_gather_rows_strided_x(backend: str) -> None:
    routed = route(random_ids(6, 2, 3), 3)
    base = torch.randn(24, 24)
    odd = torch.randn(6 * 5 + 1, dtype=torch.bfloat16)[1:].view(6, 5)  # 2 bytes past an aligned address
    for x_TD in (base[:6, ::4], base[:, :6].t()[:, :7], base[:1, :9].expand(6, 9), base[:6, :1].expand(6, 8), odd):
        y_RD = gather_rows(x_TD, routed.slot_R, routed.ends_E, top_k=2, backend=backend)
        assert torch.equal(y_RD, gathered(x_TD, routed, 2))
        assert y_RD.is_contiguous()


def test_gather_rows_strided_indices(backend: str) -> None:
    x_TD = torch.randn(6, 5)
    routed = route(random_ids(6, 2, 3), 3)
    slot_R = torch.stack((routed.slot_R, routed.slot_R + 100), dim=1)[:, 0]
    ends_E = torch.stack((routed.ends_E, routed.ends_E + 100), dim=1)[:, 0]
    y_RD = gather_rows(x_TD, slot_R, ends_E, top_k=2, backend=backend)
    assert torch.equal(y_RD, gathered(x_TD, routed, 2))


def test_gather_rows_refuses_wrong_arguments(backend: str) -> None:
    x_TD, slot_R, ends_E = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for x, slot, ends, top_k in (
        (x_TD[0], slot_R, ends_E, 1),
        (x_TD, slot_R, ends_E[:0], 1),
        (x_TD, slot_R, ends_E, 0),
    ):
        with pytest.raises(ValueError, match="expected x"):
            gather_rows(x, slot, ends, top_k=top_k, backend=backend)


def test_native_gather_rows_checks_what_it_reads(native_ops: Any) -> None:
    x_TD, ends_E = torch.zeros(3, 2), torch.tensor([2], dtype=torch.int32)
    for slot in ([0, 6], [0, -1]):
        with pytest.raises(
            ValueError, match=rf"slot must lie in \[0, T \* top_k=6\) up to row 2, got {slot[1]} at row 1"
        ):
            native_ops.gather_rows(x_TD, torch.tensor(slot, dtype=torch.int32), ends_E, 2)
    with pytest.raises(ValueError, match=r"ends\[-1\] must lie in \[0, number of rows=1\], got 2"):
        native_ops.gather_rows(x_TD, torch.zeros(1, dtype=torch.int32), ends_E, 2)
    with pytest.raises(ValueError, match="slot must be Int, got Long"):
        native_ops.gather_rows(x_TD, torch.zeros(2, dtype=torch.int64), ends_E, 2)


def test_gather_rows_thread_counts(backend: str, at_thread_counts: Any) -> None:
    routed = route(random_ids(3000, 2, 9), 9)
    x_TD = torch.randn(3000, 129)
    first, *rest = at_thread_counts(lambda: gather_rows(x_TD, routed.slot_R, routed.ends_E, top_k=2, backend=backend))
    assert torch.equal(first, gathered(x_TD, routed, 2))
    assert all(torch.equal(first, other) for other in rest)


@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(0, 2, 3), (7, 3, 5)])
def test_opcheck(native_ops: Any, num_tokens: int, top_k: int, num_experts: int) -> None:
    ids_TK = random_ids(num_tokens, top_k, num_experts)
    torch.library.opcheck(native_ops.route.default, (ids_TK, num_experts))
    routed = route(ids_TK, num_experts)
    x_TD = torch.randn(num_tokens, 5)
    torch.library.opcheck(native_ops.gather_rows.default, (x_TD, routed.slot_R, routed.ends_E, top_k))
