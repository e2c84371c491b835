"""Facts about devices."""

from pathlib import Path

import pytest

from moe_runtime.core.device import peak_bf16_flops, peak_process_bytes, process_bytes


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 SXM5 80GB", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H800", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
    ],
)
def test_peaks_by_name(name: str, teraflops: float) -> None:
    assert peak_bf16_flops(name) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize("name", ["", "NVIDIA GeForce RTX 4090", "Intel Xeon", "H10"])
def test_unknown_names_have_no_peak(name: str) -> None:
    assert peak_bf16_flops(name) is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's own count")
def test_peak_of_the_process_is_linux_high_water_mark_in_bytes() -> None:
    before = peak_process_bytes()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    marked = int(lines["VmHWM"].split()[0]) * 1024
    after = peak_process_bytes()
    assert 0.9 * before <= marked <= 1.1 * after and before <= after


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's own count")
def test_bytes_of_the_process_now_follow_what_it_holds() -> None:
    before = process_bytes()
    held = bytearray(b"x" * (64 << 20))
    grown = process_bytes() - before
    assert 60 << 20 < grown < 80 << 20 and len(held) == 64 << 20
    del held
    assert process_bytes() - before < 16 << 20
