"""Loads a base from a sharded safetensors folder and trains adapters: bytes stored, peak memory, tokens a second.

    python -m moe_runtime.bench.lora --shape qwen3_30b --folder DIR [--layers 48] [--arms bf16 mxfp8 nvfp4 peft]
    python -m moe_runtime.bench.lora                                    a tiny shape, on the CPU too

The base has random weights; a folder that is not there is written first, tensor by tensor, as Hugging Face names them.
"bf16", "mxfp8" and "nvfp4" are ours, by how experts are stored, row-wise only; "default" is mxfp8 with both directions.
"peft" is Hugging Face's model with `experts_implementation="grouped_mm"` and PEFT's own adapters of the same factors,
which needs the extra `peft`. All recompute activations block by block, and step AdamW on the adapters. One line of JSON
for each arm, then a table. Loss is checked: an arm whose first loss is not the others' ends the run.
"""

# T tokens of a step

import argparse
import gc
import json
import math
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_runtime.checkpoint import hf as folders
from moe_runtime.checkpoint.hf import Box, Names, SaveOptions, names_of
from moe_runtime.integrations import transformers as hf
from moe_runtime.integrations.peft import add_lora, add_pefts_own
from moe_runtime.nn import LoRAConfig, storage_report
from moe_runtime.precision import Recipe, quantized_model_init, recipes

__all__ = ["ARMS", "SHAPES", "Measured", "measure", "table", "write_base"]

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "qwen3_30b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}
_MXFP8 = recipes.MXFP8BlockScaling(backward_override="dequantized")
_NVFP4 = recipes.NVFP4BlockScaling(backward_override="dequantized", disable_2d_quantization=True)
ARMS: dict[str, tuple[Recipe | None, bool]] = {
    "bf16": (None, False),
    "mxfp8": (_MXFP8, True),
    "nvfp4": (_NVFP4, True),
    "default": (_MXFP8, False),
    "peft": (None, False),
}
_STD = 0.02
# Of the first loss, relative to bf16's: a quantized base computes with rounded weights.
_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One arm. Peak bytes are the allocator's, from an empty device on; None on the CPU. `step_ms`: the median."""

    arm: str
    shape: str
    layers: int
    tokens: int
    expert_bytes_per_parameter: float
    stored_bytes: int
    peak_load_bytes: int | None
    peak_step_bytes: int | None
    step_ms: float
    first_loss: float

    @property
    def tokens_per_second(self) -> float:
        """Of the median step."""
        return self.tokens / self.step_ms * 1e3


class _RandomWeights:
    """A `Source`: what a freshly initialized model could hold, made as it is read."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._generator = torch.Generator().manual_seed(0)

    def __contains__(self, name: object) -> bool:
        return name in self._names.shapes

    def dtype(self, name: str) -> torch.dtype:
        """bfloat16, whatever it is."""
        return torch.bfloat16

    def read(self, name: str, box: Box) -> Tensor:
        """Ones for a norm's vector, else uniform values of standard deviation 0.02."""
        shape = [stop - start for start, stop in box]
        if len(shape) < 2:
            return torch.ones(shape, dtype=torch.bfloat16)
        half_width = _STD * math.sqrt(3)
        values = torch.empty(shape, dtype=torch.bfloat16)
        return values.uniform_(-half_width, half_width, generator=self._generator)


def write_base(folder: Path, shape: str, layers: int | None = None) -> Path:
    """A folder of random weights in the shape named, per-expert names, files of at most 5 GB."""
    fields = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    names = names_of(hf.describe(hf.load_config(model_type="qwen3_moe", fields={**fields, "dtype": "bfloat16"})))
    return folders.write(_RandomWeights(names), folder, names=names, options=SaveOptions(dtype=torch.bfloat16))


def main() -> None:
    """Prints the lines and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="tiny")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--folder", type=Path, help="of the base; written where it is not there")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=["bf16", "mxfp8", "nvfp4"])
    parser.add_argument("--tokens", type=int, help="of a step: 8192, or 64 of the tiny shape")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a sequence, at most")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5, help="measured, after two that are not")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="append one line for each result")
    given = parser.parse_args()
    tokens = given.tokens or (64 if given.shape == "tiny" else 8192)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch) / "base"
        if not (folder / hf.CONFIG_FILE).is_file():
            started = time.perf_counter()
            write_base(folder, given.shape, given.layers)
            print(f"wrote {folder} in {time.perf_counter() - started:.0f} s")
        found: list[Measured] = []
        for arm in given.arms:
            found.append(
                measure(
                    arm,
                    folder,
                    shape=given.shape,
                    tokens=tokens,
                    sequence=min(given.sequence, tokens),
                    rank=given.rank,
                    steps=given.steps,
                    device=torch.device(given.device),
                )
            )
            line = json.dumps({"bench": "lora", **asdict(found[-1]), "tokens_per_second": found[-1].tokens_per_second})
            print(line)
            if given.json is not None:
                with given.json.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
    check_losses(found)
    print(table(found))


def measure(
    arm: str, folder: Path, *, shape: str, tokens: int, sequence: int, rank: int, steps: int, device: torch.device
) -> Measured:
    """Load the folder as `arm` does, and time steps of AdamW on its adapters."""
    _start_over(device)
    model = _peft(folder, rank, device) if arm == "peft" else _ours(arm, folder, rank, device)
    peak_load = _peak(device)
    hf.enable_activation_checkpointing(model)
    stored = storage_report(model).parameters
    experts = [p for p in stored if ".experts." in p.name and ".lora" not in p.name]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (tokens // sequence, sequence), generator=generator).to(device)
    losses: list[float] = []
    times: list[float] = []
    _start_over(device)
    for _ in range(steps + 2):
        _wait(device)
        started = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        times.append((time.perf_counter() - started) * 1e3)
        losses.append(float(loss.detach()))
    return Measured(
        arm=arm,
        shape=shape,
        layers=model.config.num_hidden_layers,
        tokens=ids.numel(),
        expert_bytes_per_parameter=sum(p.num_bytes for p in experts) / sum(math.prod(p.shape) for p in experts),
        stored_bytes=sum(p.num_bytes for p in stored),
        peak_load_bytes=peak_load,
        peak_step_bytes=_peak(device),
        step_ms=sorted(times[2:])[steps // 2],
        first_loss=losses[0],
    )


def check_losses(found: list[Measured]) -> None:
    """SystemExit for an arm that computes something else: nothing else in its line is worth reading then."""
    for measured in found[1:]:
        if not math.isclose(measured.first_loss, found[0].first_loss, rel_tol=_TOLERANCE):
            raise SystemExit(
                f"{measured.arm}'s first loss is {measured.first_loss:.4f}, expected {found[0].first_loss:.4f} as "
                f"{found[0].arm} has it, within {_TOLERANCE:.0%}"
            )


def _ours(arm: str, folder: Path, rank: int, device: torch.device) -> Any:
    recipe, omits = ARMS[arm]
    with quantized_model_init(enabled=recipe is not None, recipe=recipe, omit_columnwise_primary_weight_storage=omits):
        model = hf.build(hf.load_config(config_file=str(folder / hf.CONFIG_FILE)), dtype=torch.bfloat16)
    add_lora(model, LoRAConfig(rank, 2.0 * rank))
    folders.load(model, folder, device=device)
    return model


def _peft(folder: Path, rank: int, device: torch.device) -> Any:
    config = hf.load_config(config_file=str(folder / hf.CONFIG_FILE))
    model = hf.build(config, experts_backend="hf", dtype=torch.bfloat16)
    folders.load(model, folder, device=device)
    add_pefts_own(model, LoRAConfig(rank, 2.0 * rank, target_modules=("experts.gate_up_proj", "experts.down_proj")))
    return model


def _start_over(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def table(found: list[Measured]) -> str:
    """Markdown."""
    titles = ["arm", "expert bytes a parameter", "stored GB", "peak GB loading", "peak GB training", "tokens/s"]
    others = [m.arm for m in found if m.arm in ("bf16", "peft")]
    lines = [" | ".join(["", *titles, *(f"/ {other}" for other in others), ""]).strip()]
    lines.append("|" + "---|" * (len(titles) + len(others)))
    rates = {m.arm: m.tokens_per_second for m in found}
    for m in found:
        peaks = ["-" if peak is None else f"{peak / 1e9:.2f}" for peak in (m.peak_load_bytes, m.peak_step_bytes)]
        cells = [m.arm, f"{m.expert_bytes_per_parameter:.3f}", f"{m.stored_bytes / 1e9:.3f}", *peaks]
        cells += [f"{m.tokens_per_second:.0f}", *(f"{rates[m.arm] / rates[other]:.2f}" for other in others)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
