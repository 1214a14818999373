"""What the machine does: tokens and floating-point operations a second, and memory. Measured, never assumed."""

import contextlib
import re
import resource
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from train.strategy.devices import device_name

# Dense peak of half-precision matrix products, FLOP/s, from the makers' data sheets (of two forms, the SXM / OAM one);
# of what torch sees as one device, which of an MI250X is one of its two dies. Where NVIDIA prints figures with
# sparsity, their half: "GB200 NVL72" and "GB300 NVL72" 360 PFLOPS of 72, "HGX B200" and "HGX B300" 36 of 8, "H200 NVL"
# 1,671 TFLOPS, "RTX 6000 Ada Generation" a quarter of 1,457 in FP8. "RTX Blackwell GPU Architecture" has the RTX 5090.
PEAK_HALF = {
    "GB300": 2500e12, "GB200": 2500e12, "B300": 2250e12, "B200": 2250e12, "GH200": 989e12, "H20": 148e12,
    "H200 NVL": 835e12, "H200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12, "H800": 989e12,
    "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A40": 150e12, "A10": 125e12,
    "A6000": 155e12, "RTX 6000 Ada": 364e12, "RTX 5090": 209e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
    "V100": 125e12, "T4": 65e12, "MI300X": 1307e12, "MI250X": 191.5e12,
}  # fmt: skip
OTHERS = re.compile(r" (MIG|Laptop|Max-Q|D)\b")  # a slice of a device, or a slower one with the same number


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's peak FLOP/s at this precision; None where it is not known (any CPU, fp32, a device not listed)."""
    name = device_name(device)
    return peak_of(name) if name and precision != "fp32" else None


def model_of(name: str) -> str:
    """The model in the table of the device of this name; empty if it is not there (an A10G is no A10)."""
    if OTHERS.search(name):
        return ""
    models = (model for model in PEAK_HALF if re.search(rf"(?<![A-Za-z0-9]){model}(?![A-Za-z0-9])", name))
    return next(models, "")


def peak_of(name: str) -> float | None:
    """The half-precision peak of the device of this name; None if it is not in the table."""
    return PEAK_HALF.get(model_of(name))


class MemoryMeter:
    """Peak memory of this process since the last reset: the device's allocator, or resident memory on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device

    def reset(self) -> None:
        if self.device.type == "cpu":
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # Linux: lowers the high-water mark to what is resident
        else:
            torch.accelerator.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        if self.device.type != "cpu":
            return torch.accelerator.max_memory_allocated()
        try:
            status = Path("/proc/self/status").read_text()
            return int(status.split("VmHWM:")[1].split()[0]) * 1024
        except (OSError, IndexError):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else peak * 1024


def make_meter(engine, flops_per_token: float) -> "ThroughputMeter":
    """The meter of a run: its peak is that of all devices together."""
    peak = peak_flops(engine.device, engine.strategy.precision)
    return ThroughputMeter(flops_per_token, peak and peak * engine.layout.world_size)


@dataclass
class ThroughputMeter:
    """Samples/s, tokens/s and FLOP/s over all ranks. Padding is no throughput.

    Args:
        flops_per_token: of the model at this run's sequence length.
        peak: FLOP/s that all devices together could reach, None if not known.
        evaluations: `evaluation_seconds` and `evaluation_samples_per_s` of each, in order.
    """

    flops_per_token: float
    peak: float | None
    rates: list[float] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)

    def of_update(self, tokens: int, samples: int, seconds: float) -> dict[str, float]:
        """The figures of one update that handled these samples, of `tokens` non-padding tokens, on all ranks."""
        rate = tokens / seconds
        self.rates.append(rate)
        figures = {
            "samples_per_s": samples / seconds,
            "tokens_per_s": rate,
            "flops_per_s": rate * self.flops_per_token,
        }
        if self.peak:
            figures["mfu"] = figures["flops_per_s"] / self.peak
        return figures

    def typical(self) -> float:
        """Median tokens/s, without the first updates (caches, compilation) where there are enough others."""
        steady = self.rates[3:] if len(self.rates) >= 10 else self.rates
        return statistics.median(steady) if steady else 0.0
