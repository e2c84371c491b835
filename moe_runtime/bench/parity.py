"""Trains the same model in every layout and with Hugging Face's own experts, and prints how far the numbers lie apart.

    python -m moe_runtime.bench.parity [launch/configs/quickstart.toml] [--steps 20] [--ranks 2]

Each run is the training command in processes of its own, fp32, compared step by step with one process and grouped
experts: the largest relative difference of the losses and of the gradient norms. SGD shows rounding as it is; AdamW
divides by small second moments, which magnifies it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

_SGD = ("optim.name=sgd", "optim.lr=0.05")
_WARMUP_STEPS = 2  # whatever the config's own run is warmed up by: these are shorter


class Run(NamedTuple):
    """One training run: its name in the table, its ranks and its overrides."""

    name: str
    ranks: int
    overrides: tuple[str, ...]


def main() -> None:
    """Prints one markdown row a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="launch/configs/quickstart.toml", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2], help="world sizes to spread over")
    arguments = parser.parse_args()
    print("| run | optimizer | largest loss difference | largest gradient-norm difference |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for optimizer, chosen in (("sgd", _SGD), ("adamw", ())):
            base = _train(Run("alone", 1, chosen), arguments.config, arguments.steps, Path(folder))
            for run in _runs(chosen, arguments.ranks, layouts=optimizer == "sgd"):
                rows = _train(run, arguments.config, arguments.steps, Path(folder))
                gaps = [_largest_gap(rows, base, key) for key in ("loss", "grad_norm")]
                print(f"| {run.name} | {optimizer} | {gaps[0]:.1e} | {gaps[1]:.1e} |", flush=True)


def _runs(optimizer: tuple[str, ...], world_sizes: list[int], *, layouts: bool) -> list[Run]:
    runs = [Run("Hugging Face's experts, 1 rank", 1, (*optimizer, "experts.backend=hf"))]
    for ranks in world_sizes if layouts else []:
        for expert in (1, 2):
            for data in ("ddp", "fsdp2"):
                overrides = (*optimizer, f"parallel.expert={expert}", f"parallel.data={data}")
                runs.append(Run(f"{ranks} ranks, expert {expert}, {data}", ranks, overrides))
    return runs


def _train(run: Run, config: Path, steps: int, folder: Path) -> list[dict[str, float]]:
    run_dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
    fixed = (
        f"run.dir={run_dir}",
        f"train.steps={steps}",
        f"optim.warmup_steps={_WARMUP_STEPS}",
        "train.validate_every=0",
        "train.checkpoint_every=0",
        "log.tensorboard=false",
    )
    alone = ("parallel.expert=1", "parallel.data=none") if run.ranks == 1 else ()
    words = ["-m", "moe_runtime", "train", str(config)]
    for override in (*fixed, *alone, *run.overrides):
        words += ["--set", override]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.ranks}"] if run.ranks > 1 else []
    done = subprocess.run([sys.executable, *launcher, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{run.name} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _largest_gap(rows: list[dict[str, float]], base: list[dict[str, float]], key: str) -> float:
    return max(abs(row[key] - other[key]) / abs(other[key]) for row, other in zip(rows, base, strict=True))


if __name__ == "__main__":
    main()
