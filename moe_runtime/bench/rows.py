"""Times the row kernels (kernels/permute, combine, swiglu) against the torch ops that a model would write instead.

    python -m moe_runtime.bench.rows [--tokens 2048] [--top-k 4] [--experts 64] [--threads 1 2] [--dtype float32 ...]

Each pair is compared before it is timed, so a wrong kernel gets no number. Times are medians in microseconds, inputs
warm in cache as far as they fit. CPU only; the grouped products are another benchmark.
"""

# T tokens   K top-k   R routed rows (= T * K)   E experts   D model width   F expert width   H = 2 F

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_runtime.kernels.combine import gather_sum
from moe_runtime.kernels.permute import Route, gather_rows, route
from moe_runtime.kernels.select import native_status
from moe_runtime.kernels.swiglu import swiglu, swiglu_backward

_WIDTHS = ((160, 256), (512, 512), (1024, 1024))  # (D, F)
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


class Case(NamedTuple):
    """One op at one size: two functions of no argument that must agree."""

    name: str
    ours: Callable[[], object]
    torch_ops: Callable[[], object]


def main() -> None:
    """Prints one line per op, dtype, width and thread count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; {native_status().reason}")
    print(f"T={arguments.tokens} K={arguments.top_k} E={arguments.experts}, times in us")
    print(f"{'op':<28}{'dtype':<10}{'threads':>7}{'ours':>10}{'torch ops':>11}{'ratio':>7}")
    for dtype in (getattr(torch, name) for name in arguments.dtype):
        for case in _cases(arguments.tokens, arguments.top_k, arguments.experts, dtype):
            _compare(case, dtype)
            for threads in arguments.threads:
                torch.set_num_threads(threads)
                ours, theirs = _time_pair(case.ours, case.torch_ops)
                name = str(dtype).removeprefix("torch.")
                print(f"{case.name:<28}{name:<10}{threads:>7}{ours:>10.0f}{theirs:>11.0f}{theirs / ours:>7.2f}")


def _cases(num_tokens: int, top_k: int, num_experts: int, dtype: torch.dtype) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    scores_TE = torch.rand(num_tokens, num_experts, generator=generator)
    ids_TK = scores_TE.topk(top_k, dim=1).indices
    routed = route(ids_TK, num_experts)
    yield Case("route", lambda: route(ids_TK, num_experts), lambda: _route_in_torch(ids_TK, num_experts))
    for width, expert_width in _WIDTHS:
        yield from _moving_cases(torch.randn(num_tokens, width, generator=generator).to(dtype), routed)
        h_RH = torch.randn(num_tokens * top_k, 2 * expert_width, generator=generator).to(dtype)
        gate_R = torch.rand(num_tokens * top_k, generator=generator)
        yield from _swiglu_cases(h_RH, gate_R)


def _moving_cases(x_TD: Tensor, routed: Route) -> Iterator[Case]:
    num_tokens, top_k = routed.row_TK.shape
    width = x_TD.shape[1]
    row_R = routed.row_TK.reshape(-1)
    y_RD = x_TD.index_select(0, routed.slot_R // top_k)
    yield Case(
        f"gather_rows D={width}",
        lambda: gather_rows(x_TD, routed.slot_R, routed.ends_E, top_k=top_k),
        lambda: x_TD.index_select(0, routed.slot_R // top_k),
    )
    yield Case(
        f"gather_sum D={width}",
        lambda: gather_sum(y_RD, routed.row_TK),
        lambda: y_RD.index_select(0, row_R).view(num_tokens, top_k, width).sum(1),
    )


def _swiglu_cases(h_RH: Tensor, gate_R: Tensor) -> Iterator[Case]:
    width = h_RH.shape[1] // 2
    gate_R1 = gate_R[:, None].to(h_RH.dtype)
    leaf_RH, leaf_R1 = h_RH.clone().requires_grad_(), gate_R1.clone().requires_grad_()
    a_RF = _swiglu_in_torch(leaf_RH, leaf_R1)
    da_RF = torch.ones_like(h_RH[:, :width]).mul_(0.5)

    def torch_backward() -> tuple[Tensor, Tensor]:
        dh_RH, dgate_R1 = torch.autograd.grad(a_RF, (leaf_RH, leaf_R1), da_RF, retain_graph=True)
        return dh_RH, dgate_R1[:, 0].float()

    yield Case(f"swiglu F={width}", lambda: swiglu(h_RH, gate_R), lambda: _swiglu_in_torch(h_RH, gate_R1))
    yield Case(f"swiglu_backward F={width}", lambda: swiglu_backward(da_RF, h_RH, gate_R), torch_backward)


def _route_in_torch(ids_TK: Tensor, num_experts: int) -> Route:
    ids_S = ids_TK.flatten()
    slot_R = ids_S.argsort(stable=True)
    row_S = torch.empty_like(slot_R).scatter_(0, slot_R, torch.arange(len(slot_R)))
    return Route(slot_R, row_S.view(ids_TK.shape), ids_S.bincount(minlength=num_experts).cumsum(0))


def _swiglu_in_torch(h_RH: Tensor, gate_R1: Tensor) -> Tensor:
    g_RF, u_RF = h_RH.chunk(2, dim=1)
    return F.silu(g_RF) * u_RF * gate_R1


def _compare(case: Case, dtype: torch.dtype) -> None:
    """AssertionError unless both functions give the same tensors, up to the dtype's rounding of intermediate values."""
    ours, theirs = case.ours(), case.torch_ops()
    pairs = (
        zip(ours, theirs, strict=True) if isinstance(ours, tuple) and isinstance(theirs, tuple) else [(ours, theirs)]
    )
    tolerance = _TOLERANCE[dtype]
    for index, (a, b) in enumerate(pairs):
        scale = max(1.0, float(b.abs().max()))
        error = float((a.double() - b.double()).abs().max()) / scale
        if not error <= tolerance:
            raise AssertionError(f"{case.name}: result {index} is off by {error:.3g} of its largest value")


def _time_pair(first: Callable[[], object], second: Callable[[], object], seconds: float = 0.6) -> tuple[float, float]:
    """Median microseconds of each, the two taken in turn so that a busy machine slows both."""
    times: tuple[list[float], list[float]] = ([], [])
    for function in (first, second):
        for _ in range(3):
            function()
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times[0]) < 5:
        for function, taken in zip((first, second), times, strict=True):
            start = time.perf_counter()
            function()
            taken.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    main()
