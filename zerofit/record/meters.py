"""Meters of tokens and floating-point operations a second, and of memory. Measured, never assumed."""

import contextlib
import resource
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from zerofit.record.metrics import EvaluationTime
from zerofit.strategy.devices import device_name
from zerofit.strategy.gpu_table import NO_PEAK, peak_flops_of
from zerofit.strategy.host_memory import proc_field as field_of
from zerofit.strategy.host_memory import read_or_empty


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's peak FLOP/s at this precision, of the table of GPUs.

    None where it is not known (any CPU, fp32, a device not listed).
    """
    name = device_name(device)
    if not name or precision == "fp32":
        return None
    ask = getattr(torch.get_device_module(device), "get_device_properties", None)
    return peak_flops_of(name, getattr(ask(device), "multi_processor_count", None) if ask else None)


def without_mfu(device: torch.device, precision: str) -> str | None:
    """A sentence on why no MFU is reported of this device; None where it is reported, or would mean nothing."""
    name = device_name(device)
    if not name or precision == "fp32" or peak_flops(device, precision):
        return None
    return f"MFU is not reported, since {NO_PEAK.format(name)}"


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
        if peak := field_of(read_or_empty("/proc/self/status"), "VmHWM:", 1024):
            return peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Rates(NamedTuple):
    """The rates of one update, all ranks together."""

    samples_per_s: float
    tokens_per_s: float
    flops_per_s: float
    mfu: float | None


@dataclass
class ThroughputMeter:
    """Samples/s, tokens/s and FLOP/s over all ranks. Padding is not throughput."""

    flops_per_token: float  # of the model at this run's sequence length
    peak: float | None  # FLOP/s that all devices together could reach, None if not known
    rates: list[float] = field(default_factory=list)
    evaluations: list[EvaluationTime] = field(default_factory=list)

    def rates_of(self, tokens: int, samples: int, seconds: float) -> Rates:
        """The rates of one update that handled these samples, of `tokens` non-padding tokens, on all ranks."""
        rate = tokens / seconds
        self.rates.append(rate)
        flops_per_s = rate * self.flops_per_token
        return Rates(samples / seconds, rate, flops_per_s, flops_per_s / self.peak if self.peak else None)

    def typical(self) -> float:
        """Median tokens/s, without the first updates (caches, compilation) where there are enough others."""
        steady = self.rates[3:] if len(self.rates) >= 10 else self.rates
        return statistics.median(steady) if steady else 0.0
