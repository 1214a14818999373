"""Figures that must not be wrong: a peak that belongs to another device would make MFU a fiction."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from zerofit.record import meters
from zerofit.record.meters import ThroughputMeter, peak_flops, without_mfu
from zerofit.strategy.gpu_table import peak_of


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("Tesla T4", 65),
        ("Tesla V100-SXM2-16GB", 125), ("Tesla V100-PCIE-32GB", 112), ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA H200 NVL", 835), ("NVIDIA GeForce RTX 5090", 209.5), ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("AMD Instinct MI250X/MI250", None), ("NVIDIA A40-12Q", None), ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A10G", 70), ("NVIDIA RTX A4000", None), ("Some future device", None),
    ],
)  # fmt: skip
def test_peaks_by_name(name, tera):
    assert peak_of(name) == (tera and tera * 1e12)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 312 * 14 / 108),
        ("NVIDIA B200 MIG 1g.23gb", 2250 * 14 / 148),
        ("NVIDIA L4", 121),
    ],
)
def test_a_slice_of_a_gpu_reaches_as_much_as_it_has_of_its_multiprocessors(name, tera, monkeypatch):
    device, properties = torch.device("cuda", 0), lambda device: SimpleNamespace(multi_processor_count=14)
    monkeypatch.setattr(meters, "device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert peak_flops(device, "bf16") == (tera and pytest.approx(tera * 1e12))
    said = without_mfu(device, "bf16", None)
    assert (tera is None) == (said is not None and name in said and "--peak_tflops" in said)
    assert without_mfu(device, "bf16", 10.0) is None
    assert peak_flops(device, "bf16", 10.0) == 10e12, "what the user says counts"


def test_a_cpu_has_no_known_peak():
    assert peak_flops(torch.device("cpu"), "bf16") is None
    meter = ThroughputMeter(flops_per_token=10.0, peak=None)
    assert meter.of_update(100, 4, 2.0) == (2.0, 50.0, 500.0, None)
    assert ThroughputMeter(10.0, peak=1000.0).of_update(100, 4, 2.0).mfu == 0.5


PEAKS = """
import torch
from zerofit.record.meters import MemoryMeter

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
