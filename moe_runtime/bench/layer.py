"""Times the whole MoE layer, from tokens, ids and routing weights to the output, forward and forward + backward.

    python -m moe_runtime.bench.layer [--shapes qwen3_8k ...] [--rounds 5] [--arms compiled eager ours] [--json FILE]

The composite is what a careful user writes with torch alone: sort, gather, grouped_mm, SwiGLU with the routing weight
folded in, grouped_mm, and a sum over choices without atomics, as it is ("eager") and under torch.compile ("compiled").
Every arm's output and gradients are compared with fp32 first, per tensor, per expert and per 16 columns, in poisoned
memory. TFLOP/s count 6 R D F forward and 18 R D F with backward.
"""

# T tokens   K top-k   R routed rows   D model width   F expert width   H = 2 F   E experts

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

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
from moe_runtime.ep.rows import gather_gates
from moe_runtime.functional import HeldWeight, TokenRows, moe_mlp
from moe_runtime.kernels.permute import route

# Against fp32 sums of the same bfloat16 operands; h, a and y are each rounded once, in every arm.
TOLERANCE = 2e-2

Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Inputs(NamedTuple):
    """One layer's inputs; all but the ids take gradients."""

    x_TD: Tensor
    ids_TK: Tensor
    gates_TK: Tensor
    w_EHD: Tensor
    w_EDF: Tensor
    dy_TD: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gradients are taken of."""
        return self.x_TD, self.gates_TK, self.w_EHD, self.w_EDF


def main() -> None:
    """Prints a markdown table, a row for each shape and direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="append one line for each result")
    arguments = parser.parse_args()
    device = cuda_device()
    found = facts(device)
    print(found)
    names = arguments.arms
    print("| shape | pass | " + " | ".join(f"{name} ms (TFLOP/s, spread)" for name in names) + " | ours faster by |")
    print("|---" * (len(names) + 3) + "|")
    gains: dict[str, list[float]] = {"forward": [], "forward + backward": []}
    for shape_name in arguments.shapes:
        for line in _run(SHAPES[shape_name], names, arguments.rounds, device):
            ratio = _print(shape_name, SHAPES[shape_name], line)
            write_line(arguments.json, {"bench": "layer", "shape": shape_name, **line._asdict(), **found})
            if ratio is not None:
                gains[line.direction].append(ratio)
        torch.cuda.empty_cache()
    for direction, ratios in gains.items():
        if ratios:
            print(f"geomean, {direction}: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}")


class Line(NamedTuple):
    """One direction's milliseconds by arm, a value a round, and the errors found before."""

    direction: str
    times: dict[str, list[float]]
    errors: dict[str, float]


def inputs_of(shape: Shape, device: torch.device) -> Inputs:
    width, expert_width = shape.width, shape.expert_width
    chosen = routed(shape, device)
    return Inputs(
        normal((shape.tokens, width), device, seed=1).requires_grad_(),
        chosen.ids_TK,
        chosen.gates_TK.requires_grad_(),
        normal((shape.experts, 2 * expert_width, width), device, seed=2, scale=width**-0.5).requires_grad_(),
        normal((shape.experts, width, expert_width), device, seed=3, scale=expert_width**-0.5).requires_grad_(),
        normal((shape.tokens, width), device, seed=4),
    )


def _run(shape: Shape, names: list[str], rounds: int, device: torch.device) -> list[Line]:
    inputs = inputs_of(shape, device)
    arms = {name: ARMS[name]() for name in names}
    errors = check(inputs, arms)

    def forward(layer: Layer) -> Callable[[], object]:
        return lambda: layer(*inputs[:5])

    def both(layer: Layer) -> Callable[[], object]:
        return lambda: torch.autograd.grad(layer(*inputs[:5]), inputs.leaves, inputs.dy_TD)

    directions = {"forward": forward, "forward + backward": both}
    return [
        Line(name, time_arms({arm: make(layer) for arm, layer in arms.items()}, rounds=rounds), errors)
        for name, make in directions.items()
    ]


def _print(shape_name: str, shape: Shape, line: Line) -> float | None:
    """One row of the table; returns how much faster ours is than the compiled composite."""
    products = 6 if line.direction == "forward" else 18
    flops = products * shape.rows * shape.width * shape.expert_width
    cells = []
    for times in line.times.values():
        median, spread = summary(times)
        cells.append(f"{median:.3f} ({flops / median / 1e9:.0f}, {spread:.1%})")
    ratio = None
    if {"ours", "compiled"} <= line.times.keys():
        ratio = summary(line.times["compiled"])[0] / summary(line.times["ours"])[0]
    print(f"| {shape_name} | {line.direction} | {' | '.join(cells)} | {f'{ratio:.3f}' if ratio else ''} |", flush=True)
    return ratio


def check(inputs: Inputs, arms: dict[str, Layer]) -> dict[str, float]:
    """The worst error of each arm; SystemExit for one that is off, so that it gets no time."""
    expected = exact(inputs)
    errors = {}
    for name, layer in arms.items():
        poison(inputs.x_TD, *inputs.leaves)
        y_TD = layer(*inputs[:5])
        got = (y_TD.detach(), *torch.autograd.grad(y_TD, inputs.leaves, inputs.dy_TD))
        del y_TD
        for what, a, b in zip(("y", "dx", "dgates", "dgate_up", "ddown"), got, expected, strict=True):
            error = worst_error(a, b)
            if not error <= TOLERANCE:
                raise SystemExit(f"{name}: {what} is off by {error:.2e} somewhere, at most {TOLERANCE} expected")
            errors[name] = max(errors.get(name, 0.0), error)
    return errors


def exact(inputs: Inputs) -> tuple[Tensor, ...]:
    """y, dx, dgates, dgate_up, ddown, expert by expert in fp32."""
    x_TD, ids_TK, gates_TK, w_EHD, w_EDF, dy_TD = (value.detach() for value in inputs)
    y_TD, dx_TD = torch.zeros_like(x_TD, dtype=torch.float32), torch.zeros_like(x_TD, dtype=torch.float32)
    dgates_TK, d_up, d_down = torch.zeros_like(gates_TK), torch.zeros_like(w_EHD), torch.zeros_like(w_EDF)
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


class _Gather(torch.autograd.Function):
    """y[r] = x[token[r]], whose gradient sums each token's rows: no atomics."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return x_TD[token_R]

    @staticmethod
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, None, None]:
        (row_TK,) = ctx.saved_tensors
        return dy_RD[row_TK].sum(1), None, None


class _Combine(torch.autograd.Function):
    """out[t] = sum_k y[row[t, k]]"""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(token_R)
        return y_RD[row_TK].sum(1)

    @staticmethod
    def backward(ctx: Any, dout_TD: Tensor) -> tuple[Tensor, None, None]:
        (token_R,) = ctx.saved_tensors
        return dout_TD[token_R], None, None


class _Pick(torch.autograd.Function):
    """gate[r] = gates[slot[r]]"""

    @staticmethod
    def forward(ctx: Any, gates_TK: Tensor, slot_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return gates_TK.reshape(-1)[slot_R]

    @staticmethod
    def backward(ctx: Any, dgate_R: Tensor) -> tuple[Tensor, None, None]:
        (row_TK,) = ctx.saved_tensors
        return dgate_R[row_TK], None, None


def composite(x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, w_EHD: Tensor, w_EDF: Tensor) -> Tensor:
    """The layer in torch ops, with the activation in fp32: what a compiler fuses."""
    return _composite(x_TD, ids_TK, gates_TK, w_EHD, w_EDF, torch.float32)


def _eager(x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, w_EHD: Tensor, w_EDF: Tensor) -> Tensor:
    """The same with the activation in bfloat16: uncompiled, each op of it is a pass over memory."""
    return _composite(x_TD, ids_TK, gates_TK, w_EHD, w_EDF, x_TD.dtype)


def _composite(
    x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, w_EHD: Tensor, w_EDF: Tensor, activation_dtype: torch.dtype
) -> Tensor:
    ids_R, slot_R = torch.sort(ids_TK.reshape(-1), stable=True)
    experts_E = torch.arange(w_EHD.shape[0], device=ids_R.device)
    ends_E = torch.searchsorted(ids_R, experts_E, right=True, out_int32=True)
    places_R = torch.arange(slot_R.shape[0], device=slot_R.device)
    row_TK = torch.empty_like(slot_R).scatter_(0, slot_R, places_R).view(ids_TK.shape)
    token_R = slot_R // ids_TK.shape[1]
    h_RH = grouped_mm(_Gather.apply(x_TD, token_R, row_TK), w_EHD.transpose(1, 2), offs=ends_E)
    g_RF, u_RF = h_RH.to(activation_dtype).chunk(2, dim=1)
    gate_R = _Pick.apply(gates_TK, slot_R, row_TK).to(activation_dtype)
    a_RF = (silu(g_RF) * u_RF * gate_R[:, None]).to(x_TD.dtype)
    y_RD = grouped_mm(a_RF, w_EDF.transpose(1, 2), offs=ends_E)
    return _Combine.apply(y_RD, token_R, row_TK)


def ours(x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, w_EHD: Tensor, w_EDF: Tensor) -> Tensor:
    """The layer as RoutedExperts runs it."""
    local = route(ids_TK, w_EHD.shape[0])
    tokens = TokenRows((local.slot_R // ids_TK.shape[1]).to(torch.int32), local.row_TK)
    gate_R = gather_gates(gates_TK, local)
    return moe_mlp(x_TD, gate_R, local.ends_E, HeldWeight(w_EHD), HeldWeight(w_EDF), tokens=tokens)


def compiled() -> Layer:
    torch.compiler.reset()
    return torch.compile(composite, dynamic=False)


ARMS: dict[str, Callable[[], Layer]] = {"compiled": compiled, "eager": lambda: _eager, "ours": lambda: ours}


if __name__ == "__main__":
    main()
