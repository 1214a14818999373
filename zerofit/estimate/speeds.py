"""The speeds and links of devices, at each kind of operation."""

import bisect
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from zerofit.estimate.allocations import ATTENTION, BY_FLOPS, MATRIX, Operation
from zerofit.estimate.exchanges import Links
from zerofit.strategy.gpu_table import GIGA, GPUS, TERA, Gpu

# How a GPU divides a product among its multiprocessors: tiles of (rows, columns), and what small ones reach of the
# best. Source: cuBLAS and CUTLASS choose among these; NVIDIA, Matrix Multiplication Background (tile and wave
# quantization). The parts that small tiles reach are assumptions.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.6))

# A product reaches K / (K + FILL) of the best: a tile has to be filled and written, whatever its depth. Fitted.
FILL = 124

# What a product reaches whose widths are not multiples of 64 elements, or not of 8, which tensor cores ask for.
# Fitted.
UNEVEN, MISALIGNED = 0.64, 0.27

# Attention reaches S / (S + ROWS) of its best on rows of S tokens, and less with heads of at most 64. Fitted.
ATTENTION_ROWS, NARROW_HEADS = 296, 0.82

# What operations that move (size in bytes) reach of the memory's bandwidth. Source: Calculon, mem1, MB_efficiency.
OF_MEMORY_BY_BYTES = ((1e5, 0.3), (1e6, 0.6), (1e7, 0.75), (1e8, 0.9))

# What torch.compile leaves of the time of operations that move bytes. Fitted.
FUSED = 0.15


def product_efficiency(shape: tuple[int, ...], multiprocessors: int) -> float:
    """Return the part of a GPU's best that a matrix product reaches, by its tiles, waves, depth and alignment.
    `shape`: (products, M, N, K)."""
    count, rows, columns, depth = shape

    def filled(height: int, width: int) -> float:
        tiles = count * math.ceil(rows / height) * math.ceil(columns / width)
        waves = math.ceil(tiles / multiprocessors)
        return count * rows * columns / (waves * multiprocessors * height * width)

    best = max(quality * filled(height, width) for height, width, quality in TILES)
    aligned = 1.0
    for width in (columns, depth):
        aligned = min(aligned, MISALIGNED if width % 8 else UNEVEN if width % 64 else 1.0)
    return best * aligned * depth / (depth + FILL)


def attention_efficiency(shape: tuple[int, ...]) -> float:
    """Return the part of its best that attention reaches. `shape`: (rows x heads, queries, keys, width of a head)."""
    _, queries, _, width = shape
    return queries / (queries + ATTENTION_ROWS) * (NARROW_HEADS if width <= 64 else 1.0)


@dataclass(frozen=True)
class Speeds:
    """The speeds that one process of a GPU reaches."""

    rates: dict[tuple[str, bool], float]  # {(kind, half precision): FLOP/s} of matrix products and attention
    memory_bandwidth: float  # bytes/s, of which an operation reaches a part, by its size (`memory_seconds`)
    operation_s: float  # what starting an operation takes, while others run
    host_adam_rate: float  # elements/s of the host's Adam, of all processes of a machine together
    host_link: float  # bytes/s between the host and this device, in one direction
    peak_half: float  # FLOP/s of half precision that a utilisation refers to
    multiprocessors: int  # of the GPU, by which products are divided
    fused: float = FUSED  # the part of their time that operations that move bytes take under torch.compile
    tensor_s: float = 0.0  # seconds of Python for each tensor in DeepSpeed's step, while the device waits

    def seconds(self, operation: Operation) -> float:
        """Time of an operation's work alone, without starting it."""
        kind, half, flops, moved, shape = operation
        if kind not in BY_FLOPS:
            return self.memory_seconds(moved)
        rate = self.rates[kind, half]
        if kind == MATRIX and shape:
            rate *= product_efficiency(shape, self.multiprocessors)
        elif shape:
            rate *= attention_efficiency(shape)
        return max(self.memory_seconds(moved), flops / rate)

    def memory_seconds(self, moved: float) -> float:
        """The time in which this number of bytes is read and written. Between two sizes of the table the rate is
        interpolated on a logarithmic scale; beyond the first and the last one it stays."""
        if not moved:
            return 0.0
        rates = [self.memory_bandwidth * part for _, part in OF_MEMORY_BY_BYTES]
        place = bisect.bisect_left(OF_MEMORY_BY_BYTES, (moved, 0.0))
        if place in (0, len(rates)):
            return moved / rates[min(place, len(rates) - 1)]
        low, high = OF_MEMORY_BY_BYTES[place - 1][0], OF_MEMORY_BY_BYTES[place][0]
        first, second = rates[place - 1], rates[place]
        return moved / (first * (second / first) ** (math.log(moved / low) / math.log(high / low)))

    def computes(self, half: bool) -> bool:
        """Return whether the rate of matrix products in this precision is known."""
        return (MATRIX, half) in self.rates


MULTIPROCESSORS = 108  # where the table of GPUs has none: those of an A100

# What kernels written for Hopper and Blackwell reach of the peak in attention, forward and backward. Fitted on rows of
# flash attention 3 and 4; Shah et al. 2024 have 0.75 forward.
NEWER_ATTENTION = 0.65

# The same of torch's own kernels of 2025 (cuDNN 9's on Hopper), where one card trains. Measured on an H100 with torch
# 2.11 (docs/measurements/gpu.md, "Where the time goes"): 7.7 TFLOP in 25 ms on rows of 2,048 tokens and heads of 64,
# which is 31 % of the peak, divided by what `attention_efficiency` says of such a shape.
ATTENTION_ALONE = 0.43

# What operations that move bytes reach there of the rates below: 174 ms, norm and clipping included, where those rates
# have 150; and what torch.compile leaves of their time: 77 of these ms.
MEMORY_ALONE, FUSED_ALONE = 0.86, 0.44

# Seconds that Python, torch, transformers and peft take to start an operation of the forward pass. Fitted on LoRA with
# short rows.
OPERATION_S = 22e-6

# The same beside Hopper and Blackwell, in a newer host with the torch of 2025: DeepSpeed's step of some 1,600
# operations leaves an H100 idle for 27 ms (GPT-2 under zero2: docs/measurements/gpu.md).
NEWER_OPERATION_S = 16e-6

# Operations that DeepSpeed's step starts for each tensor: hooks, copies into flat buffers and out of them. Counted in
# the source of 0.19.8: some 500 for the 148 tensors of GPT-2; 1,600 where it also checks each gradient for overflow,
# which zerofit turns off in bf16. The constants of many cards contain them.
STEP_OPERATIONS = 3.5

# Collectives within a pass, which wait for it and which it waits for, take longer than alone by these factors: beside
# Volta and Ampere; beside Hopper and Blackwell. Fitted.
WAITED, NEWER_WAITED = 2.05, 1.3

# What is reached of PCIe. Source: 55.4 of 63 GB/s measured beside an H200 (stas00/ml-engineering, network).
OF_PCIE = 0.88

# The network of one GPU where its maker's machine is not known: 100 Gbit/s. An assumption; --network_bandwidth.
NETWORK = 12.5e9

# The host's Adam, elements a second of a machine of eight GPUs. Fitted: on hosts of H200 and B200 (6.4e9, two rows),
# and of V100 and A800 (1e9, six rows). Ren et al. 2021, ZeRO-Offload, table 4, has 3.9e9 for Adam alone on a DGX-2.
# One process reaches half of that: measured beside an H100, with 16 cores (docs/measurements/gpu.md).
HOST_ADAM, NEWER_HOST_ADAM, ADAM_OF_ONE = 1e9, 6.4e9, 0.5


SOURCE = "makers' peaks, and efficiencies fitted on published runs (docs/plan.md); not measured"
HOPPER_KERNELS = ("flash_attention_3", "flash_attention_4")
OVERRIDES = ("peak_tflops", "memory_bandwidth", "link_bandwidth")
UNKNOWN = Gpu("", 0)  # of which a plan's options may say the figures
STAND_IN = GPUS["a100-80gb"]  # whose speed ranks layouts where that of the device is not known


def device_speeds(options: Any, gpu: Gpu | None, on_gpu: bool) -> tuple[Speeds | None, Links | None, str]:
    """Return (speeds, links, what they rest on): the maker's peaks, with stated efficiencies. (None, None, why) where
    one that is needed is not known. `options`: of the plan: num_gpus, gpus_per_node, and what overrides a GPU's
    figures."""
    if not on_gpu:
        return None, None, "not known of a CPU"
    name, gpu = f" of {gpu.name}" if gpu else "", gpu or UNKNOWN
    half = (options.peak_tflops or 0) * TERA or gpu.half_flops_per_s
    memory = (options.memory_bandwidth or 0) * GIGA or gpu.memory_bandwidth
    link = (options.link_bandwidth or 0) * GIGA or gpu.link_bandwidth
    network = (options.network_bandwidth or 0) * GIGA or gpu.network_bandwidth or NETWORK
    is_alone, local = options.num_gpus == 1, min(options.num_gpus, options.gpus_per_node)
    if not half or not memory or not (link or is_alone):
        needed = {"--peak_tflops": half, "--memory_bandwidth (GB/s)": memory}
        needed["--link_bandwidth (GB/s)"] = link or is_alone
        missing = ", ".join(option for option, value in needed.items() if not value)
        return None, None, f"not known{name}: set {missing}{'' if name else ', or --gpu'}"
    waited = NEWER_WAITED if gpu.is_newer else WAITED
    links = Links(link, network, over_pcie=link == gpu.host_bandwidth, waited=waited) if link else None
    best, of_attention = gpu.of_peak, gpu.attention_of_peak
    if gpu.alone_of_peak and is_alone:
        best = gpu.alone_of_peak
    if gpu.is_newer and options.attn_implementation in HOPPER_KERNELS:
        of_attention = NEWER_ATTENTION
    elif gpu.is_newer and is_alone:
        of_attention = ATTENTION_ALONE
    rates = {(MATRIX, True): half * best, (ATTENTION, True): half * of_attention}
    if gpu.fp32_flops_per_s:
        rates[MATRIX, False] = rates[ATTENTION, False] = gpu.fp32_flops_per_s * best
    adam = (NEWER_HOST_ADAM if gpu.is_newer else HOST_ADAM) * min(1.0, local * ADAM_OF_ONE)
    pcie = OF_PCIE * (gpu.host_bandwidth or 16 * GIGA)
    speeds = Speeds(rates, memory, OPERATION_S, adam, pcie, half, gpu.sms or MULTIPROCESSORS)
    if gpu.is_newer and is_alone:
        step_s = STEP_OPERATIONS * NEWER_OPERATION_S
        reached = memory * MEMORY_ALONE
        speeds = replace(
            speeds, memory_bandwidth=reached, operation_s=NEWER_OPERATION_S, fused=FUSED_ALONE, tensor_s=step_s
        )
    between = f"; {network / GIGA:g} GB/s to other machines" if options.num_gpus > local else ""
    return speeds, links, f"{SOURCE}{between}"


def stand_in_speeds(options: Any) -> tuple[Speeds, Links]:
    """Return (speeds, links) to rank layouts with where the device's own are not known."""
    plain = SimpleNamespace(**vars(options) | dict.fromkeys(OVERRIDES))
    speeds, links, _ = device_speeds(plain, STAND_IN, on_gpu=True)
    assert speeds is not None  # its maker states them
    assert links is not None
    return speeds, links
