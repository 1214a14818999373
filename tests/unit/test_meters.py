"""Figures that must not be wrong: a peak that belongs to another device would make MFU a fiction."""

import subprocess
import sys

import pytest
import torch
from helpers import TINY
from transformers import LlamaConfig, LlamaForCausalLM

from zerofit.model.parameters import flops_per_token
from zerofit.record.recorder import ThroughputMeter, peak_flops
from zerofit.strategy.gpu_table import peak_flops_of


@pytest.mark.parametrize(("name", "tera"), [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("Tesla T4", 65),
    ("Tesla V100-PCIE-32GB", 112), ("NVIDIA RTX A6000", 154.8), ("NVIDIA GeForce RTX 5090", 209.5),
    ("AMD Instinct MI250X/MI250", None), ("NVIDIA A40-12Q", None), ("NVIDIA GeForce RTX 3090 Ti", None),
    ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("Some future device", None),
])  # fmt: skip
def test_peaks_by_name(name, tera):
    assert peak_flops_of(name) == (tera and tera * 1e12)


def test_a_cpu_has_no_known_peak():
    assert peak_flops(torch.device("cpu"), "bf16") is None
    meter = ThroughputMeter(flops_per_token=10.0, peak=None)
    assert [*meter.rates_of(100, 4, 2.0).values()] == [2.0, 50.0, 500.0, None]
    assert ThroughputMeter(10.0, peak=1000.0).rates_of(100, 4, 2.0)["mfu"] == 0.5


PEAKS = """
import torch
from zerofit.record.recorder import MemoryMeter
meter = MemoryMeter(torch.device("cpu"))
meter.reset()
before, block = meter.peak_bytes(), torch.ones(2**29 // 4)
with_block = meter.peak_bytes()
del block
after = meter.peak_bytes()
meter.reset()
print(before, with_block, after, meter.peak_bytes())
"""


def test_peak_memory_is_that_since_the_reset():
    """In a process of its own: that of the tests is large, and can give back more in between than the block takes."""
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    before, with_block, after, anew = (int(peak) / 2**20 for peak in done.stdout.split())
    assert with_block >= before + 480
    assert after == pytest.approx(with_block, abs=16)
    assert anew < before + 32


@pytest.mark.parametrize("head_dim", [8, 32])
def test_attention_is_counted_by_the_width_of_its_heads(head_dim):
    """12 L (heads x head_dim) T of each token (Chowdhery et al. 2022, appendix B); hidden_size is another width."""
    config = LlamaConfig(**TINY["llama"], vocab_size=50, head_dim=head_dim)
    model = LlamaForCausalLM(config)
    longer, shorter = (flops_per_token(model, length) for length in (32, 16))
    assert longer - shorter == 12 * config.num_hidden_layers * config.num_attention_heads * head_dim * 16
