"""What the benchmarks of grouped products and whole layers share: shapes, routing, checks, alternated timing, facts.

Arms are timed in turn within one process, as clocks and power drift; a check that fails stops the run before anything
is timed. Rates of a large matmul and a copy in the same run say what the machine gave at the time.
"""

# T tokens   K top-k   R routed rows   D model width   F expert width   E experts   B blocks of columns

import itertools
import json
import statistics
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.permute import Route, route

_BLOCK_COLUMNS = 16
_MATMUL = 8192
_COPY_BYTES = 2**30
_MIN_ROUND_MS = 60.0  # long enough that clocks settle to the load


class Shape(NamedTuple):
    """One layer on one GPU."""

    width: int  # D
    expert_width: int  # F
    experts: int
    top_k: int
    tokens: int

    @property
    def rows(self) -> int:
        """R"""
        return self.tokens * self.top_k


SHAPES: Mapping[str, Shape] = {
    "qwen3_8k": Shape(2048, 768, 128, 8, 8192),
    "qwen3_32k": Shape(2048, 768, 128, 8, 32768),
    "olmoe": Shape(2048, 1024, 64, 8, 32768),
    "gpt_oss": Shape(2880, 2880, 32, 4, 16384),
    "glm_ep8": Shape(4096, 1408, 16, 8, 16384),
    "mixtral": Shape(4096, 14336, 8, 2, 8192),
    "dsv3_ep32": Shape(7168, 2048, 8, 8, 8192),
    "sonic7b": Shape(1536, 256, 128, 8, 24576),
    "sonic30b": Shape(4096, 256, 256, 16, 32768),
}


class Routed(NamedTuple):
    """Where each token goes: ids and gates (T, K), and the sort of them."""

    ids_TK: Tensor
    gates_TK: Tensor
    route: Route


def routed(shape: Shape, device: torch.device, *, seed: int = 0) -> Routed:
    """Distinct experts for each token, drawn with probabilities softmax(0.5 randn): some are chosen far more often."""
    generator = torch.Generator(device).manual_seed(seed)
    weight_E = torch.softmax(0.5 * torch.randn(shape.experts, generator=generator, device=device), 0)
    ids_TK = torch.multinomial(weight_E.expand(shape.tokens, -1), shape.top_k, generator=generator)
    gates_TK = torch.rand(shape.tokens, shape.top_k, generator=generator, device=device)
    return Routed(ids_TK, gates_TK / gates_TK.sum(1, keepdim=True), route(ids_TK, shape.experts))


def cuda_device() -> torch.device:
    """The current GPU; SystemExit with a sentence where there is none."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark times GPU kernels: expected a CUDA device, found none")
    return torch.device("cuda", torch.cuda.current_device())


def normal(shape: tuple[int, ...], device: torch.device, *, seed: int, scale: float = 1.0) -> Tensor:
    """Random bfloat16."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * scale


def poison(*like: Tensor) -> None:
    """Leave NaN in memory that the allocator hands out next for tensors of these sizes."""
    held = [torch.full_like(tensor, float("nan")) for tensor in like]
    held.clear()


def worst_error(got: Tensor, expected: Tensor, ends_E: Tensor | None = None) -> float:
    """The largest ||got - expected|| / ||expected|| of the tensor, of each expert, and of its blocks of 16 columns.

    Experts along dim 0 of three, or rows (R, C) with `ends_E`, or one group. Not finite: inf.
    """
    if not got.isfinite().all():
        return float("inf")
    if got.dim() == 3:
        groups = list(zip(got, expected, strict=True))
    elif ends_E is not None:
        bounds = [0, *ends_E.tolist()]
        groups = [(got[a:b], expected[a:b]) for a, b in itertools.pairwise(bounds) if b > a]
    else:
        groups = [(got, expected)]
    parts = [_squares(a, b) for a, b in groups]
    error_GB, norm_GB = torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
    whole = error_GB.sum() / norm_GB.sum()
    by_block = torch.where(norm_GB > 0, error_GB / norm_GB, torch.where(error_GB > 0, float("inf"), 0.0))
    return float(torch.maximum(whole, by_block.max()).sqrt())


def _squares(got: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error and squared norm of each block of columns."""
    if got.dim() == 1:
        got, expected = got[:, None], expected[:, None]
    blocks = got.shape[1] // _BLOCK_COLUMNS if got.shape[1] % _BLOCK_COLUMNS == 0 else 1
    error = (got.float() - expected.float()).square().sum(0).view(blocks, -1).sum(1)
    return error, expected.float().square().sum(0).view(blocks, -1).sum(1)


def time_arms(arms: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, list[float]]:
    """Milliseconds a call of each arm, one value a round; the arms take turns within a round."""
    calls = {name: max(2, round(_MIN_ROUND_MS / max(_once(run), 1e-3))) for name, run in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for step in range(rounds):
        for name in list(arms)[:: 1 if step % 2 else -1]:
            times[name].append(_median_ms(arms[name], calls[name]))
    return times


def _once(run: Callable[[], object]) -> float:
    run()
    return _median_ms(run, 3)


def _median_ms(run: Callable[[], object], calls: int) -> float:
    """Median over `calls` of the device's own clock; the queue stays filled."""
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    run()
    for start, stop in marks:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in marks)


def summary(times: list[float]) -> tuple[float, float]:
    """Median, and the spread (largest - smallest) / median."""
    median = statistics.median(times)
    return median, (max(times) - min(times)) / median


def facts(device: torch.device) -> dict[str, Any]:
    """The machine, its versions and this run's own ceilings: TFLOP/s of an 8192-cubed matmul, GB/s of a copy."""
    a, b = (normal((_MATMUL, _MATMUL), device, seed=seed) for seed in (1, 2))
    matmul_ms = _median_ms(lambda: a @ b, 40)
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy_ms = _median_ms(lambda: target.copy_(source), 20)
    return {
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "clock_power": _output("nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"),
        "matmul_tflops": round(2 * _MATMUL**3 / matmul_ms / 1e9, 1),
        "copy_gbps": round(2 * _COPY_BYTES / copy_ms / 1e6, 1),
    }


def _output(*command: str) -> str:
    """What a command prints, empty where it cannot run."""
    root = Path(__file__).parents[2]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20, cwd=root)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def write_line(path: Path | None, record: Mapping[str, Any]) -> None:
    """Append one JSON line; nothing without a path."""
    if path is not None:
        with path.open("a") as lines:
            lines.write(json.dumps(record) + "\n")
