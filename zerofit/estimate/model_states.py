"""The memory that a strategy keeps on a device and on the host: weights, optimizer, buffers, gathered weights, its
step, and its gradients while they are completed one after another.

Sources: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py and stage3.py, read with the resolved configuration;
zerofit/strategy/engines.py for DDP and one process. Sizes are in bytes of one process, the one that holds most.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from zerofit.estimate.traced_steps import TracedStep
from zerofit.estimate.weights import (
    ADAFACTOR_BYTES,
    MASTER_BYTES,
    MOMENTS_BYTES,
    NORM_BYTES,
    FlatGroup,
    Weight,
    Weights,
    kept_by_rank,
)
from zerofit.estimate.zero3_weights import GatheredWeights


class GradientMemory:
    """Gradients as a single process has them: backward makes them, and later micro-batches are added to them.

    Attributes:
        gradients: held of completed gradients.
        buffers: held for their exchange.
        gathered: held of other ranks' weights.
    """

    def __init__(self, weights: Weights, width: int):
        self.sizes, self.width = weights.sizes, width
        self.gradients = self.buffers = 0

    @property
    def gathered(self) -> int:
        return 0

    @property
    def held(self) -> int:
        return self.gradients + self.buffers + self.gathered

    def begin(self, first: bool, last: bool) -> None:
        """Start the backward pass of a micro-batch, which may be the first or the last one of an update."""
        self.first, self.last = first, last
        if first:
            self.gradients = 0

    def enter(self, step: TracedStep) -> int:
        """Start a traced step. Returns the peak of the bytes that are held while it runs."""
        return self.held

    def complete(self, name: str) -> int:
        """The gradient of a weight is complete: until here the backward pass holds it, and from here on the engine.

        Returns: the most that is held at a moment meanwhile beside that gradient, temporaries included.
        """
        if not self.first:
            return self.held
        size = self.width * self.sizes[name]
        self.gradients += size
        return self.held - size  # it stays where backward has made it

    def finish(self) -> int:
        """The backward pass has ended. Returns as `complete` does."""
        return self.held


class DdpGradients(GradientMemory):
    """DDP: the buckets of all gradients are there all the time, and gradients are views of them."""

    def begin(self, first: bool, last: bool) -> None:
        self.first, self.gradients = False, self.width * sum(self.sizes.values())


class BucketGradients(GradientMemory):
    """ZeRO: gradients are collected in a bucket, which is reduced when the next one does not fit into it.

    A closed form of what DeepSpeed does weight by weight: a bucket of several gradients is copied as a whole to be
    reduced; whatever rank a gradient belongs to, ZeRO-1 keeps one that is larger than the bucket until the pass ends.

    Args:
        zero: DeepSpeed's own DeepSpeedZeroConfig.
        kept: bytes of the gradients that this rank keeps of a micro-batch, from its first reduction on; 0: they are
            among the states, or offloaded.
        part_of: (elements of a gradient) -> elements of the part that goes to this rank's share of the host's; None:
            gradients are not offloaded.
    """

    def __init__(
        self, weights: Weights, zero: Any, width: int, kept: int, part_of: Callable[[int], int] | None = None
    ):
        super().__init__(weights, width)
        self.stage, self.kept, self.part_of = int(zero.stage), kept, part_of
        self.capacity = width * int(zero.reduce_bucket_size)
        self.contiguous = bool(zero.contiguous_gradients or (part_of and self.stage < 3))
        has_buffer = self.contiguous and self.stage < 3  # that of ZeRO-3 is among the states
        self.buffer = self.capacity * (2 if zero.overlap_comm else 1) if has_buffer else 0

    def begin(self, first: bool, last: bool) -> None:
        self.first, self.last = first, last
        earlier = {1: self.width * sum(self.sizes.values()), 2: self.kept}  # of the micro-batches before
        self.gradients = 0 if first else earlier.get(self.stage, 0)
        self.buffers = 0 if first else self.buffers
        self.filled = self.count = self.largest = 0  # bytes, gradients, and elements of the largest in the bucket
        self.own = 0  # bytes of gradients that do not lie in its buffer
        self.is_kept = False

    def complete(self, name: str) -> int:
        size, self.buffers = self.width * self.sizes[name], self.buffer
        if self.stage == 1 and not self.last:
            self.gradients += size * self.first
            return self.held
        if self.stage == 1 and not self.first:
            self.gradients -= size  # it goes into the bucket with what was accumulated
        most = self._reduce() if self.filled and self.filled + size > self.capacity else self.held
        if self.part_of and self.stage < 3 and size > self.capacity:
            most = max(most, self.held + size)  # it is cloned
        own = size if not self.contiguous or size > self.capacity else 0  # it stays where backward has made it
        self.own += own
        self.gradients += own
        self.filled, self.count = self.filled + size, self.count + 1
        self.largest = max(self.largest, self.sizes[name])
        return max(most, self.held - own)

    def finish(self) -> int:
        if self.stage == 1 and not self.last:
            return self.held
        most = self._reduce()
        self._release()
        self.buffers = 0
        return most

    def _reduce(self) -> int:
        if not self.is_kept:
            self.is_kept, self.gradients = True, self.gradients + self.kept
        copied = self.filled if self.count > 1 else 0
        most = self.held + copied
        if self.part_of:  # on its way to the host
            wide = max(NORM_BYTES, MASTER_BYTES if self.width != MASTER_BYTES else 0) * self.last
            beside = self.width * self.part_of(self.largest) + copied if self.stage == 3 else 0
            most = max(most, self.held + beside + wide * self.part_of(self.largest))
        if self.stage > 1 or not self.contiguous:
            self._release()
        self.filled = self.count = self.largest = 0
        return most

    def _release(self) -> None:
        self.gradients, self.own = self.gradients - self.own, 0


@dataclass(frozen=True)
class States:
    """The states of one strategy, and what its engine takes in each phase. `weights`, `optimizer`, `gradients` and
    `buffers` are always on the device."""

    weights: int
    optimizer: int
    # what follows the gradients of a backward pass, on the rank that keeps most of them
    engine: Callable[[], GradientMemory]
    gradients: int = 0
    buffers: int = 0
    gathered: GatheredWeights | None = None  # of other processes, during the passes; None: there are none
    # on the device during the optimizer's step, beside weights and optimizer: the largest of its moments
    step: dict[str, int] = field(default_factory=dict)
    # on the device while the engine is made, beside nothing else. ZeRO-1 and 2 flatten the weights into a copy on the
    # device if it has room for that, and else on the host: the copy does not decide what fits
    load: int = 0
    host: dict[str, int] = field(default_factory=dict)  # on the host, of this process
    disk: int = 0  # on a disk of the machine, of this process; checkpoints are not meant
    overlaps: bool = False  # weights are gathered, and gradients reduced, on streams of their own
    late: tuple[int, ...] = ()  # each tensor of `optimizer` that the first step makes, where activations have been
    gradients_each: bool = False  # each weight's gradient is a tensor of its own, from its backward pass to the step

    @property
    def offloaded(self) -> int:
        return sum(self.host.values())


def torch_states(
    weights: Weights,
    world_size: int,
    trained_dtype: torch.dtype,
    frozen_dtype: torch.dtype,
    on_gpu: bool,
    *,
    optim: str = "adamw",
) -> States:
    """DDP, whose buckets hold the gradients all the time; or one process, where backward makes them."""
    width = trained_dtype.itemsize
    held = width * weights.trained + weights.frozen_bytes(frozen_dtype)
    taken = [0 if on_gpu else NORM_BYTES, ADAFACTOR_BYTES if optim == "adafactor" else 0]
    kind = DdpGradients if world_size > 1 else GradientMemory
    late = weights.late_states(lambda weight: weight.size)
    of_adam = weights.state_bytes(optim) / max(1, sum(late))
    return States(
        weights=held,
        optimizer=weights.state_bytes(optim),
        engine=lambda: kind(weights, width),
        step={"gradients": width * weights.trained, "workspace": max(taken) * weights.largest},
        load=held,
        late=tuple(int(of_adam * size) for size in late),
        gradients_each=world_size == 1,
    )


def first_stages_states(
    weights: Weights, zero: Any, world_size: int, dtype: torch.dtype, accumulates: bool, *, on_gpu: bool
) -> States:
    """ZeRO-1 and ZeRO-2 (stage_1_and_2.py).

    Args:
        zero: DeepSpeed's own DeepSpeedZeroConfig of the resolved configuration: defaults are DeepSpeed's.
        accumulates: an update has more than one micro-batch.
    """
    width = dtype.itemsize
    groups = [FlatGroup(group, world_size) for group in weights.groups]
    shards = [group.partition for group in groups]
    shard, offload, all_kept = sum(shards), zero.offload_optimizer, kept_by_rank(groups, weights.sizes)
    fullest = max(all_kept, key=all_kept.__getitem__)
    offloads = offload_target(offload) != "none"
    kept = 0 if offloads else width * all_kept[fullest]  # grads_in_partition
    held = width * shard * world_size + weights.frozen_bytes(dtype)

    def part_of(size: int) -> int:
        return min(size, max(shards))

    optimizer = MASTER_BYTES * shard + sum(group.moments_bytes * group.partition for group in groups)
    common: dict[str, Any] = {
        "weights": held,
        "load": held,
        "engine": lambda: BucketGradients(weights, zero, width, kept, part_of if offloads else None),
        "overlaps": bool(zero.overlap_comm),
    }
    if offloads:
        host = {
            "optimizer": _pinned(optimizer, offload, on_gpu, parts=3),
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
        optimizer=optimizer,
        step={"gradients": kept, "workspace": max(moments)},
        **common,
    )


def third_stage_states(
    weights: Weights, zero: Any, world_size: int, width: int, on_gpu: bool, *, keeps_layers: bool
) -> States:
    """ZeRO-3 (stage3.py), which may keep layers between their forward and their backward pass (zero3_weights.py)."""

    def part_of(size: int) -> int:
        return -(-size // world_size)

    def shard_of(group: Iterable[Weight]) -> int:
        return sum(part_of(weight.size) for weight in group)

    groups = [shard_of(group) for group in weights.groups]
    shard, trained = shard_of(weights.all), sum(groups)
    optimizer = sum((MASTER_BYTES + group[0].moments_bytes) * size for group, size in zip(weights.groups, groups))
    offloads_weights = offload_target(zero.offload_param) != "none"
    copies = world_size > 1 or offloads_weights  # alone, a rank reads its shards in place (_no_gather_coalesced)
    threshold = int(zero.param_persistence_threshold) if copies else 0  # weights up to this size are never sharded
    persistent = sum(weight.size for weight in weights.all if weight.size <= threshold)
    offloads = offload_target(zero.offload_optimizer) != "none"
    wide = 0 if width == MASTER_BYTES else MASTER_BYTES  # gradients of the step in fp32
    host: dict[str, int] = {}
    if offloads_weights:
        host["weights"] = _pinned(width * shard, zero.offload_param, on_gpu)
    largest = part_of(weights.largest)
    on_disk = offload_target(zero.offload_optimizer) == "nvme"
    if on_disk:  # what is brought at a time: as many buffers as a sub-group has tensors (SwapBufferManager)
        brought = min(int(zero.sub_group_size) + largest, max(groups, default=0))
        host["optimizer"] = int(zero.offload_optimizer.buffer_count) * MASTER_BYTES * brought
        host["gradients"] = _pinned(width * trained, zero.offload_optimizer, on_gpu)
    elif offloads:
        host["optimizer"] = _pinned(optimizer, zero.offload_optimizer, on_gpu, 3)
        host["gradients"] = _pinned((4 + width) * trained, zero.offload_optimizer, on_gpu, 2)
    within = int(zero.zero_hpz_partition_size)  # ZeRO++'s copies: _partition_param_sec
    copied = sum(-(-weight.size // within) for weight in weights.all) if within > 1 else 0
    gradients = 0 if offloads else width * trained
    sub_group = max((min(int(zero.sub_group_size), group) for group in groups), default=0)
    return States(
        weights=width * (persistent + copied + (0 if offloads_weights else shard)),
        optimizer=0 if offloads else optimizer,
        engine=lambda: BucketGradients(weights, zero, width, 0, part_of if offloads else None),
        gradients=gradients,
        buffers=width * int(zero.reduce_bucket_size) if zero.contiguous_gradients else 0,
        gathered=GatheredWeights.of(
            weights, zero, width, world_size, keeps=keeps_layers, shards_copied=offloads_weights
        )
        if copies
        else None,
        step={} if offloads else {"workspace": max(NORM_BYTES * largest, (width + wide) * sub_group)},
        load=width * (persistent + (0 if offloads_weights else shard)),  # zero.Init puts shards where they stay
        host=host,
        disk=(MASTER_BYTES + MOMENTS_BYTES + 4) * trained if on_disk else 0,  # gradients too
        overlaps=bool(zero.overlap_comm),
    )


def offload_target(offload: Any) -> str:
    """none, cpu or nvme, of one of DeepSpeed's offload sections."""
    device = getattr(offload, "device", None) or "none"
    return str(getattr(device, "value", device))


def _pinned(size: int, offload: Any, on_gpu: bool, parts: int = 1) -> int:
    """Host memory that is page-locked: CachingHostAllocator rounds each block up to a power of two."""
    if not (on_gpu and getattr(offload, "pin_memory", False)) or size < parts:
        return size
    return parts * 2 ** math.ceil(math.log2(size / parts))
