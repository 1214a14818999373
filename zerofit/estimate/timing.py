"""Predicts the time of updates of one model on one device: passes, communication, copies, the optimizer; with the
speed of devices for each kind of operation, and of their links.
"""

import bisect
import copy
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from zerofit.estimate.allocations import ALL_GATHER, ATTENTION, COLLECTIVES, FLOP_KINDS, MATRIX, Operation
from zerofit.estimate.exchanges import (
    ADAM_BYTES,
    Collectives,
    Exchanges,
    Links,
    first_stages_exchanges,
    fully_sharded_exchanges,
    third_stage_exchanges,
    torch_exchanges,
    with_muon,
)
from zerofit.estimate.fully_sharded import Fsdp2Settings
from zerofit.estimate.planned_model import DTYPES, PlannedModel
from zerofit.estimate.planned_strategy import PlannedStrategy
from zerofit.estimate.traced_steps import Stage, TracedStep
from zerofit.estimate.tracer import Tracer
from zerofit.model.parameters import flops_per_pair_token, flops_per_token
from zerofit.strategy.gpu_table import GIGA, GPUS, TERA, Gpu

# How a GPU divides a product among its multiprocessors: (rows, columns, efficiency) of tiles. Source: cuBLAS and
# CUTLASS choose among these; NVIDIA, Matrix Multiplication Background (tile and wave quantization). The efficiencies
# of small tiles are assumptions.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.6))

# A product reaches K / (K + TILE_FILL_DEPTH) of the best: filling and writing a tile has a fixed cost. Fitted.
TILE_FILL_DEPTH = 124

# Efficiency of a product whose widths are not multiples of 64 elements, or not of 8, as tensor cores need. Fitted.
UNEVEN_SHARE = 0.64
MISALIGNED_SHARE = 0.27

# Attention reaches S / (S + ATTENTION_ROWS) of its best on rows of S tokens, and less with heads up to 64. Fitted.
ATTENTION_ROWS = 296
NARROW_HEADS_SHARE = 0.82

# (bytes that an operation moves, share of the memory bandwidth that it reaches). Source: Calculon, MB_efficiency.
MEMORY_EFFICIENCY = ((1e5, 0.3), (1e6, 0.6), (1e7, 0.75), (1e8, 0.9))

# Share of the time of memory-bound operations that is left under torch.compile. Fitted.
COMPILED_SHARE = 0.15


def product_efficiency(shape: tuple[int, ...], multiprocessors: int) -> float:
    """Return the share of a GPU's peak that a matrix product reaches, by its tiles, waves, depth and alignment.
    `shape`: (products, M, N, K)."""
    count, rows, columns, depth = shape

    def filled(height: int, width: int) -> float:
        tiles = count * math.ceil(rows / height) * math.ceil(columns / width)
        waves = math.ceil(tiles / multiprocessors)
        return count * rows * columns / (waves * multiprocessors * height * width)

    best = max(quality * filled(height, width) for height, width, quality in TILES)
    aligned = 1.0
    for width in (columns, depth):
        aligned = min(aligned, MISALIGNED_SHARE if width % 8 else UNEVEN_SHARE if width % 64 else 1.0)
    return best * aligned * depth / (depth + TILE_FILL_DEPTH)


def attention_efficiency(shape: tuple[int, ...]) -> float:
    """Return the share of its best that attention reaches. `shape`: (rows x heads, queries, keys, width of a head)."""
    _, queries, _, width = shape
    return queries / (queries + ATTENTION_ROWS) * (NARROW_HEADS_SHARE if width <= 64 else 1.0)


@dataclass(frozen=True)
class Speeds:
    """The speeds that one process reaches on a GPU."""

    rates: dict[tuple[str, bool], float]  # {(kind, half precision): FLOP/s} of matrix products and attention
    memory_bandwidth: float  # bytes/s; the share that an operation reaches depends on its size (`memory_seconds`)
    operation_s: float  # seconds to start an operation, while others run
    host_adam_rate: float  # elements/s of the host's Adam, for all processes of a machine together
    host_link: float  # bytes/s between the host and this device, in one direction
    peak_half: float  # peak FLOP/s in half precision, for the model FLOPs utilization
    multiprocessors: int  # number of the GPU's multiprocessors
    fused: float = COMPILED_SHARE  # share of the time of memory-bound operations that is left under torch.compile
    tensor_s: float = 0.0  # seconds of Python per tensor in DeepSpeed's step, while the device waits

    def seconds(self, operation: Operation) -> float:
        """Return the time of an operation, without that of starting it."""
        kind, half, flops, moved, shape = operation
        if kind not in FLOP_KINDS:
            return self.memory_seconds(moved)
        rate = self.rates[kind, half]
        if kind == MATRIX and shape:
            rate *= product_efficiency(shape, self.multiprocessors)
        elif shape:
            rate *= attention_efficiency(shape)
        return max(self.memory_seconds(moved), flops / rate)

    def memory_seconds(self, moved: float) -> float:
        """Return the time to read and write this number of bytes. Between two sizes of the table the rate is
        interpolated on a logarithmic scale; outside the table it is that of the nearest size."""
        if not moved:
            return 0.0
        rates = [self.memory_bandwidth * part for _, part in MEMORY_EFFICIENCY]
        place = bisect.bisect_left(MEMORY_EFFICIENCY, (moved, 0.0))
        if place in (0, len(rates)):
            return moved / rates[min(place, len(rates) - 1)]
        low = MEMORY_EFFICIENCY[place - 1][0]
        high = MEMORY_EFFICIENCY[place][0]
        first = rates[place - 1]
        second = rates[place]
        return moved / (first * (second / first) ** (math.log(moved / low) / math.log(high / low)))

    def computes(self, half: bool) -> bool:
        """Return whether the rate of matrix products in this precision is known."""
        return (MATRIX, half) in self.rates


DEFAULT_MULTIPROCESSORS = 108  # an A100's, for GPUs whose number is not in the table

# Share of the peak that kernels for Hopper and Blackwell reach in attention, forward and backward. Fitted on rows of
# flash attention 3 and 4; Shah et al. 2024 have 0.75 forward.
HOPPER_ATTENTION = 0.65

# The same for torch's kernels of 2025 (cuDNN 9 on Hopper), on a single GPU. Measured on an H100 with torch 2.11
# (docs/measurements/gpu.md, "Where the time goes"): 7.7 TFLOP in 25 ms on rows of 2,048 tokens and heads of 64, which
# is 31 % of the peak, divided by `attention_efficiency` for this shape.
SINGLE_GPU_ATTENTION = 0.43

# Share of the rates of MEMORY_EFFICIENCY that memory-bound operations reach there: 174 ms, with norm and clipping,
# where those rates give 150; and the share of their time that is left under torch.compile: 77 of these ms.
SINGLE_GPU_MEMORY = 0.86
SINGLE_GPU_COMPILED = 0.44

# Seconds that Python, torch, transformers and peft take to start an operation of the forward pass. Fitted on LoRA with
# short rows.
OPERATION_S = 22e-6

# The same on hosts of Hopper and Blackwell, which are newer, with torch of 2025: DeepSpeed's step of about 1,600
# operations leaves an H100 idle for 27 ms (GPT-2 under zero2: docs/measurements/gpu.md).
NEWER_OPERATION_S = 16e-6

# Operations that DeepSpeed's step starts per tensor: hooks, copies to and from flat buffers. Counted in the source of
# 0.19.8: about 500 for the 148 tensors of GPT-2; 1,600 if it also checks each gradient for overflow, which zerofit
# turns off in bf16. The constants that were fitted on many GPUs include them.
STEP_OPERATIONS = 3.5

# Factors by which collectives on the critical path of a pass take longer than alone: on Volta and Ampere; on Hopper
# and Blackwell. Fitted.
WAITING_FACTOR = 2.05
NEWER_WAITING_FACTOR = 1.3

# Share of PCIe's bandwidth that is reached. Source: 55.4 of 63 GB/s with an H200 (stas00/ml-engineering, network).
PCIE_EFFICIENCY = 0.88

# Network bandwidth of one GPU, in bytes/s, if that of its machine is not known: 100 Gbit/s. An assumption.
DEFAULT_NETWORK = 12.5e9

# Rate of the host's Adam, in elements/s of a machine with eight GPUs. Fitted: on hosts of H200 and B200 (6.4e9, two
# rows), and of V100 and A800 (1e9, six rows). Ren et al. 2021, ZeRO-Offload, table 4, has 3.9e9 for Adam alone on a
# DGX-2. One process reaches half of that: measured with an H100 and 16 cores (docs/measurements/gpu.md).
HOST_ADAM_RATE = 1e9
NEWER_ADAM_RATE = 6.4e9
ADAM_SHARE = 0.5


SPEED_SOURCE = "makers' peaks, and efficiencies fitted on published runs (docs/plan.md); not measured"
HOPPER_KERNELS = ("flash_attention_3", "flash_attention_4")
SPEED_OVERRIDES = ("peak_tflops", "memory_bandwidth", "link_bandwidth")
UNKNOWN_GPU = Gpu("", 0)  # a GPU whose figures may be given by the plan's options
STAND_IN_GPU = GPUS["a100-80gb"]  # ranks layouts if the device's speed is not known


def device_speeds(options: Any, gpu: Gpu | None, on_gpu: bool) -> tuple[Speeds | None, Links | None, str]:
    """Return (speeds, links, their source), from the maker's peaks and the efficiencies above; (None, None, reason) if
    a figure that is needed is not known. `options`: of the plan: num_gpus, gpus_per_node, and the options that
    override a GPU's figures."""
    if not on_gpu:
        return None, None, "not known of a CPU"
    name = f" of {gpu.name}" if gpu else ""
    gpu = gpu or UNKNOWN_GPU
    half = (options.peak_tflops or 0) * TERA or gpu.half_flops_per_s
    memory = (options.memory_bandwidth or 0) * GIGA or gpu.memory_bandwidth
    link = (options.link_bandwidth or 0) * GIGA or gpu.link_bandwidth
    network = (options.network_bandwidth or 0) * GIGA or gpu.network_bandwidth or DEFAULT_NETWORK
    is_alone = options.num_gpus == 1
    local = min(options.num_gpus, options.gpus_per_node)
    if not half or not memory or not (link or is_alone):
        needed = {"--peak_tflops": half, "--memory_bandwidth (GB/s)": memory}
        needed["--link_bandwidth (GB/s)"] = link or is_alone
        missing = ", ".join(option for option, value in needed.items() if not value)
        return None, None, f"not known{name}: set {missing}{'' if name else ', or --gpu'}"
    waited = NEWER_WAITING_FACTOR if gpu.is_newer else WAITING_FACTOR
    links = Links(link, network, over_pcie=link == gpu.host_bandwidth, waited=waited) if link else None
    efficiency = gpu.of_peak
    attention_share = gpu.attention_of_peak
    if gpu.alone_of_peak and is_alone:
        efficiency = gpu.alone_of_peak
    if gpu.is_newer and options.attn_implementation in HOPPER_KERNELS:
        attention_share = HOPPER_ATTENTION
    elif gpu.is_newer and is_alone:
        attention_share = SINGLE_GPU_ATTENTION
    rates = {(MATRIX, True): half * efficiency, (ATTENTION, True): half * attention_share}
    if gpu.fp32_flops_per_s:
        rates[MATRIX, False] = rates[ATTENTION, False] = gpu.fp32_flops_per_s * efficiency
    adam = (NEWER_ADAM_RATE if gpu.is_newer else HOST_ADAM_RATE) * min(1.0, local * ADAM_SHARE)
    pcie = PCIE_EFFICIENCY * (gpu.host_bandwidth or 16 * GIGA)
    speeds = Speeds(rates, memory, OPERATION_S, adam, pcie, half, gpu.sms or DEFAULT_MULTIPROCESSORS)
    if gpu.is_newer and is_alone:
        step_s = STEP_OPERATIONS * NEWER_OPERATION_S
        reached = memory * SINGLE_GPU_MEMORY
        speeds = replace(
            speeds, memory_bandwidth=reached, operation_s=NEWER_OPERATION_S, fused=SINGLE_GPU_COMPILED, tensor_s=step_s
        )
    between = f"; {network / GIGA:g} GB/s to other machines" if options.num_gpus > local else ""
    return speeds, links, f"{SPEED_SOURCE}{between}"


# Share of that time in which autograd, which runs without Python, starts an operation of the backward pass. Fitted.
BACKWARD_START_SHARE = 0.6

# Share of the time of starting operations that is left under torch.compile. An assumption.
COMPILED_START_SHARE = 0.4

# A linear layer's product in float8 takes this share of its time in bf16. Narrow products take more: the square of
# (FLOAT8_SIDE / the harmonic mean of the two shorter sides) is added. Fitted on published ratios of whole compiled
# updates on H100s: 1.18 at 1B and 1.25 to 1.31 at 8B (OLMo-core's README), 1.17 at 1.6B, no gain at 0.1B (nanochat).
FLOAT8_SHARE = 0.67
FLOAT8_SIDE = 580.0

# Computation is slowed by this share of the time of communication that overlaps it. Fitted; Calculon has 0.15 for
# NVLink's processor_usage.
CONTENTION = 0.1

# Rate of a machine's disk, in bytes/s. An assumption: one NVMe disk of PCIe 4.
DISK_RATE = 3e9

# Time of a step on the host, relative to Adam alone: each fp32 gradient is also scaled for clipping (read and
# written), and each weight is cast to half precision (4 bytes read, 2 written). Source: DeepSpeed 0.19,
# unscale_and_clip_grads and step in runtime/zero/stage_1_and_2.py and stage3.py.
HOST_STEP_COST = (ADAM_BYTES + 8 + 6) / ADAM_BYTES

# The parts of an update's time that are not kinds of operations.
OPERATION_STARTS = "starting operations"
COMMUNICATION = "communication"
OPTIMIZER_STEP = "optimizer step"
HOST_WORK = "host"
BUBBLE = "pipeline bubble"


@dataclass(frozen=True)
class PassTime:
    """The time of a micro-batch's passes on one device, in seconds."""

    forward: float
    backward: float
    parts: dict[str, float]  # {kind of operation: seconds}, of both passes
    offloaded: float = 0.0  # bytes that are copied to the host in the forward pass, and back in the backward pass

    def interpolate(self, end: "PassTime", position: float) -> "PassTime":
        """Return the time on the line from this one (position 0) to `end` (position 1), or beyond it."""
        between = lambda first, second: max(0.0, first + position * (second - first))  # noqa: E731
        names = dict.fromkeys((*self.parts, *end.parts))
        return PassTime(
            between(self.forward, end.forward),
            between(self.backward, end.backward),
            {name: between(self.parts.get(name, 0.0), end.parts.get(name, 0.0)) for name in names},
            between(self.offloaded, end.offloaded),
        )


def pass_time(
    steps: list[TracedStep],
    speeds: Speeds,
    exchanged: Callable[[Operation], float],
    is_compiled: bool,
    is_float8: bool,
) -> PassTime:
    """Return the time of the operations of the passes.

    A GPU's queue is filled while it works: a pass takes the time of starting all its operations if that is longer than
    the time of their work.

    Args:
        exchanged: returns the seconds of a collective that the passes wait for, between ranks that share layers or
            rows.
        is_compiled: True under torch.compile, which fuses memory-bound operations.
        is_float8: True if the products of layers are in float8.
    """
    times = {"forward": 0.0, "backward": 0.0}
    starts = times.copy()
    waits = times.copy()
    parts: dict[str, float] = {}
    known: dict[int, tuple[dict[str, float], int]] = {}
    for step in steps:
        key = id(step.operations)
        if key not in known:
            rounded = is_float8 and step.place is not None
            known[key] = _segment_time(step.operations, speeds, exchanged, is_compiled, rounded)
        seconds_by_kind, count = known[key]
        phase = "backward" if step.phase == "backward" else "forward"
        starts[phase] += count * speeds.operation_s
        for kind, seconds in seconds_by_kind.items():
            parts[kind] = parts.get(kind, 0.0) + seconds
            (waits if kind == COMMUNICATION else times)[phase] += seconds
    starts["backward"] *= BACKWARD_START_SHARE
    for phase, started in starts.items():
        started *= COMPILED_START_SHARE if is_compiled else 1.0
        extra = max(0.0, started - times[phase])
        times[phase] += extra + waits[phase]
        parts[OPERATION_STARTS] = parts.get(OPERATION_STARTS, 0.0) + extra
    return PassTime(times["forward"], times["backward"], parts, sum(step.offloaded for step in steps))


def _segment_time(
    operations: Iterable[Operation],
    speeds: Speeds,
    exchanged: Callable[[Operation], float],
    is_compiled: bool,
    is_float8: bool,
) -> tuple[dict[str, float], int]:
    """Return ({kind: seconds}, number of operations that are started) of a segment."""
    parts: dict[str, float] = {}
    count = 0
    for operation in operations:
        if operation.kind in COLLECTIVES:
            parts[COMMUNICATION] = parts.get(COMMUNICATION, 0.0) + exchanged(operation)
            continue
        count += 1
        part = speeds.fused if is_compiled and operation.kind not in FLOP_KINDS else 1.0
        if is_float8 and operation.kind == MATRIX and operation.shape[:1] == (1,):
            shorter, longer, _ = sorted(operation.shape[1:])
            part = FLOAT8_SHARE + (FLOAT8_SIDE * (1 / shorter + 1 / longer) / 2) ** 2
        parts[operation.kind] = parts.get(operation.kind, 0.0) + part * speeds.seconds(operation)
    return parts, count


@dataclass(frozen=True)
class UpdateTime:
    """The time of an update, and its parts in seconds. Time that other work overlaps is in none of the parts."""

    seconds: float
    parts: dict[str, float]

    @property
    def bound(self) -> str:
        """The name of the part that takes the most time."""
        return max(self.parts, key=self.parts.__getitem__)


def update_time(
    passes: PassTime,
    exchanges: Exchanges,
    speeds: Speeds,
    links: Links,
    accumulation: int,
    *,
    world_size: int,
    per_machine: int,
    pipeline: int = 1,
    handed_over: float = 0.0,
) -> UpdateTime:
    """Return the time of an update of `accumulation` micro-batches.

    Communication that overlaps computation is hidden up to the length of the pass, and slows it (CONTENTION). Copies
    to and from the host are treated the same way, except layer inputs, which the passes wait for. The bubble is that
    of 1F1B: Narayanan et al. 2021, (p - 1) / m.

    Args:
        world_size: number of ranks that hold the same weights, and exchange gradients.
        per_machine: number of these ranks on one machine.
        pipeline: number of stages.
        handed_over: seconds in which a stage sends a micro-batch to the next one. Both wait; a stage in the middle
            receives and sends in both passes.
    """
    local = min(world_size, per_machine)

    def exchanged(collectives: list[Collectives]) -> float:
        total = 0.0
        for entry in collectives:
            total += links.seconds(entry, entry.group_size or world_size, max(1, per_machine // entry.rank_stride))
        return total

    def exposed(overlapping: float, compute: float) -> float:
        hidden = min(overlapping, compute) if exchanges.hidden else 0.0
        return overlapping - hidden * (1 - CONTENTION)

    forward = exchanged(exchanges.forward)
    backward = exchanged(exchanges.backward)
    up = exchanges.up / speeds.host_link
    down = exchanges.down / speeds.host_link
    last = backward + exchanged(exchanges.last_backward)
    in_each = exposed(forward, passes.forward) + exposed(backward, passes.backward)
    in_last = exposed(last, passes.backward) - exposed(backward, passes.backward)
    communication = accumulation * in_each + in_last + exchanged(exchanges.step)
    communication += 2 * (accumulation * min(2, pipeline - 1) + pipeline - 1) * handed_over
    copies = exposed(up, passes.forward) + exposed(down, passes.backward) + 2 * (passes.offloaded / speeds.host_link)
    adam = HOST_STEP_COST * exchanges.host_adam_elements * local / speeds.host_adam_rate
    adam += exchanges.disk * local / DISK_RATE
    host = accumulation * copies + exchanges.step_up / speeds.host_link + adam
    engine = accumulation * speeds.memory_seconds(exchanges.micro_moved)
    optimizer = speeds.memory_seconds(exchanges.step_moved) + exchanges.tensors * speeds.tensor_s
    optimizer += exchanges.product_rounds * sum(map(speeds.seconds, exchanges.products))
    parts = {kind: accumulation * seconds for kind, seconds in passes.parts.items()}
    parts["memory"] = parts.get("memory", 0.0) + engine
    computed = accumulation * (passes.forward + passes.backward) + engine
    bubble = computed * (pipeline - 1) / accumulation
    extra = {COMMUNICATION: communication, OPTIMIZER_STEP: optimizer, HOST_WORK: host, BUBBLE: bubble}
    for name, seconds in extra.items():
        if seconds:
            parts[name] = parts.get(name, 0.0) + seconds
    return UpdateTime(computed + sum(extra.values()), parts)


@dataclass(frozen=True)
class UpdateSpeed:
    """The predicted speed of an update: its seconds, tokens/s and model FLOPs utilization."""

    time: UpdateTime
    tokens_per_s: float  # tokens of all replicas, without padding
    mfu: float | None  # the model's FLOPs of these tokens over the peak of all devices; None: the peak is not known
    is_known: bool = True  # False: the speed is another device's, which only ranks layouts

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds_per_update": self.time.seconds,
            "seconds": self.time.parts,
            "bound": self.time.bound,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
        }


class Timing:
    """Predicts the time of updates; the same traces serve memory and time.

    Args:
        links: None for a single process, which exchanges nothing.
        mean_length: mean number of tokens of a row; None: the recipe's maximum.
        is_known: False if the speeds are another device's, which only ranks layouts.
    """

    def __init__(
        self,
        model: PlannedModel,
        gpus_per_node: int,
        speeds: Speeds,
        links: Links | None,
        mean_length: float | None,
        *,
        is_known: bool = True,
    ):
        self.model = model
        self.gpus_per_node = gpus_per_node
        self.speeds = speeds
        self.links = links or Links(math.inf, math.inf)
        self.rows = model.rows.shortened(mean_length) if mean_length else model.rows
        self.mean_length = mean_length
        self.is_known = is_known
        self._times: dict[tuple[Tracer, Stage], dict[int, PassTime]] = {}
        self._known: dict[tuple[int, bool], tuple[PlannedStrategy, Exchanges]] = {}

    def of(self, model: PlannedModel) -> "Timing":
        """Return a copy for a model that shares its tracers; the times of traced passes are shared too."""
        timing = copy.copy(self)
        timing.model = model
        timing._known = {}
        timing.__dict__.pop("flops_per_token", None)
        timing.rows = model.rows.shortened(self.mean_length) if self.mean_length else model.rows
        return timing

    def predict(self, resolved: PlannedStrategy, micro_batch: int, accumulation: int) -> UpdateSpeed | None:
        """Return the speed of an update; None if it is not known."""
        half = resolved.precision != "fp32"
        layout = resolved.layout
        world_size = layout.world_size
        if not self.speeds.computes(half):
            return None
        passes = self.passes(resolved, micro_batch)
        handed_over = 0.0
        if layout.pipeline > 1:  # a stage sends the hidden states of a micro-batch to the next one
            hidden = self.model.hidden_bytes(resolved, micro_batch)
            crosses_machines = world_size > self.gpus_per_node  # for some stage, and all others wait for it
            transfer = Collectives(ALL_GATHER, 2 * hidden, 1, half)  # between two ranks: each sends half of it
            handed_over = self.links.seconds(transfer, 2, 1 if crosses_machines else 2)
        time = update_time(
            passes,
            self._exchanges(resolved, accumulation > 1),
            self.speeds,
            self.links,
            accumulation,
            world_size=layout.shard_size,
            per_machine=max(1, self.gpus_per_node // layout.tensor),
            pipeline=layout.pipeline,
            handed_over=handed_over,
        )
        tokens_per_s = self.rows.tokens * micro_batch * accumulation * layout.data_size / time.seconds
        peak = self.speeds.peak_half if half else None
        mfu = tokens_per_s * self.flops_per_token / (peak * world_size) if peak else None
        return UpdateSpeed(time, tokens_per_s, mfu, self.is_known)

    def passes(self, resolved: PlannedStrategy, micro_batch: int) -> PassTime:
        """Return the time of the passes of the whole model, or of the slowest stage, which the others wait for."""
        stages = self.model.stages(resolved.layout)
        times = (self._passes_of(resolved, micro_batch, stage) for stage in stages)
        slowest = max(times, key=lambda time: time.forward + time.backward)
        if not self.model.teacher_weights:
            return slowest
        student_weights = sum(weight.numel() for weight in self.model.full.parameters())
        teacher = slowest.forward * self.model.teacher_weights / student_weights  # s per forward pass
        parts = slowest.parts | {"teacher": teacher}
        return replace(slowest, forward=slowest.forward + teacher, parts=parts)

    def _passes_of(self, resolved: PlannedStrategy, micro_batch: int, stage: Stage) -> PassTime:
        """Return the time of a micro-batch size that was traced, or of the first one that is needed; other sizes are
        interpolated between their neighbours."""
        tracer = self.model.tracer(resolved, rows=self.rows)
        times = self._times.setdefault((tracer, stage), {})
        layout = resolved.layout
        # Ranks that share layers or rows are neighbours; experts are divided over all ranks.
        group_size = layout.data_size if resolved.divides_experts else layout.tensor * layout.sequence

        def exchanged(operation: Operation) -> float:
            exchange = Collectives(operation.kind, operation.bytes, 1, operation.half)
            return self.links.waited * self.links.seconds(exchange, group_size, self.gpus_per_node)

        def add(size: int) -> None:
            if size not in times:
                steps = self.model.steps(resolved, stage, size, rows=self.rows)
                recipe = self.model.recipe
                times[size] = pass_time(steps, self.speeds, exchanged, bool(recipe.compiles), recipe.float8)

        for size in tracer.traced_sizes:
            add(size)
        largest = tracer.largest_traced
        if len(times) < 2 or micro_batch > largest:
            for size in [micro_batch] if micro_batch <= largest else [largest // 2, largest]:
                add(size)
        if micro_batch in times:
            return times[micro_batch]
        sizes = sorted(times)
        position = min(max(bisect.bisect(sizes, micro_batch), 1), len(sizes) - 1)
        low = sizes[position - 1]
        high = sizes[position]
        return times[low].interpolate(times[high], (micro_batch - low) / (high - low))

    def _exchanges(self, resolved: PlannedStrategy, accumulates: bool) -> Exchanges:
        """Return the communication of a strategy, cached by its id. The cache keeps the strategy, and so its id."""
        key = id(resolved), accumulates
        if key in self._known:
            return self._known[key][1]
        weights = self.model.weights_of(resolved.layout)
        world_size = resolved.layout.shard_size
        width = DTYPES[resolved.precision].itemsize
        if isinstance(resolved.sharding, Fsdp2Settings):
            replicas = resolved.layout.dp_replicate
            exchanges = fully_sharded_exchanges(weights, world_size, width, resolved.sharding, replicas)
        elif resolved.zero is None:
            exchanges = torch_exchanges(weights, world_size, self.model.on_gpu, self.model.recipe.optim)
        elif resolved.shards_parameters:
            exchanges = third_stage_exchanges(weights, resolved.zero, world_size, width, self.model.keeps_layers)
        else:
            exchanges = first_stages_exchanges(weights, resolved.zero, world_size, width, accumulates)
        if self.model.weights.matrices:
            ranks = resolved.optimizer_ranks
            half = resolved.precision != "fp32"
            exchanges = with_muon(exchanges, self.model.weights, half, ranks, ranks > 1 and resolved.shards_weights)
        self._known[key] = resolved, exchanges
        return exchanges

    @functools.cached_property
    def flops_per_token(self) -> float:
        """The FLOPs of a token, as a run counts them (zerofit/record/recorder.py)."""
        rows = self.rows
        full = self.model.full
        if rows.target_length:
            return flops_per_pair_token(full, rows.length, rows.target_length)
        return flops_per_token(full, rows.length)
