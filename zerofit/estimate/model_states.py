"""What a strategy keeps on a device and on the host: weights, optimizer, buffers, gathered weights, and its step.

Sources: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py and stage3.py, read with the resolved configuration;
zerofit/strategy/torch_engine.py for DDP and one process. Sizes are in bytes of one process, the one that holds most.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from zerofit.estimate.gradient_memory import BucketGradients, DdpGradients, GradientMemory
from zerofit.estimate.memory_constants import ADAFACTOR_BYTES, MASTER_BYTES, MOMENTS_BYTES, NORM_BYTES
from zerofit.estimate.weights import FlatGroup, Weight, Weights, kept_by_rank
from zerofit.estimate.zero3_weights import GatheredWeights


@dataclass(frozen=True)
class States:
    """The states of one strategy, and what its engine takes in each phase.

    Attributes:
        weights, gradients, optimizer, buffers: always on the device.
        engine: what follows the gradients of a backward pass, on the rank that keeps most of them.
        gathered: weights of other processes, during the passes; None: there are none.
        step: on the device during the optimizer's step, beside weights and optimizer: the largest of its moments.
        load: on the device while the engine is made, beside nothing else. ZeRO-1 and 2 flatten the weights into a copy
            on the device if it has room for that, and else on the host: the copy does not decide what fits.
        host: on the host, of this process: {name: bytes}.
        disk: on a disk of the machine, of this process, in bytes; checkpoints are not meant.
        overlaps: weights are gathered, and gradients reduced, on streams of their own.
        late: bytes of each tensor of `optimizer` that the first step makes, where activations have been.
        gradients_each: each weight's gradient is a tensor of its own, from its backward pass to the step.
    """

    weights: int
    optimizer: int
    engine: Callable[[], GradientMemory]
    gradients: int = 0
    buffers: int = 0
    gathered: GatheredWeights | None = None
    step: dict[str, int] = field(default_factory=dict)
    load: int = 0
    host: dict[str, int] = field(default_factory=dict)
    disk: int = 0
    overlaps: bool = False
    late: tuple[int, ...] = ()
    gradients_each: bool = False

    @property
    def held(self) -> int:
        """Weights, gradients and optimizer state where the model is computed."""
        return self.weights + self.optimizer + max(self.gradients, self.step.get("gradients", 0))

    @property
    def offloaded(self) -> int:
        return sum(self.host.values())


def torch_states(
    weights: Weights,
    world_size: int,
    trained_dtype: torch.dtype,
    frozen_dtype: torch.dtype,
    on_gpu: bool,
    optim: str = "adamw",
) -> States:
    """DDP, whose buckets hold the gradients all the time; or one process, where backward makes them."""
    width = trained_dtype.itemsize
    held = width * weights.trained + weights.frozen_bytes(frozen_dtype)
    taken = [0 if on_gpu else NORM_BYTES, ADAFACTOR_BYTES if optim == "adafactor" else 0]
    kind = DdpGradients if world_size > 1 else GradientMemory
    return States(
        weights=held,
        optimizer=weights.state_bytes(optim),
        engine=lambda: kind(weights, width),
        step={"gradients": width * weights.trained, "workspace": max(taken) * weights.largest},
        load=held,
        late=late_states(weights.state_bytes(optim) / max(1, weights.trained), [*weights.sizes.values()]),
        gradients_each=world_size == 1,
    )


def late_states(width: float, sizes: Iterable[int]) -> tuple[int, ...]:
    """Bytes of the tensors that torch's optimizers make in their first step: two for each weight.

    Args:
        width: bytes of state for an element.
    """
    return tuple(int(width / 2 * size) for size in sizes for _ in range(2))


def deepspeed_states(
    weights: Weights,
    zero: Any,
    world_size: int,
    dtype: torch.dtype,
    accumulates: bool,
    on_gpu: bool,
    keeps_layers: bool = True,
) -> States:
    """ZeRO of any stage.

    Args:
        zero: DeepSpeed's own DeepSpeedZeroConfig of the resolved configuration: defaults are DeepSpeed's.
        accumulates: an update has more than one micro-batch.
        keeps_layers: ZeRO-3 keeps layers between their forward and their backward pass (gathered.py).
    """
    if int(zero.stage) == 3:
        return _third_stage(weights, zero, world_size, dtype.itemsize, on_gpu, keeps_layers)
    return _first_stages(weights, zero, world_size, dtype.itemsize, dtype, accumulates, on_gpu)


def _first_stages(
    weights: Weights, zero: Any, world_size: int, width: int, dtype: torch.dtype, accumulates: bool, on_gpu: bool
) -> States:
    """ZeRO-1 and ZeRO-2 (stage_1_and_2.py)."""
    groups = [FlatGroup(group, world_size) for group in weights.groups]
    shards = [group.partition for group in groups]
    shard, offload, all_kept = sum(shards), zero.offload_optimizer, kept_by_rank(groups, weights.sizes)
    fullest = max(all_kept, key=all_kept.__getitem__)
    offloads = offload_device(offload) != "none"
    kept = 0 if offloads else width * all_kept[fullest]  # grads_in_partition
    held = width * shard * world_size + weights.frozen_bytes(dtype)

    def part_of(size: int) -> int:
        return min(size, max(shards))

    common: dict[str, Any] = {
        "weights": held,
        "load": held,
        "engine": lambda: BucketGradients(weights, zero, width, kept, part_of if offloads else None),
        "overlaps": bool(zero.overlap_comm),
    }
    if offloads:
        host = {
            "optimizer": _pinned((MASTER_BYTES + MOMENTS_BYTES) * shard, offload, on_gpu, parts=3),
            "gradients": _pinned(4 * shard, offload, on_gpu) + (width * shard if accumulates else 0),
            "buffers": _pinned(width * (shard + weights.largest), offload, on_gpu),
        }
        return States(optimizer=0, buffers=width * weights.largest, host=host, **common)
    # TracedStep by step: norms in fp64; each group's gradients flat, and again in fp32.
    slices = [size for group in groups for parts in group.parts.values() for at, size in parts if at == fullest]
    moments = [NORM_BYTES * max(slices, default=0)]
    moments += [width * one + (MASTER_BYTES * one if width != MASTER_BYTES else 0) for one in shards]
    if not on_gpu:  # gloo gathers into a tensor of its own, after gradients are gone
        moments.append(width * max(shards) * world_size - kept)
    return States(
        optimizer=(MASTER_BYTES + MOMENTS_BYTES) * shard,
        step={"gradients": kept, "workspace": max(moments)},
        **common,
    )


def _third_stage(weights: Weights, zero: Any, world_size: int, width: int, on_gpu: bool, keeps_layers: bool) -> States:
    """ZeRO-3 (stage3.py)."""

    def part_of(size: int) -> int:
        return -(-size // world_size)

    def shard_of(group: Iterable[Weight]) -> int:
        return sum(part_of(weight.size) for weight in group)

    groups = [shard_of(group) for group in weights.groups]
    shard, trained = shard_of(weights.all), sum(groups)
    offloads_weights = offload_device(zero.offload_param) != "none"
    copies = world_size > 1 or offloads_weights  # alone, a rank reads its shards in place (_no_gather_coalesced)
    persistent = weights.persistent(int(zero.param_persistence_threshold)) if copies else 0
    offloads = offload_device(zero.offload_optimizer) != "none"
    wide = 0 if width == MASTER_BYTES else MASTER_BYTES  # gradients of the step in fp32
    host: dict[str, int] = {}
    if offloads_weights:
        host["weights"] = _pinned(width * shard, zero.offload_param, on_gpu)
    largest = part_of(weights.largest)
    on_disk = offload_device(zero.offload_optimizer) == "nvme"
    if on_disk:  # what is brought at a time: as many buffers as a sub-group has tensors (SwapBufferManager)
        brought = min(int(zero.sub_group_size) + largest, max(groups, default=0))
        host["optimizer"] = int(zero.offload_optimizer.buffer_count) * MASTER_BYTES * brought
        host["gradients"] = _pinned(width * trained, zero.offload_optimizer, on_gpu)
    elif offloads:
        host["optimizer"] = _pinned((MASTER_BYTES + MOMENTS_BYTES) * trained, zero.offload_optimizer, on_gpu, 3)
        host["gradients"] = _pinned((4 + width) * trained, zero.offload_optimizer, on_gpu, 2)
    within = int(zero.zero_hpz_partition_size)  # ZeRO++'s copies: _partition_param_sec
    copied = sum(-(-weight.size // within) for weight in weights.all) if within > 1 else 0
    gradients = 0 if offloads else width * trained
    sub_group = max((min(int(zero.sub_group_size), group) for group in groups), default=0)
    return States(
        weights=width * (persistent + copied + (0 if offloads_weights else shard)),
        optimizer=0 if offloads else (MASTER_BYTES + MOMENTS_BYTES) * trained,
        engine=lambda: BucketGradients(weights, zero, width, 0, part_of if offloads else None),
        gradients=gradients,
        buffers=width * int(zero.reduce_bucket_size) if zero.contiguous_gradients else 0,
        gathered=GatheredWeights(weights, zero, width, world_size, keeps_layers, offloads_weights) if copies else None,
        step={} if offloads else {"workspace": max(NORM_BYTES * largest, (width + wide) * sub_group)},
        load=width * (persistent + (0 if offloads_weights else shard)),  # zero.Init puts shards where they stay
        host=host,
        disk=(MASTER_BYTES + MOMENTS_BYTES + 4) * trained if on_disk else 0,  # gradients too
        overlaps=bool(zero.overlap_comm),
    )


def offload_device(offload: Any) -> str:
    """none, cpu or nvme, of one of DeepSpeed's offload sections."""
    device = getattr(offload, "device", None) or "none"
    return str(getattr(device, "value", device))


def _pinned(size: int, offload: Any, on_gpu: bool, parts: int = 1) -> int:
    """Host memory that is page-locked: CachingHostAllocator rounds each block up to a power of two."""
    if not (on_gpu and getattr(offload, "pin_memory", False)) or size < parts:
        return size
    return parts * 2 ** math.ceil(math.log2(size / parts))
