"""Facts about devices: what is known of a GPU by its name, what memory a process has used."""

import resource
import sys
from collections.abc import Mapping
from pathlib import Path

# Dense bf16 tensor-core peaks, FLOP/s, from NVIDIA's data sheets; the first name contained in the device's decides.
_PEAK_BF16: Mapping[str, float] = {
    "H200": 989.4e12,
    "H100 PCIe": 756.0e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "GB200": 2500.0e12,
    "B200": 2250.0e12,
    "A100": 312.0e12,
}


def peak_bf16_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU with this name, or None if it is not known here."""
    return next((peak for name, peak in _PEAK_BF16.items() if name in device_name), None)


def peak_process_bytes() -> int:
    """The largest resident size this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere else


def process_bytes() -> int:
    """The resident size of this process now; its peak where the system does not tell."""
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        return peak_process_bytes()
    return int(statm.read_text().split()[1]) * resource.getpagesize()
