"""Times the three grouped products with contiguous rows against torch's, on the nine shapes of bench/moe.

    python -m moe_runtime.bench.gemm [--shapes qwen3_8k ...] [--projections up down] [--rounds 5] [--json FILE]

"ours" is what the table chooses; "torch" is torch.nn.functional.grouped_mm; "uniform" is one torch.bmm over equally
many rows of each expert, a bound that no ragged product has. "wgrad +=" adds to an fp32 buffer: torch's product in
bfloat16 and an addition. Every ragged arm is compared with fp32 first, per expert and per 16 columns, in poisoned
memory. TFLOP/s count 2 R in out.
"""

# R routed rows   D in features   F out features   E experts

import argparse
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from moe_runtime.bench.moe import (
    SHAPES,
    Shape,
    cuda_device,
    facts,
    normal,
    poison,
    routed,
    summary,
    time_arms,
    worst_error,
    write_line,
)
from moe_runtime.kernels.grouped_gemm import ragged_k_gemm_tn, ragged_m_gemm_nn, ragged_m_gemm_nt

_TOLERANCE = 1e-2  # one rounding to bfloat16 is 2e-3

Arms = Mapping[str, Callable[[], Tensor]]


class Operands(NamedTuple):
    """Of one projection; `into` is an fp32 buffer for weight gradients."""

    x_RD: Tensor
    dy_RF: Tensor
    w_EFD: Tensor
    ends_E: Tensor
    into_EFD: Tensor


def main() -> None:
    """Prints a markdown table, a row for each shape, projection and product."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--projections", nargs="+", choices=("up", "down"), default=["up", "down"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="append one line for each result")
    arguments = parser.parse_args()
    device = cuda_device()
    found = facts(device)
    print(found)
    print(
        "| shape | product | torch ms (TFLOP/s, spread) | uniform | ours | ours faster by |\n|---|---|---|---|---|---|"
    )
    gains: dict[str, list[float]] = {}
    for name in arguments.shapes:
        for projection in arguments.projections:
            operands = _operands(SHAPES[name], projection, device)
            flops = 2 * operands.x_RD.shape[0] * operands.w_EFD[0].numel()
            for product, arms in _products(operands).items():
                errors = _check(product, arms, operands)
                times = time_arms(arms, rounds=arguments.rounds)
                ratio = summary(times["torch"])[0] / summary(times["ours"])[0]
                gains.setdefault(product, []).append(ratio)
                cells = " | ".join(_cell(times.get(arm), flops) for arm in ("torch", "uniform", "ours"))
                print(f"| {name} | {product} {projection} | {cells} | {ratio:.3f} |", flush=True)
                line = {"bench": "gemm", "shape": name, "product": product, "projection": projection}
                write_line(arguments.json, {**line, "times": times, "errors": errors, **found})
            del operands
            torch.cuda.empty_cache()
    for product, ratios in gains.items():
        geomean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{product}: geomean {geomean:.3f}, least {min(ratios):.3f}")


def _cell(times: list[float] | None, flops: int) -> str:
    if times is None:
        return ""
    median, spread = summary(times)
    return f"{median:.3f} ({flops / median / 1e9:.0f}, {spread:.1%})"


def _operands(shape: Shape, projection: str, device: torch.device) -> Operands:
    ends_E = routed(shape, device).route.ends_E
    width, out = shape.width, 2 * shape.expert_width
    if projection == "down":
        width, out = shape.expert_width, shape.width
    return Operands(
        normal((shape.rows, width), device, seed=1),
        normal((shape.rows, out), device, seed=2),
        normal((shape.experts, out, width), device, seed=3, scale=width**-0.5),
        ends_E,
        torch.zeros(shape.experts, out, width, device=device),
    )


def _products(operands: Operands) -> dict[str, dict[str, Callable[[], Tensor]]]:
    x_RD, dy_RF, w_EFD, ends_E, into_EFD = operands
    experts = len(w_EFD)
    x, dy = (rows.view(experts, len(rows) // experts, -1) for rows in (x_RD, dy_RF))
    return {
        "fprop": {
            "torch": lambda: grouped_mm(x_RD, w_EFD.transpose(1, 2), offs=ends_E),
            "uniform": lambda: torch.bmm(x, w_EFD.transpose(1, 2)),
            "ours": lambda: ragged_m_gemm_nt(x_RD, w_EFD, ends_E),
        },
        "dgrad": {
            "torch": lambda: grouped_mm(dy_RF, w_EFD, offs=ends_E),
            "uniform": lambda: torch.bmm(dy, w_EFD),
            "ours": lambda: ragged_m_gemm_nn(dy_RF, w_EFD, ends_E),
        },
        "wgrad": {
            "torch": lambda: grouped_mm(dy_RF.T, x_RD, offs=ends_E),
            "uniform": lambda: torch.bmm(dy.transpose(1, 2), x),
            "ours": lambda: ragged_k_gemm_tn(dy_RF, x_RD, ends_E),
        },
        "wgrad +=": {
            "torch": lambda: into_EFD.add_(grouped_mm(dy_RF.T, x_RD, offs=ends_E)),
            "ours": lambda: ragged_k_gemm_tn(dy_RF, x_RD, ends_E, into_EFD=into_EFD, accumulate=True),
        },
    }


def _check(product: str, arms: Arms, operands: Operands) -> dict[str, float]:
    """The worst error of each ragged arm; SystemExit for one that is off, so that nothing is timed."""
    expected = _exact(product, operands)
    by_rows = expected.dim() == 2
    errors = {}
    for name in ("torch", "ours"):
        operands.into_EFD.zero_()
        poison(expected.to(torch.bfloat16))
        error = worst_error(arms[name](), expected, operands.ends_E if by_rows else None)
        if not error <= _TOLERANCE:
            raise SystemExit(f"{name}: {product} is off by {error:.2e} somewhere, at most {_TOLERANCE} expected")
        errors[name] = error
    return errors


def _exact(product: str, operands: Operands) -> Tensor:
    """In fp32, expert by expert."""
    x_RD, dy_RF, w_EFD, ends_E, _ = operands
    bounds = [0, *ends_E.tolist()]
    spans = list(itertools.pairwise(bounds))
    if product == "fprop":
        return torch.cat([x_RD[a:b].float() @ w_EFD[e].float().T for e, (a, b) in enumerate(spans)])
    if product == "dgrad":
        return torch.cat([dy_RF[a:b].float() @ w_EFD[e].float() for e, (a, b) in enumerate(spans)])
    return torch.stack([dy_RF[a:b].float().T @ x_RD[a:b].float() for a, b in spans])


if __name__ == "__main__":
    main()
