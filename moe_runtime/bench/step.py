"""Times whole training steps: our experts against Hugging Face's own grouped_mm path, alternated in one process.

    python -m moe_runtime.bench.step [launch/configs/quickstart.toml] [--set a.b=c ...] [--rounds 20]

Both arms start from the same weights and see the same batches. The first steps are compared before anything is timed:
losses that differ by more than the bound end the run without a figure. One process, whatever the configuration says.
"""

import argparse
import json
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from moe_runtime.comm.bootstrap import Launch, local_device
from moe_runtime.core.device import peak_bf16_flops
from moe_runtime.integrations.transformers import load_config
from moe_runtime.train.config import Config, ParallelConfig, check_model, load
from moe_runtime.train.data.cache import PreparedData, prepare
from moe_runtime.train.data.sampler import Sampler
from moe_runtime.train.data.tokens import Batch
from moe_runtime.train.setup import build, forward_flops_per_token
from moe_runtime.train.step import Stepper

_CHECKED_STEPS = 3
_LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}


def main() -> None:
    """Prints the two medians, their ratio and the spread, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="launch/configs/quickstart.toml", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    config = load(arguments.config, arguments.overrides)
    config = replace(config, parallel=ParallelConfig(data="none"))
    hf_config = load_config(
        config_file=config.model.config_json, model_type=config.model.model_type, fields=config.model.fields
    )
    check_model(config, hf_config)
    data = prepare(config.data, model_vocab_size=hf_config.vocab_size)
    device = local_device(Launch())
    arms = {backend: Stepper(*_arm(config, hf_config, device, backend)) for backend in ("grouped", "hf")}
    _check(config, arms, data)
    seconds = _time(config, arms, data, arguments.rounds, device)
    _report(config, hf_config, arms, seconds, device)


def _arm(config: Config, hf_config: object, device: torch.device, backend: str) -> tuple:
    config = replace(config, experts=replace(config.experts, backend=backend))
    return config, build(config, hf_config, device)


def batches(config: Config, data: PreparedData, step: int) -> list[Batch]:
    """The microbatches of a step, all of them."""
    sampler = Sampler(
        num_sequences=data.train.num_sequences(config.data.seq_length),
        global_batch_size=config.train.global_batch_size,
        seed=config.run.seed,
    )
    count = config.train.microbatches
    rows = [sampler.microbatch(step, i, num_microbatches=count, dp_rank=0, dp_size=1) for i in range(count)]
    return [data.train.sequences(found, config.data.seq_length) for found in rows]


def _check(config: Config, arms: dict[str, Stepper], data: PreparedData) -> None:
    for step in range(_CHECKED_STEPS):
        losses = {name: arm.step(batches(config, data, step), config.optim.lr).loss for name, arm in arms.items()}
        error = abs(losses["grouped"] - losses["hf"]) / losses["hf"]
        if not error <= _LOSS_TOLERANCE[config.train.dtype]:
            raise SystemExit(f"step {step}: losses differ by {error:.1e}, not timed: {losses}")


def _time(
    config: Config, arms: dict[str, Stepper], data: PreparedData, rounds: int, device: torch.device
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for step in range(rounds):
        microbatches = batches(config, data, _CHECKED_STEPS + step)
        # The order alternates too, so that neither arm always finds the other's memory in the cache.
        for name in list(arms)[:: 1 if step % 2 else -1]:
            started = time.perf_counter()
            arms[name].step(microbatches, config.optim.lr)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def _report(
    config: Config, hf_config: object, arms: dict[str, Stepper], seconds: dict[str, list[float]], device: torch.device
) -> None:
    tokens = config.train.global_batch_size * config.data.seq_length
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = [ours / theirs for ours, theirs in zip(seconds["grouped"], seconds["hf"], strict=True)]
    for name, median in medians.items():
        low, _, high = (1e3 * value for value in statistics.quantiles(seconds[name], n=4))
        rate = tokens / median
        print(
            f"{name:8s} {median * 1e3:9.1f} ms a step (quartiles {low:.1f} to {high:.1f}), {rate:,.0f} tokens/s"
            + _utilization(arms[name], hf_config, rate, device)
        )
    print(f"ratio of medians, grouped / hf: {medians['grouped'] / medians['hf']:.3f}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    print(
        json.dumps(
            {
                "bench": "step",
                "device": name,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "dtype": config.train.dtype,
                "tokens": tokens,
                "median_seconds": medians,
                "ratio": medians["grouped"] / medians["hf"],
                "median_of_pair_ratios": statistics.median(ratios),
            }
        )
    )


def _utilization(arm: Stepper, hf_config: object, tokens_per_second: float, device: torch.device) -> str:
    peak = peak_bf16_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if peak is None:
        return ""
    trainee = arm.trainee
    top_k = int(getattr(hf_config, "num_experts_per_tok", 1))
    flops = 3 * forward_flops_per_token(trainee.model, trainee.layout, trainee.num_experts, top_k)
    return f", mfu {flops * tokens_per_second / peak:.1%}"


if __name__ == "__main__":
    main()
