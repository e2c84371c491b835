"""The doctor command: what this machine and installation offer, and why something faster is not used.

Packages are looked up by their metadata, not imported, so that a broken one cannot break the report.
"""

import importlib.metadata
import os
import platform
import re
from pathlib import Path

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from moe_runtime.cli import lazy
from moe_runtime.comm.bootstrap import likely_rank
from moe_runtime.core.env import environment
from moe_runtime.formats import Format
from moe_runtime.kernels.select import native_status
from moe_runtime.kernels.tables import describe
from moe_runtime.precision import recipes

OPTIONAL_PACKAGES = (
    "transformers",
    "tokenizers",
    "safetensors",
    "pyarrow",
    "tensorboard",
    "matplotlib",
    "triton",
    "peft",
    "megatron-core",
    "mpi4py",
    "wandb",
)

TESTED_TORCH = {"cuda": (2, 11), "cpu": (2, 13)}
SUPPORTED_TORCH = ((2, 11), (2, 14))

_GIB = 2**30


def doctor() -> int:
    """Print the report on rank 0; the exit code is always 0: nothing here is an error."""
    if likely_rank(environment()) != 0:
        return 0
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 140  # a pipe has no width; the default of 80 would fold every reason
    _print_versions(console)
    devices = _devices()
    tables = [_table("devices", ("device", "name", "capability", "memory"), [row for _, row in devices])]
    for device in _one_of_each_type([device for device, _ in devices]):
        rows = [(op, chosen, "; ".join(refusals) or "first choice") for op, chosen, refusals in describe(device)]
        tables.append(_table(f"kernels on {device.type}", ("op", "backend", "why not a faster one"), rows))
    tables.append(_table("recipes", ("recipe", "weights", "inputs", "gradients", "products"), _recipes()))
    tables.append(_table("communication", ("backend", "available"), _communication()))
    tables.append(_table("packages", ("package", "version"), [(name, _version(name)) for name in OPTIONAL_PACKAGES]))
    for table in tables:
        console.print()
        console.print(table)
    return 0


def torch_note(version: str, device_type: str) -> str | None:
    """What to know about this torch version on this device type: None where the tests run on it."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return f"torch {version}: cannot tell its version"
    found = (int(match[1]), int(match[2]))
    lowest, highest = SUPPORTED_TORCH
    if not lowest <= found <= highest:
        return f"torch {version} is outside the supported range {_dotted(lowest)} to {_dotted(highest)}"
    tested = TESTED_TORCH.get(device_type)
    if tested != found:
        where = f"{_dotted(tested)} on {device_type}" if tested else "CPU and CUDA"
        return f"torch {_dotted(found)} on {device_type} is not tested (tested: {where})"
    return None


def _print_versions(console: Console) -> None:
    console.print(f"moe_runtime {lazy.package_version()}", style="bold")
    console.print(f"python      {platform.python_version()} on {platform.system()} {platform.machine()}")
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    console.print(f"torch       {torch.__version__}{cuda}")
    if (note := torch_note(torch.__version__, "cuda" if torch.cuda.is_available() else "cpu")) is not None:
        console.print(f"            {note}", style="yellow")
    if torch.version.cuda and not torch.cuda.is_available():
        console.print(f"            built for CUDA {torch.version.cuda}, but no device is visible", style="yellow")
    status = native_status()
    console.print(f"native      {status.reason}", style="" if status.available else "yellow")


def _devices() -> list[tuple[torch.device, tuple[str, ...]]]:
    """Every device with its row: name, what it can do, total memory."""
    capability = (
        f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads of {os.cpu_count()} cores"
    )
    rows = [(torch.device("cpu"), ("cpu", _cpu_name(), capability, _memory(_host_bytes())))]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        row = (f"cuda:{index}", facts.name, f"sm_{facts.major}{facts.minor}", _memory(facts.total_memory))
        rows.append((torch.device("cuda", index), row))
    return rows


def _one_of_each_type(devices: list[torch.device]) -> list[torch.device]:
    """The first device of each type: kernels are chosen alike for its peers."""
    first: dict[str, torch.device] = {}
    for device in devices:
        first.setdefault(device.type, device)
    return list(first.values())


def _cpu_name() -> str:
    facts = Path("/proc/cpuinfo")
    text = facts.read_text(errors="replace") if facts.is_file() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _recipes() -> list[tuple[str, ...]]:
    """Formats of each recipe's operands. No device is asked: every product is computed from dequantized operands."""
    kinds = (
        recipes.Float8CurrentScaling,
        recipes.Float8BlockScaling,
        recipes.MXFP8BlockScaling,
        recipes.NVFP4BlockScaling,
    )
    emulated = "emulated: operands dequantized to the compute dtype, fp32 accumulation"
    return [
        (kind.name, *(_format(fmt) for fmt in (kind().weight, kind().input, kind().gradient)), emulated)
        for kind in kinds
    ]


def _format(fmt: Format) -> str:
    element = fmt.encoding.name if fmt.encoding is not None else "as it is"
    return f"{element}, {'one scale' if fmt.block is None else f'{fmt.block.rows} x {fmt.block.cols}'}"


def _communication() -> list[tuple[str, str]]:
    if not dist.is_available():
        return [("torch.distributed", "not built into this torch")]
    facts = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return [(name, "yes" if available else "no, not built into this torch") for name, available in facts.items()]


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _memory(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
