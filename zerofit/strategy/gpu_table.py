"""The table of known GPUs: device name, memory, and the maker's figures of speed and bandwidth."""

import re
from dataclasses import dataclass, replace
from typing import Any

from zerofit.recipe.errors import UserError, did_you_mean

TERA = 1e12
GIGA = 1e9
PCIE = {3: 16 * GIGA, 4: 31 * GIGA, 5: 63 * GIGA}  # 16 lanes, one direction
# Variants without figures: laptop and export cards, Ti and SUPER, vGPUs (A40-12Q), names that two GPUs share.
UNLISTED_VARIANT = re.compile(r"\b(Laptop|Max-Q|D|Ti|SUPER|HBM2e)\b|-\d+[ABCQ]\b|MI250X/|H800 PCIe")
MIG_MARK = " MIG "
# What torch's matrix products and attention reach of the peak in training. Fitted on published runs of V100, A100,
# H100, H200 and B200 (zerofit/estimate/timing.py). Of others an assumption: what S. Bekman, "Maximum
# Achievable Matmul FLOPS" (stas00/ml-engineering 744d01e, compute/accelerator), measured of one product, times 0.8,
# which is about what is left of his figures of A100 and H100 in training.
MATMUL_OF_PEAK = 0.65
ATTENTION_OF_PEAK = 0.36
NEWER: dict[str, Any] = {"attention_of_peak": 0.3, "is_newer": True}
# `alone_of_peak` is what he measured of one product of an A100 SXM and an H100 SXM (267.9 and 792.1 TFLOP/s; other
# Hoppers: an assumption). Training on one card reaches it too (784: docs/measurements/gpu.md): no other card slows it.
A100: dict[str, Any] = {"of_peak": 0.775, "alone_of_peak": 0.859}
HOPPER: dict[str, Any] = NEWER | {"alone_of_peak": 0.801}
H100: dict[str, Any] = HOPPER | {"attention_of_peak": 0.18, "of_peak": 0.6}
V100: dict[str, Any] = {"of_peak": 0.715, "attention_of_peak": 0.35, "has_bf16": False}
NO_PEAK = "the table of GPUs has no peak of {}; its data sheet has (dense matrix products in bf16 or fp16)"


@dataclass(frozen=True)
class Gpu:
    """A GPU. Bandwidths are in bytes/s, those of links in one direction; None: no source was found."""

    name: str  # of `--gpu`
    usable_bytes: float  # what torch reports as the device's memory (ECC and the driver's own share are taken off)
    model: str = ""  # a part of the device's name, which GPUs of different memory share; empty: no figures are known
    # FLOP/s of dense matrix products in fp16, with sums in fp32, and in bf16 where `has_bf16`
    half_flops_per_s: float | None = None
    fp32_flops_per_s: float | None = None  # without tensor cores, as torch multiplies fp32 matrices by default
    memory_bandwidth: float | None = None
    link_bandwidth: float | None = None  # to the other GPUs of a machine
    host_bandwidth: float | None = None  # to the host
    network_bandwidth: float | None = None  # to other machines, of one GPU, in the machine that its maker builds
    sms: int | None = None  # its streaming multiprocessors: a MIG slice of it has some of them
    has_bf16: bool = True
    of_peak: float = MATMUL_OF_PEAK  # what large matrix products reach of `half_flops_per_s` in training
    # the same of flash attention, without the half that a causal mask takes off
    attention_of_peak: float = ATTENTION_OF_PEAK
    alone_of_peak: float | None = None  # `of_peak` if a single GPU trains; None: not measured, `of_peak` is used
    is_newer: bool = False  # Hopper or Blackwell: newer attention kernels, and a newer host


FIELD_UNITS = {
    "usable_bytes": 2**30,
    "half_flops_per_s": TERA,
    "fp32_flops_per_s": TERA,
    "memory_bandwidth": GIGA,
    "link_bandwidth": GIGA,
    "network_bandwidth": GIGA,
}


def _in_si(gpu: Gpu) -> Gpu:
    """Return the same GPU in bytes and seconds; in the table `host_bandwidth` is a generation of PCIe."""
    figures = {name: value * unit for name, unit in FIELD_UNITS.items() if (value := getattr(gpu, name)) is not None}
    to_host = PCIE.get(int(gpu.host_bandwidth or 0))
    figures = {"link_bandwidth": to_host, **figures, "usable_bytes": int(figures["usable_bytes"])}
    return replace(gpu, host_bandwidth=to_host, **figures)


# Name, memory (GiB), model, then half and single (TFLOP/s), memory, NVLink or Infinity Fabric (GB/s), generation of
# PCIe, network (GB/s). Without a link of its own a GPU has PCIe.
# Memory is about what torch.cuda.get_device_properties reports for such a device. Written down from memory, not
# measured here; --gpu_memory overrides it.
# Figures are the makers', each with its document; where that prints sparse products, half of them, and of a whole
# machine, one GPU's part. Most were read as listed by stas00/ml-engineering (744d01e, compute/accelerator and
# network), Lightning (fabric/utilities/throughput.py) and G. Lockwood (glennklockwood.com). The network is that of a
# DGX (calculon-ai/calculon, systems/: 25 GB/s beside an A100, 50 beside an H100).
GPUS = {
    gpu.name: _in_si(gpu)
    for gpu in (
        # NVIDIA V100 data sheet (1165301-r5)
        Gpu("v100-16gb", 15.77, "V100-SXM2", 125, 15.7, 897, 150, 3, sms=80, **V100),
        Gpu("v100-32gb", 31.74, "V100-SXM2", 125, 15.7, 897, 150, 3, sms=80, **V100),
        Gpu("v100-pcie-16gb", 15.77, "V100-PCIE", 112, 14, 897, None, 3, sms=80, **V100),
        Gpu("v100-pcie-32gb", 31.74, "V100-PCIE", 112, 14, 897, None, 3, sms=80, **V100),
        Gpu("v100s-32gb", 31.74, "V100S-PCIE", 130, 16.4, None, None, 3, has_bf16=False),
        Gpu("t4-16gb", 14.75, "T4", 65, 8.1, 320, None, 3, sms=40, has_bf16=False),  # T4 data sheet (951643)
        # Ampere GA102 white paper, v2; A40 and A10 data sheets. An A10G is not an A10
        Gpu("rtx3090-24gb", 23.69, "RTX 3090", 71, 35.6, 936, None, 4, sms=82),
        Gpu("a6000-48gb", 47.54, "A6000", 154.8, 38.7, 768, None, 4, sms=84),
        Gpu("a40-48gb", 44.43, "A40", 149.7, 37.4, 696, None, 4, sms=84),
        Gpu("a10-24gb", 22.06, "A10", 125, 31.2, 600, None, 4, sms=72),
        Gpu("a10g-24gb", 22.06, "A10G", 70, 35, 600, None, 4, sms=80),  # A10G data sheet (AWS): 70 in dense FP16
        # Ada white paper, appendix A; L4, L40 and L40S data sheets; RTX 6000 Ada data sheet: 1,457 in sparse FP8
        Gpu("rtx4090-24gb", 23.65, "RTX 4090", 165.2, 82.6, 1008, None, 4, sms=128),
        Gpu("rtx6000ada-48gb", 47.38, "RTX 6000 Ada", 364.2, 91.1, 960, None, 4, sms=142),
        Gpu("l4-24gb", 22.17, "L4", 121, 30.3, 300, None, 4, sms=58),
        Gpu("l40-48gb", 44.43, "L40", 181, 90.5, 864, None, 4, sms=142),
        Gpu("l40s-48gb", 44.52, "L40S", 362, 91.6, 864, None, 4, sms=142),
        # RTX Blackwell white paper; RTX PRO 6000 data sheet: 4,000 in sparse FP4, an eighth of that
        Gpu("rtx5090-32gb", 31.36, "RTX 5090", 209.5, 104.8, 1792, None, 5, sms=170),
        Gpu("rtxpro6000-96gb", 94.97, "RTX PRO 6000 Blackwell Workstation", 500, 125, 1792, None, 5, sms=188),
        # A100 data sheet (1758950-r4)
        Gpu("a100-40gb", 39.39, "A100", 312, 19.5, 1555, 300, 4, 25, sms=108, **A100),
        Gpu("a100-80gb", 79.15, "A100", 312, 19.5, 2039, 300, 4, 25, sms=108, **A100),
        Gpu("a800-80gb", 79.15, "A800", 312, 19.5, 2039, 200, 4, sms=108, **A100),  # slower NVLink
        # H100 data sheet: 1,979 (SXM), 1,513 (PCIe), 1,671 (NVL), all sparse; H200 data sheet: 1,979 and 1,671
        Gpu("h100-80gb", 79.11, "H100", 989, 67, 3350, 450, 5, 50, sms=132, **H100),
        Gpu("h100-pcie-80gb", 79.11, "H100 PCIe", 756, 51, 2000, None, 5, sms=114, **H100),
        Gpu("h100-nvl-94gb", 93.1, "H100 NVL", 835, None, 3900, None, 5, sms=132, **NEWER),
        Gpu("h200-141gb", 139.8, "H200", 989, 67, 4800, 450, 5, 50, sms=132, of_peak=0.64, **HOPPER),
        Gpu("h200-nvl-141gb", 139.8, "H200 NVL", 835, None, 4800, None, 5, sms=132, **NEWER),
        Gpu("h800-80gb", 79.11, "H800", 989, 67, 3350, 200, 5, sms=132, **H100),  # slower NVLink
        Gpu("gh200-96gb", 94.5, "GH200", 989, 67, 4000, sms=132, **HOPPER),
        Gpu("h20-96gb", 95.1, "H20", 148, 44, 4000, 450, 5, sms=78),
        # Blackwell technical brief, table 3; HGX B300: 36 PFLOPS in sparse FP16 of 8; GB200 and GB300 NVL72: 360 of 72
        Gpu("b200-180gb", 178.3, "B200", 2250, 80, 8000, 900, 5, sms=148, of_peak=0.47, **NEWER),
        Gpu("gb200-186gb", 184, "GB200", 2500, 90, 8000, 900, sms=148, of_peak=0.47, **NEWER),
        Gpu("b300-288gb", 268, "B300", 2250, 75, 8000, 900, sms=148, of_peak=0.47, **NEWER),
        Gpu("gb300-288gb", 268, "GB300", 2500, None, 8000, 900, sms=148, of_peak=0.47, **NEWER),
        # AMD Instinct data sheets. An MI250X is one of its two dies; what links them to others was not found
        Gpu("mi210-64gb", 63.98),
        Gpu("mi250x-64gb", 63.98, "MI250X", 191.5, 23.9, 1640),
        Gpu("mi300x-192gb", 191.98, "MI300X", 1307.4, 163.4, 5300, 448, 5, sms=304, of_peak=0.41),
        Gpu("mi325x-256gb", 255.98, "MI325X", 1307.4, 163.4, 6000, 448, 5, sms=304, of_peak=0.41),
    )
}
CPU = "cpu"


def gpu_of(device_name: str) -> Gpu | None:
    """Return the GPU with this device name, or the one that it is a MIG slice of; None if it is not in the table."""
    name = device_name.partition(MIG_MARK)[0]
    if UNLISTED_VARIANT.search(name):
        return None
    matches = (
        gpu for gpu in GPUS.values() if gpu.model and re.search(rf"(?<![A-Za-z0-9]){gpu.model}(?![A-Za-z0-9])", name)
    )
    return max(matches, key=lambda gpu: len(gpu.model), default=None)


def peak_flops_of(device_name: str, num_sms: int | None = None) -> float | None:
    """Return the peak FLOP/s in half precision of a device name; None if it is not known. `num_sms`: the streaming
    multiprocessors of the device, of which a MIG slice has a part, and reaches that part of the peak."""
    gpu = gpu_of(device_name)
    if gpu is None or MIG_MARK not in device_name:
        return gpu.half_flops_per_s if gpu else None
    return gpu.half_flops_per_s * num_sms / gpu.sms if gpu.half_flops_per_s and num_sms and gpu.sms else None


def find_gpu(name: str) -> Gpu:
    """Return the GPU with a name of the table, in upper or lower case. Raises UserError if there is none."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        remedy = did_you_mean(name.lower(), GPUS, f"Known are {', '.join(GPUS)} and {CPU}")
        raise UserError(
            f"gpu = {name!r} is not in the table of known GPUs. {remedy}. Of another one, ask by its memory: zerofit "
            "plan --gpu_memory 24GiB"
        )
    return gpu
