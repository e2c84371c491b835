"""Times quantize and dequantize of every format against copying memory.

    python -m moe_runtime.bench.quantize [--shape 8 4096 4096] [--threads 2] [--dtype bfloat16] [--format mxfp8 ...]
    python -m moe_runtime.bench.quantize --device cuda [--shape 64 2048 2048] [--rounds 5] [--format mxfp8 ...]

Before a format is timed, its bytes are compared with the reference's, bit for bit, on a part of the input: its first
rows on the CPU, its first member on a GPU (its last one too, unless random bits depend on the place). Its bandwidth
counts the bytes read and written, each once: the input (and once more where the format needs the amax of a
member first) and the payloads and scales of the directions it stores. The ratio is to the bandwidth of a copy of the
input, taken in turn with it in the same run, by C's memcpy and by torch's copy_; quantize and the copies write into
memory that is there already. On a GPU (needs triton) each round times ours and the copy one after the other, from the
device's clock with L2 cleared before each call; the ratio is the median of the rounds', and `spread` how far they lie
apart.
"""

# E members   R rows   C columns

import argparse
import ctypes
import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_runtime.formats import MXFP4, MXFP8, NVFP4, Float8, Format, FP8Block, Quantized
from moe_runtime.kernels.dequantize import dequantize
from moe_runtime.kernels.quantize import quantize, quantize_into
from moe_runtime.kernels.select import native_status

_FORMATS: dict[str, Format] = {
    "mxfp8": MXFP8(),
    "mxfp8 e5m2": MXFP8(element="e5m2"),
    "mxfp4": MXFP4(),
    "fp8_block": FP8Block(),
    "fp8_block 2d": FP8Block(two_dimensional=True),
    "float8": Float8(),
    "nvfp4": NVFP4(),
    "nvfp4 2d": NVFP4(two_dimensional=True),
    "nvfp4 rht": NVFP4(random_hadamard=True),
    "nvfp4 rht sr": NVFP4(random_hadamard=True, stochastic_rounding=True),
}
_GPU_SHAPES = ((64, 2048, 2048), (8, 4096, 14336))
_CHECKED_ROWS = 256
_DEQUANTIZED_ROWS = 1024  # few, as the result is new memory each time


def main() -> None:
    """Prints one line per format and operation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", type=int, nargs=3, help="8 4096 4096; on a GPU 64 2048 2048 and 8 4096 14336")
    parser.add_argument("--threads", type=int, default=2, help="CPU only")
    parser.add_argument("--rounds", type=int, default=5, help="GPU only")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--format", nargs="+", choices=tuple(_FORMATS), default=list(_FORMATS))
    parser.add_argument("--seconds", type=float, default=3.0, help="for each line, CPU only")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    if arguments.device == "cuda":
        shapes = [tuple(arguments.shape)] if arguments.shape else _GPU_SHAPES
        for shape in shapes:
            _run_on_gpu(shape, dtype, arguments.format, arguments.rounds)
        return
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    arguments.shape = arguments.shape or [8, 4096, 4096]
    x_ERC = torch.randn(*arguments.shape, generator=generator).to(dtype)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; {native_status().reason}")
    print(f"{tuple(arguments.shape)} {arguments.dtype}, {arguments.threads} threads, medians in GB/s")
    print(f"{'operation':<36}{'ours':>8}{'memcpy':>8}{'ratio':>7}{'copy_':>8}{'ratio':>7}")
    for name in arguments.format:
        _run_format(name, x_ERC, arguments.seconds, arguments.threads)


def _run_format(name: str, x_ERC: Tensor, seconds: float, threads: int) -> None:
    fmt = _FORMATS[name]
    seed = _seed(fmt)
    _check_bits(x_ERC[:1, :_CHECKED_ROWS], fmt, seed, "native")
    row, column = quantize(x_ERC, fmt, columnwise=fmt.columnwise_allowed, seed=seed)
    reads = 2 if fmt.has_tensor_scale or fmt.block is None else 1
    stored = fmt.stored_bytes(x_ERC.shape, columnwise=fmt.columnwise_allowed)
    directions = "both directions" if column is not None else "row-wise"
    _report(
        f"quantize {name}, {directions}",
        lambda: quantize_into(x_ERC, row, column, seed=seed),
        reads * _bytes(x_ERC) + stored,
        (x_ERC, seconds, threads),
    )
    few_ERC = x_ERC[:1, :_DEQUANTIZED_ROWS]
    few, _ = quantize(few_ERC, fmt, seed=seed)
    assert few is not None
    _report(
        f"dequantize {name}, row-wise",
        lambda: dequantize(few, x_ERC.dtype),
        few.stored_bytes + _bytes(few_ERC),
        (few_ERC.contiguous(), seconds / 2, threads),
    )


def _report(name: str, run: Callable[[], object], num_bytes: int, against: tuple[Tensor, float, int]) -> None:
    x_ERC, seconds, threads = against
    copied = torch.empty_like(x_ERC)
    with ThreadPoolExecutor(threads) as pool:
        runs = (run, lambda: _memcpy(copied, x_ERC, pool, threads), lambda: copied.copy_(x_ERC))
        ours, memcpy, copy = _median_seconds(runs, seconds)
    speed, memcpy_speed, copy_speed = num_bytes / ours, 2 * _bytes(x_ERC) / memcpy, 2 * _bytes(x_ERC) / copy
    print(
        f"{name:<36}{speed / 1e9:>8.2f}{memcpy_speed / 1e9:>8.2f}{speed / memcpy_speed:>7.2f}"
        f"{copy_speed / 1e9:>8.2f}{speed / copy_speed:>7.2f}"
    )


def _memcpy(to: Tensor, source: Tensor, pool: ThreadPoolExecutor, threads: int) -> None:
    """C's memcpy, the bytes cut evenly between threads; a foreign call leaves the interpreter lock to the others."""
    size = _bytes(source)
    cuts = [size * k // threads for k in range(threads + 1)]
    pieces = itertools.pairwise(cuts)
    list(pool.map(lambda p: ctypes.memmove(to.data_ptr() + p[0], source.data_ptr() + p[0], p[1] - p[0]), pieces))


def _median_seconds(runs: tuple[Callable[[], object], ...], seconds: float) -> list[float]:
    """Median of each, taken in turn so that a busy machine slows all."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times[0]) < 5:
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def _seed(fmt: Format) -> int | None:
    return 1 if isinstance(fmt, NVFP4) and fmt.stochastic_rounding else None


def _run_on_gpu(shape: tuple[int, ...], dtype: torch.dtype, names: list[str], rounds: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(0)
    x_ERC = torch.randn(*shape, generator=generator, device=device, dtype=dtype)
    copied = torch.empty_like(x_ERC)
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}; {shape} {dtype}, median of {rounds} rounds"
    )
    print(f"{'operation':<36}{'ms':>8}{'GB/s':>8}{'copy':>8}{'ratio':>7}{'spread':>8}")
    for name in names:
        fmt = _FORMATS[name]
        seed, columnwise = _seed(fmt), fmt.columnwise_allowed
        for part in (x_ERC[:1], *([] if seed is not None else [x_ERC[-1:]])):
            _check_bits(part, fmt, seed, "triton")
        row, column = quantize(x_ERC, fmt, columnwise=columnwise, seed=seed, backend="triton")
        reads = 2 if fmt.has_tensor_scale or fmt.block is None else 1
        num_bytes = reads * _bytes(x_ERC) + fmt.stored_bytes(x_ERC.shape, columnwise=columnwise)
        directions = "both directions" if column is not None else "row-wise"
        run: Callable[[], object] = partial(quantize_into, x_ERC, row, column, seed=seed)
        cases: list[tuple[str, Callable[[], object], int]] = [(f"quantize {name}, {directions}", run, num_bytes)]
        for q in (row, column):
            if q is not None:
                _check_values(q, dtype)
                num_bytes = q.stored_bytes + _bytes(x_ERC)
                cases.append((f"dequantize {name}, {q.direction}", partial(dequantize, q, dtype), num_bytes))
        for label, run, size in cases:
            _report_on_gpu(label, run, size, lambda: copied.copy_(x_ERC), 2 * _bytes(x_ERC), rounds)


def _report_on_gpu(
    name: str,
    run: Callable[[], object],
    num_bytes: int,
    copy: Callable[[], object],
    copied_bytes: int,
    rounds: int,
) -> None:
    times = [(_gpu_milliseconds(run), _gpu_milliseconds(copy)) for _ in range(rounds)]
    ratios = sorted(num_bytes / ours / (copied_bytes / theirs) for ours, theirs in times)
    ours, theirs = (statistics.median(taken) for taken in zip(*times, strict=True))
    print(
        f"{name:<36}{ours:>8.4f}{num_bytes / ours / 1e6:>8.0f}{copied_bytes / theirs / 1e6:>8.0f}"
        f"{statistics.median(ratios):>7.3f}{ratios[-1] - ratios[0]:>8.3f}",
        flush=True,
    )


def _gpu_milliseconds(run: Callable[[], object]) -> float:
    """Median of a call, from the device's own clock."""
    from triton.testing import do_bench

    time_ms: Any = do_bench(run, warmup=5, rep=40, return_mode="median")
    return time_ms


def _check_values(q: Quantized, dtype: torch.dtype) -> None:
    """AssertionError unless Triton and reference read the same values, in the first and the last member."""
    for member in (slice(0, 1), slice(-1, None)):
        tensor_scale = None if q.tensor_scale is None else q.tensor_scale[member]
        part = replace(q, payload=q.payload[member], scale=q.scale[member], tensor_scale=tensor_scale)
        ours, expected = (dequantize(part, dtype, backend=b) for b in ("triton", "reference"))
        if not torch.equal(ours.view(torch.uint8), expected.view(torch.uint8)):
            raise AssertionError(f"{q.format}: {q.direction} values differ from the reference's")


def _check_bits(x_ERC: Tensor, fmt: Format, seed: int | None, backend: str) -> None:
    """AssertionError unless `backend` and reference store the same bytes."""
    columnwise = fmt.columnwise_allowed
    results = [quantize(x_ERC, fmt, columnwise=columnwise, seed=seed, backend=b) for b in (backend, "reference")]
    for ours, expected in zip(*results, strict=True):
        if ours is None or expected is None:
            continue
        for a, b in zip((ours.payload, ours.scale), (expected.payload, expected.scale), strict=True):
            if not torch.equal(a, b):
                raise AssertionError(f"{fmt}: {backend} {ours.direction} bytes differ from the reference's")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


if __name__ == "__main__":
    main()
