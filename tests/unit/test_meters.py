"""Figures that must not be wrong: a peak that belongs to another device would make MFU a fiction."""

import subprocess
import sys

import pytest
import torch

from train.record.meters import ThroughputMeter, peak_flops, peak_of


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Tesla T4", 65), ("Tesla V100-SXM2-16GB", 125), ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA RTX A6000", 155),
        ("NVIDIA H200 NVL", 835), ("NVIDIA GH200 480GB", 989), ("NVIDIA GB200", 2500), ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA H20", 148), ("NVIDIA GeForce RTX 5090", 209), ("NVIDIA RTX 6000 Ada Generation", 364),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090 D", None), ("NVIDIA A10G", None),
        ("NVIDIA RTX A4000", None), ("NVIDIA T400", None), ("Some future device", None),
    ],
)  # fmt: skip
def test_peaks_by_name(name, tera):
    assert peak_of(name) == (tera and tera * 1e12)


def test_a_cpu_has_no_known_peak():
    assert peak_flops(torch.device("cpu"), "bf16") is None
    meter = ThroughputMeter(flops_per_token=10.0, peak=None)
    assert meter.of_update(100, 4, 2.0) == {"samples_per_s": 2.0, "tokens_per_s": 50.0, "flops_per_s": 500.0}
    assert ThroughputMeter(10.0, peak=1000.0).of_update(100, 4, 2.0)["mfu"] == 0.5


def test_the_typical_rate_leaves_the_first_updates_out():
    meter = ThroughputMeter(1.0, None)
    for seconds in (100, 100, 100, *[1] * 9):
        meter.of_update(10, 1, seconds)
    assert meter.typical() == 10.0


PEAKS = """
import torch
from train.record.meters import MemoryMeter

meter = MemoryMeter(torch.device("cpu"))
meter.reset()
peaks = [meter.peak_bytes()]
block = torch.ones(2**29 // 4)
peaks.append(meter.peak_bytes())
del block
peaks.append(meter.peak_bytes())
meter.reset()
peaks.append(meter.peak_bytes())
print(*peaks)
"""


def test_peak_memory_is_that_since_the_reset():
    """In a process of its own: that of the tests is large, and can give back more in between than the block takes."""
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    before, with_block, after, anew = (int(peak) / 2**20 for peak in done.stdout.split())
    assert with_block >= before + 480
    assert after == pytest.approx(with_block, abs=16)
    assert anew < before + 32
