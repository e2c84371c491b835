"""What a checkpoint costs: how long training waits for it, how much slower the steps are meanwhile, and its bytes.

    python -m moe_runtime bench checkpoint [launch/configs/quickstart.toml] [--set a.b=c ...] [--every 20] [--rounds 5]

Rounds of `every` steps alternate: without a save, with one on a thread, with one that training waits for. A save begins
after the first step of its round. One process, whatever the configuration says. The bytes must equal the formula, or
there are no figures.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from moe_runtime import checkpoint
from moe_runtime.bench.step import batches
from moe_runtime.checkpoint import files, metadata
from moe_runtime.comm.bootstrap import Launch, local_device
from moe_runtime.integrations.transformers import load_config
from moe_runtime.train.config import CheckpointConfig, Config, ParallelConfig, check_model, load
from moe_runtime.train.data.cache import PreparedData, prepare
from moe_runtime.train.saving import Saver
from moe_runtime.train.setup import Trainee, build
from moe_runtime.train.step import Stepper

# A tensor is a zip of its own in torch's format: headers, and its bytes padded so that what follows is aligned.
RECORD_BYTES, ALIGNMENT = 1513, 64
_WARM_UP_STEPS = 5


def record_bytes(num_bytes: int) -> int:
    """Bytes in a file of one rank's part of one tensor that holds `num_bytes`."""
    return RECORD_BYTES + (ALIGNMENT * (num_bytes // ALIGNMENT + 1) if num_bytes else 0)


def formula_bytes(folder: Path) -> int:
    """Bytes that the *.distcp files of a checkpoint must have together, from the parts that its metadata describe."""
    described = metadata.read(folder, files.read_manifest(folder)["files"])
    total = 0
    for index in described.storage_data:
        entry = described.state_dict_metadata[index.fqn]
        assert isinstance(entry, metadata.TensorStorageMetadata)
        (part,) = [chunk for chunk in entry.chunks if index.offset is None or chunk.offsets == index.offset]
        total += record_bytes(part.sizes.numel() * entry.properties.dtype.itemsize)
    return total


def main() -> None:
    """Prints the wait, the slow-down and the bytes, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="launch/configs/quickstart.toml", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    config = replace(load(arguments.config, arguments.overrides), parallel=ParallelConfig(data="none"))
    hf_config = load_config(
        config_file=config.model.config_file, model_type=config.model.model_type, fields=config.model.fields
    )
    check_model(config, hf_config)
    data = prepare(config.data, model_vocab_size=hf_config.vocab_size)
    stepper = Stepper(config, build(config, hf_config, local_device(Launch())))
    with tempfile.TemporaryDirectory(dir=".") as folder:
        result = _measure(config, stepper, data, Path(folder), arguments.every, arguments.rounds)
    _report(result, arguments.every)


def _measure(
    config: Config, stepper: Stepper, data: PreparedData, folder: Path, every: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """By arm: "wait", seconds of each save's call, and "round", seconds of each round's steps and its call."""
    arms = {"none": None, "thread": True, "waiting": False}
    found: dict[str, dict[str, list[float]]] = {arm: {"wait": [], "round": []} for arm in arms}
    with ExitStack() as stack:
        savers = {
            arm: stack.enter_context(_saver(folder / arm, stepper.trainee, asynchronous))
            for arm, asynchronous in arms.items()
            if asynchronous is not None
        }
        step = _steps(config, stepper, data, range(_WARM_UP_STEPS))
        for number in range(rounds + 1):
            for arm, times in found.items():
                saver = savers.get(arm)
                started = time.perf_counter()
                step = _steps(config, stepper, data, range(step, step + 1))
                before = time.perf_counter()
                if saver is not None:
                    saver.save(step, {})
                wait = time.perf_counter() - before
                step = _steps(config, stepper, data, range(step, step + every - 1))
                # The first round makes the copy's memory and is not counted.
                if number:
                    times["round"].append(time.perf_counter() - started)
                    times["wait"].append(wait)
                if saver is not None:
                    saver.wait()
        _check_bytes(folder)
    return found


def _saver(root: Path, trainee: Trainee, asynchronous: bool) -> Saver:
    return Saver(root, trainee, CheckpointConfig(keep=1, asynchronous=asynchronous), timeout_seconds=60)


def _steps(config: Config, stepper: Stepper, data: PreparedData, steps: range) -> int:
    """Take these steps; the number of steps that were ever taken."""
    for step in steps:
        stepper.step(batches(config, data, step), config.optim.lr)
    return steps.stop


def _check_bytes(folder: Path) -> None:
    for root in folder.iterdir():
        newest = checkpoint.latest(root)
        assert newest is not None
        held, expected = sum(path.stat().st_size for path in newest.glob("*.distcp")), formula_bytes(newest)
        if held != expected:
            raise SystemExit(f"{newest} has {held} bytes of tensors, the formula says {expected}: not timed")
        print(f"{root.name}: {held:,} bytes of tensors, as the formula says")


def _report(found: dict[str, dict[str, list[float]]], every: int) -> None:
    medians = {arm: {key: statistics.median(values) for key, values in times.items()} for arm, times in found.items()}
    step = medians["none"]["round"] / every
    print(f"a step without saves: {step * 1e3:.1f} ms")
    for arm in ("thread", "waiting"):
        wait, more = medians[arm]["wait"], medians[arm]["round"] - medians["none"]["round"]
        print(
            f"{arm:8s} training waits {wait * 1e3:.1f} ms, {wait / step:.1%} of a step; {every} steps take "
            f"{more * 1e3:+.1f} ms, {more / medians['none']['round']:+.1%}"
        )
    print(
        json.dumps(
            {
                "bench": "checkpoint",
                "device": platform.processor() or "cpu",
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "every": every,
                "median_seconds": medians,
            }
        )
    )


if __name__ == "__main__":
    main()
