"""Measures what experts cost to store: bytes a parameter of each format and storage option, against the formula.

    python -m moe_runtime.bench.storage [--shape 8 1024 2048] [--device cpu]
    python -m moe_runtime.bench.storage --device cuda [--shape 64 2048 2048]

Each weight is built as a user builds it, in `quantized_model_init`. Bytes are counted from the storages that its
parameter holds, each once; a format whose bytes are not its formula's ends the run. On a GPU the growth of torch's
allocator is measured beside them. Prints one line of JSON for each weight, then all of them as a markdown table.
"""

# E experts   R rows (out features)   C columns (in features)

import argparse
import gc
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import prod

import torch
from torch import Tensor

from moe_runtime.formats import MXFP4, Format
from moe_runtime.nn import GroupedLinear
from moe_runtime.precision import Recipe, quantized_model_init, recipes
from moe_runtime.tensor import GroupedTensor, QuantizedTensor, Quantizer

__all__ = ["Measured", "measure", "storages", "table"]

Shape = tuple[int, int, int]
Build = Callable[[Shape, torch.device], Tensor]

_BOTH, _ROWWISE = "both directions", "row-wise only"
_TOLERANCE = 0.01  # of the allocator, which rounds up: small tensors to 512 bytes, large ones by less than 1 MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One weight of `shape`: what it holds, what its formula says, and on a GPU what the allocator gave for it."""

    name: str
    stored: str
    shape: Shape
    bytes_held: int
    bytes_formula: int
    bytes_allocated: int | None

    @property
    def per_parameter(self) -> float:
        """Bytes held for one parameter."""
        return self.bytes_held / prod(self.shape)


def main() -> None:
    """Prints the lines and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, help="experts, out and in features")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    experts, rows, columns = arguments.shape or ((64, 2048, 2048) if arguments.device == "cuda" else (8, 1024, 2048))
    measured = []
    for name, stored, build in storages():
        measured.append(measure(name, stored, build, (experts, rows, columns), torch.device(arguments.device)))
        print(json.dumps({"bench": "storage", **asdict(measured[-1]), "per_parameter": measured[-1].per_parameter}))
    print(f"\n{table(measured)}")


def storages() -> list[tuple[str, str, Build]]:
    """(name, which directions, how to build it) of every format and option."""
    quantizing: list[tuple[str, Recipe]] = [
        ("mxfp8", recipes.MXFP8BlockScaling()),
        ("nvfp4 2d", recipes.NVFP4BlockScaling()),
        ("nvfp4 1d", recipes.NVFP4BlockScaling(disable_2d_quantization=True)),
        ("float8", recipes.Float8CurrentScaling()),
        ("fp8_block", recipes.Float8BlockScaling()),
    ]
    found: list[tuple[str, str, Build]] = [("bf16", "the values", _layer(None, False))]
    for name, recipe in quantizing:
        found.append((name, _BOTH, _layer(recipe, False)))
        found.append((name, _ROWWISE, _layer(replace(recipe, backward_override="dequantized"), True)))
    return [*found, ("mxfp4", _ROWWISE, _packed(MXFP4()))]


def measure(name: str, stored: str, build: Build, shape: Shape, device: torch.device) -> Measured:
    """Build one weight and count. RuntimeError where bytes, formula and allocator do not agree."""
    before = _allocated(device)
    weight = build(shape, device)
    after = _allocated(device)
    held = sum(storage.nbytes() for storage in {s.data_ptr(): s for s in _storages(weight)}.values())
    formula = prod(shape) * weight.element_size()
    if isinstance(weight, QuantizedTensor):
        formula = weight.quantizer.format.stored_bytes(shape, rowwise=weight.rowwise, columnwise=weight.columnwise)
    allocated = None if before is None or after is None else after - before
    if held != formula:
        raise RuntimeError(f"{name}, {stored}: expected the formula's {formula} bytes, got {held}")
    if allocated is not None and abs(allocated - held) > _TOLERANCE * held:
        raise RuntimeError(f"{name}, {stored}: expected {held} bytes of the allocator within 1 %, got {allocated}")
    return Measured(
        name=name, stored=stored, shape=shape, bytes_held=held, bytes_formula=formula, bytes_allocated=allocated
    )


def table(measured: list[Measured]) -> str:
    """Markdown, one row for each weight."""
    lines = [
        "| format | stored | bytes a parameter | of bf16 | bytes | formula | allocator |",
        "|---|---|---|---|---|---|---|",
    ]
    for m in measured:
        allocated = "" if m.bytes_allocated is None else f"{m.bytes_allocated:,}"
        lines.append(
            f"| {m.name} | {m.stored} | {m.per_parameter:.5f} | {m.per_parameter / 2:.1%} | {m.bytes_held:,} "
            f"| {m.bytes_formula:,} | {allocated} |"
        )
    return "\n".join(lines)


def _layer(recipe: Recipe | None, omit: bool) -> Build:
    def build(shape: Shape, device: torch.device) -> Tensor:
        experts, rows, columns = shape
        with quantized_model_init(recipe is not None, recipe, omit_columnwise_primary_weight_storage=omit):
            return GroupedLinear(experts, columns, rows, dtype=torch.bfloat16, device=device).weight

    return build


def _packed(fmt: Format) -> Build:
    """A format that no recipe stores: the experts of a frozen base."""

    def build(shape: Shape, device: torch.device) -> Tensor:
        dense_ERC = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        return GroupedTensor.pack(dense_ERC, Quantizer(format=fmt, columnwise=fmt.columnwise_allowed))

    return build


def _storages(weight: Tensor) -> list[torch.UntypedStorage]:
    tensors = weight.records.tensors().values() if isinstance(weight, QuantizedTensor) else [weight.detach()]
    return [tensor.untyped_storage() for tensor in tensors]


def _allocated(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


if __name__ == "__main__":
    main()
