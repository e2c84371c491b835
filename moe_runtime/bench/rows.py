"""Times the row kernels (kernels/permute, combine, swiglu) against the torch ops that a model would write instead.

    python -m moe_runtime.bench.rows [--tokens 2048] [--top-k 4] [--experts 64] [--threads 1 2] [--dtype float32 ...]
    python -m moe_runtime.bench.rows --device cuda [--tokens 16384] [--top-k 8] [--experts 128] [--dtype bfloat16 ...]

Each pair is compared before it is timed, so a wrong kernel gets no number. Times are medians in microseconds. On the
CPU inputs are warm in cache as far as they fit. On a GPU (needs triton) L2 is cleared before each call; GB/s counts
every operand and result once, beside what a copy in device memory reaches in the same run. The grouped products are
another benchmark.
"""

# T tokens   K top-k   R routed rows (= T * K)   E experts   D model width   F expert width   H = 2 F

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_runtime.kernels.combine import gather_sum
from moe_runtime.kernels.permute import Route, gather_rows, route
from moe_runtime.kernels.select import native_status
from moe_runtime.kernels.swiglu import swiglu, swiglu_backward
from moe_runtime.kernels.tables import describe

_WIDTHS = ((160, 256), (512, 512), (1024, 1024))  # (D, F)
_GPU_WIDTHS = ((2048, 768), (4096, 1536), (7168, 2048))
_COPY_BYTES = 2**30
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


class Case(NamedTuple):
    """One op at one size: two functions of no argument that must agree."""

    name: str
    ours: Callable[[], object]
    torch_ops: Callable[[], object]
    num_bytes: int  # of every operand and result, once


class Size(NamedTuple):
    """What is routed."""

    tokens: int
    top_k: int
    experts: int


def main() -> None:
    """Prints one line per op, dtype, width and, on the CPU, thread count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, help="2048 on the CPU, 16384 on a GPU")
    parser.add_argument("--top-k", type=int, help="4 on the CPU, 8 on a GPU")
    parser.add_argument("--experts", type=int, help="64 on the CPU, 128 on a GPU")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="CPU only")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), help="float32 on the CPU, else bfloat16")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    default = Size(16384, 8, 128) if on_gpu else Size(2048, 4, 64)
    size = Size(
        arguments.tokens or default.tokens, arguments.top_k or default.top_k, arguments.experts or default.experts
    )
    dtypes = [getattr(torch, name) for name in arguments.dtype or ["bfloat16" if on_gpu else "float32"]]
    if on_gpu:
        _run_on_gpu(size, dtypes)
    else:
        _run_on_cpu(size, dtypes, arguments.threads)


def _run_on_cpu(size: Size, dtypes: list[torch.dtype], thread_counts: list[int]) -> None:
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; {native_status().reason}")
    print(f"T={size.tokens} K={size.top_k} E={size.experts}, times in us")
    print(f"{'op':<28}{'dtype':<10}{'threads':>7}{'ours':>10}{'torch ops':>11}{'ratio':>7}")
    for dtype in dtypes:
        for case in _cases(size, dtype, torch.device("cpu")):
            _compare(case, dtype)
            for threads in thread_counts:
                torch.set_num_threads(threads)
                ours, theirs = _time_pair(case.ours, case.torch_ops)
                print(f"{case.name:<28}{_name(dtype):<10}{threads:>7}{ours:>10.0f}{theirs:>11.0f}{theirs / ours:>7.2f}")


def _run_on_gpu(size: Size, dtypes: list[torch.dtype]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copy_rate = _copy_rate(device)
    backends = ", ".join(f"{selection.op} {selection.chosen}" for selection in describe(device))
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}; {backends}")
    print(f"T={size.tokens} K={size.top_k} E={size.experts}, times in us; a copy of 512 MiB: {copy_rate:.0f} GB/s")
    print(f"{'op':<28}{'dtype':<10}{'ours':>10}{'torch ops':>11}{'ratio':>7}{'GB/s':>7}{'of copy':>9}")
    for dtype in dtypes:
        for case in _cases(size, dtype, device):
            _compare(case, dtype)
            ours, theirs = _gpu_time(case.ours), _gpu_time(case.torch_ops)
            rate = case.num_bytes / ours / 1e3
            print(
                f"{case.name:<28}{_name(dtype):<10}{ours:>10.1f}{theirs:>11.1f}{theirs / ours:>7.2f}"
                f"{rate:>7.0f}{rate / copy_rate:>9.0%}"
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _copy_rate(device: torch.device) -> float:
    """GB/s that a copy in device memory reads and writes together."""
    source = torch.empty(_COPY_BYTES // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _COPY_BYTES / _gpu_time(lambda: target.copy_(source)) / 1e3


def _gpu_time(function: Callable[[], object]) -> float:
    """Median microseconds of a call, from the device's own clock."""
    from triton.testing import do_bench

    time_ms: Any = do_bench(function, warmup=50, rep=200, return_mode="median")
    return time_ms * 1e3


def _cases(size: Size, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    generator = torch.Generator(device).manual_seed(0)
    scores_TE = torch.rand(size.tokens, size.experts, generator=generator, device=device)
    ids_TK = scores_TE.topk(size.top_k, dim=1).indices
    routed = route(ids_TK, size.experts)
    yield Case(
        "route",
        lambda: route(ids_TK, size.experts),
        lambda: _route_in_torch(ids_TK, size.experts),
        _bytes(ids_TK, *routed),
    )
    num_rows = size.tokens * size.top_k
    for width, expert_width in _GPU_WIDTHS if device.type == "cuda" else _WIDTHS:
        x_TD = torch.randn(size.tokens, width, generator=generator, device=device).to(dtype)
        yield from _moving_cases(x_TD, routed)
        h_RH = torch.randn(num_rows, 2 * expert_width, generator=generator, device=device).to(dtype)
        yield from _swiglu_cases(h_RH, torch.rand(num_rows, generator=generator, device=device))


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _moving_cases(x_TD: Tensor, routed: Route) -> Iterator[Case]:
    num_tokens, top_k = routed.row_TK.shape
    width = x_TD.shape[1]
    row_R = routed.row_TK.reshape(-1)
    y_RD = x_TD.index_select(0, routed.slot_R // top_k)
    yield Case(
        f"gather_rows D={width}",
        lambda: gather_rows(x_TD, routed.slot_R, routed.ends_E, top_k=top_k),
        lambda: x_TD.index_select(0, routed.slot_R // top_k),
        _bytes(x_TD, y_RD, routed.slot_R),
    )
    yield Case(
        f"gather_sum D={width}",
        lambda: gather_sum(y_RD, routed.row_TK),
        lambda: y_RD.index_select(0, row_R).view(num_tokens, top_k, width).sum(1),
        _bytes(x_TD, y_RD, routed.row_TK),
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

    once = _bytes(h_RH, da_RF, gate_R)
    yield Case(f"swiglu F={width}", lambda: swiglu(h_RH, gate_R), lambda: _swiglu_in_torch(h_RH, gate_R1), once)
    yield Case(
        f"swiglu_backward F={width}",
        lambda: swiglu_backward(da_RF, h_RH, gate_R),
        torch_backward,
        once + _bytes(h_RH, gate_R),
    )


def _route_in_torch(ids_TK: Tensor, num_experts: int) -> Route:
    ids_S = ids_TK.flatten()
    slot_R = ids_S.argsort(stable=True)
    row_S = torch.empty_like(slot_R).scatter_(0, slot_R, torch.arange(len(slot_R), device=slot_R.device))
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
