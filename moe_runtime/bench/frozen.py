"""Times a layer whose experts are frozen, forward and the rows' gradient, as LoRA on a large base runs it.

    python -m moe_runtime.bench.frozen [--shapes qwen3_8k ...] [--rounds 5] [--json FILE]

"compiled" is bench/layer's composite in bfloat16 under torch.compile; "bf16" our layer with the same weights; "mxfp8"
and "nvfp4" our layer with weights stored row-wise only. Each arm's output and gradients are compared first, with fp32
products of the values that it stores. Peak memory is what a call needs beyond what stood before it: below a weight's
bytes, no copy of one was made.
"""

# T tokens   K top-k   D model width   F expert width   H = 2 F   E experts

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import moe_runtime as mr
from moe_runtime.bench import layer
from moe_runtime.bench.layer import Inputs, compiled, exact, inputs_of
from moe_runtime.bench.moe import SHAPES, cuda_device, facts, summary, time_arms, worst_error, write_line

_RECIPES: dict[str, mr.recipes.Recipe] = {
    "mxfp8": mr.recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "nvfp4": mr.recipes.NVFP4BlockScaling(backward_override="dequantized", disable_2d_quantization=True),
}

Call = Callable[[], tuple[Tensor, Tensor, Tensor]]  # y, dx, dgates


class Arm(NamedTuple):
    """One way to run the layer, the inputs whose fp32 products it must match, and the bytes of its weights."""

    run: Call
    inputs: Inputs
    stored_bytes: int


def main() -> None:
    """Prints a markdown table, a row for each shape and arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=["qwen3_8k"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="append one line for each result")
    arguments = parser.parse_args()
    device = cuda_device()
    found = facts(device)
    print(found)
    print("| shape | arm | ms (spread) | compiled / arm | bf16 / arm | stored MB | peak MB |\n|" + "---|" * 7)
    for name in arguments.shapes:
        inputs = inputs_of(SHAPES[name], device)
        arms = {"compiled": composite_arm(inputs), **our_arms(inputs)}
        errors = {arm: check(given) for arm, given in arms.items()}
        peaks = {arm: _peak_bytes(given.run) for arm, given in arms.items()}
        times = time_arms({arm: given.run for arm, given in arms.items()}, rounds=arguments.rounds)
        medians = {arm: summary(taken)[0] for arm, taken in times.items()}
        for arm, given in arms.items():
            ratios = " | ".join(f"{medians[other] / medians[arm]:.3f}" for other in ("compiled", "bf16"))
            megabytes = f"{given.stored_bytes / 1e6:.0f} | {peaks[arm] / 1e6:.0f}"
            print(f"| {name} | {arm} | {medians[arm]:.3f} ({summary(times[arm])[1]:.1%}) | {ratios} | {megabytes} |")
        write_line(
            arguments.json,
            {"bench": "frozen", "shape": name, "times": times, "errors": errors, "peak_bytes": peaks, **found},
        )


def composite_arm(inputs: Inputs, make: Callable[[], layer.Layer] = compiled) -> Arm:
    """bench/layer's composite with weights that take no gradient."""
    frozen = inputs._replace(w_EHD=inputs.w_EHD.detach(), w_EDF=inputs.w_EDF.detach())
    run = make()
    num_bytes = sum(weight.numel() * weight.element_size() for weight in (frozen.w_EHD, frozen.w_EDF))
    return Arm(lambda: _step(lambda: run(*frozen[:5]), frozen), frozen, num_bytes)


def our_arms(inputs: Inputs) -> dict[str, Arm]:
    """RoutedExperts with the inputs' weights in bfloat16, and stored row-wise only by each recipe."""
    return {"bf16": _our_arm(inputs, None), **{name: _our_arm(inputs, recipe) for name, recipe in _RECIPES.items()}}


def _our_arm(inputs: Inputs, recipe: mr.recipes.Recipe | None) -> Arm:
    num_experts, doubled, width = inputs.w_EHD.shape
    config = mr.RoutedExpertsConfig(num_experts=num_experts, hidden_size=width, intermediate_size=doubled // 2)
    omit = recipe is not None
    with mr.quantized_model_init(enabled=omit, recipe=recipe, omit_columnwise_primary_weight_storage=omit):
        module = mr.RoutedExperts(config, dtype=inputs.x_TD.dtype, device=inputs.x_TD.device)
    values = []
    for linear, weight in ((module.experts.gate_up, inputs.w_EHD), (module.experts.down, inputs.w_EDF)):
        with torch.no_grad():
            linear.weight.copy_(weight)
        linear.weight.requires_grad_(False)
        values.append(linear.weight.dequantize() if recipe is not None else linear.weight.detach())  # pyright: ignore
    frozen = inputs._replace(w_EHD=values[0].as_subclass(Tensor), w_EDF=values[1].as_subclass(Tensor))
    num_bytes = sum(p.stored_bytes for p in module.parameters())  # pyright: ignore[reportAttributeAccessIssue]
    return Arm(lambda: _step(lambda: module(*frozen[:3]), frozen), frozen, num_bytes)


def _step(forward: Callable[[], Tensor], inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    y_TD = forward()
    dx_TD, dgates_TK = torch.autograd.grad(y_TD, (inputs.x_TD, inputs.gates_TK), inputs.dy_TD)
    return y_TD.detach(), dx_TD, dgates_TK


def check(arm: Arm) -> float:
    """The worst error of y, dx and dgates; SystemExit for one that is off, so that nothing is timed."""
    worst = 0.0
    for what, got, expected in zip(("y", "dx", "dgates"), arm.run(), exact(arm.inputs)[:3], strict=True):
        error = worst_error(got, expected)
        if not error <= layer.TOLERANCE:
            raise SystemExit(f"{what} is off by {error:.2e} somewhere, at most {layer.TOLERANCE} expected")
        worst = max(worst, error)
    return worst


def _peak_bytes(run: Call) -> int:
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
