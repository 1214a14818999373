"""The memory that a strategy holds on a device and on the host: weights, optimizer, buffers, gathered weights, the
optimizer's step, and gradients while the backward pass completes them one after another.

Sources: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py and stage3.py, read with the resolved configuration;
zerofit/strategy/engines.py for DDP and one process. Sizes are in bytes, of the process that holds the most.
"""

import bisect
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from zerofit.estimate.allocations import ModuleVisit
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

Visits = tuple[ModuleVisit | None, ...]  # the visit that each step begins with
Releases = dict[tuple[str, int], frozenset[str]]  # {(module, number of visits before it): weights released after it}


@dataclass(frozen=True)
class GatheredWeights:
    """The settings by which ZeRO-3's coordinator fetches and releases other ranks' weights. Sizes are in elements.

    The rules are those of DeepSpeed 0.19: runtime/zero/partitioned_param_coordinator.py (fetch_sub_module,
    release_sub_module), and the buffers of a handle in partition_parameters.py (_all_gather_sequential,
    _all_gather_dtype).

    Each visit to a module fetches at least one weight ahead, even if the module has no direct weights, so the fetched
    weights grow layer by layer, up to stage3_max_live_parameters.

    Before training, a loss in chunks is checked by forward passes alone (zerofit/model/preflight.py), and DeepSpeed
    remembers for each module what is released after it (lru_cache of __params_to_release): then layers are released
    as soon as they have run, during the whole run. Classifiers and models with the full loss have no such check,
    and keep a layer that is needed again within stage3_max_reuse_distance.
    """

    sizes: tuple[tuple[str, int], ...]  # (name, size) of each weight
    frozen: frozenset[str]  # names of weights that are not trained
    width: int  # bytes of an element
    world_size: int
    keeps: bool  # True if layers are kept: training was not preceded by forward passes alone
    shards_copied: bool  # True if shards are on the host, and copied to the device while a weight is fetched
    threshold: int  # weights up to this size are not sharded
    ahead: int  # minimum that is fetched ahead at each visit
    live: int  # maximum of live weights: nothing is fetched ahead beyond it
    reuse: int  # a weight that is needed again within this distance is kept

    def follow(self, training: list[TracedStep], evaluation: list[TracedStep] | None = None) -> list[tuple[int, int]]:
        """Return (peak bytes during the visit at its start, bytes after that visit) for each step of a pass.

        Args:
            training: a forward and backward pass, whose order DeepSpeed has recorded.
            evaluation: a forward pass, which is followed instead of the training pass.
        """
        known = tuple(step.visit for step in training)
        return _held(self, known, known if evaluation is None else tuple(step.visit for step in evaluation))[0]

    def blocks(self, training: list[TracedStep]) -> list[int]:
        """Return the bytes that a training pass gathers, and (negative) releases, block by block."""
        known = tuple(step.visit for step in training)
        return _held(self, known, known)[1]


@dataclass
class AllGatherHandle:
    """An all-gather. One weight is gathered in place; several are gathered into a flat buffer, and copied from it."""

    weights: list[str]
    extra: int  # elements that it holds in addition to the weights
    waiting: int  # number of weights whose module has not been visited yet
    arrived: bool = False


class RecordedPass:
    """Simulates a pass whose order of visits DeepSpeed has recorded in an earlier pass.

    Args:
        known: the visits of the earlier pass.
        remembered: decisions of DeepSpeed that stay from earlier passes.
    """

    def __init__(self, known: list[ModuleVisit], rules: GatheredWeights, remembered: Releases):
        self.rules = rules
        self.remembered = remembered
        self.sizes = sizes = dict(rules.sizes)
        self.decided: Releases = {}
        order = [visit for visit in known if visit.enters]
        self.queue = deque((weight, place) for place, visit in enumerate(order) for weight in visit.weights)
        self.places: dict[str, list[int]] = {}
        for weight, place in self.queue:
            self.places.setdefault(weight, []).append(place)
        fetched = (sum(sizes[weight] for weight in visit.weights) for visit in order)
        self.distance = [*itertools.accumulate(fetched, initial=0)]
        self.persistent = {name for name, size in sizes.items() if size <= rules.threshold}
        self.here = set(self.persistent)
        self.users: dict[str, set[str]] = {name: set() for name in sizes}
        self.handles: dict[str, AllGatherHandle] = {}
        self.recent: dict[str, int] = {}  # the last place for which a weight was taken from the queue
        self.views: dict[str, int] = {}  # sizes of released weights whose views stay until their backward pass is done
        self.backward: dict[str, set[str]] = {}  # {module in its backward pass: frozen weights for recomputation}
        self.blocks: list[int] = []  # allocated, and (negative) freed, in order
        self.step = self.live = self.held = 0

    def at(self, visit: ModuleVisit) -> int:
        """Simulate a visit. Returns the maximum of `held` during it; afterwards `held` has the present value."""
        return self._fetch(visit) if visit.enters else self._release(visit)

    def _fetch(self, visit: ModuleVisit) -> int:
        if not visit.forward:
            self.backward.setdefault(visit.module, set())
        self._gather([weight for weight in visit.weights if weight not in self.here and weight not in self.handles])
        peak = self.held
        for weight in visit.weights:
            self.users[weight].add(visit.module)
            if visit.forward and self.backward and weight in self.rules.frozen:
                owner = next(reversed(self.backward))
                self.backward[owner].add(weight)
                self.users[weight].add(owner)
            peak = max(peak, self._wait(weight))
        new_weights = {weight for weight in visit.weights if self.recent.get(weight, -1) < self.step}
        queued: set[str] = set()
        while self.queue and len(queued) < len(new_weights):
            weight, place = self.queue.popleft()
            self.recent[weight] = place
            queued.add(weight)
        self._fetch_ahead()
        self.step += 1
        return max(peak, self.held)

    def _fetch_ahead(self) -> None:
        max_size = min(self.rules.live - self.live, self.rules.ahead)
        size = 0
        chosen = []
        while self.queue and size < max_size:
            weight, place = self.queue.popleft()
            self.recent[weight] = max(self.recent.get(weight, -1), place)
            if weight not in self.here and weight not in self.handles and weight not in chosen:
                chosen.append(weight)
                size += self.sizes[weight]
        self._gather(chosen)

    def _gather(self, weights: list[str]) -> None:
        if not weights:
            return
        self.live += sum(self.sizes[weight] for weight in weights)
        shards = sum(-(-self.sizes[weight] // self.rules.world_size) for weight in weights)
        if self.rules.world_size == 1:  # a shard is all of its weight, and goes to the weight's place
            self._change(shards)
            extra = 0
        elif len(weights) == 1:
            self._change(self.sizes[weights[0]])
            extra = shards if self.rules.shards_copied else 0
        else:
            extra = shards * self.rules.world_size
        self._change(extra)
        handle = AllGatherHandle(weights, extra, len(weights))
        self.handles |= dict.fromkeys(weights, handle)

    def _wait(self, weight: str) -> int:
        """Wait for a weight's all-gather. Returns the maximum of `held` while it waits, in elements."""
        handle = self.handles.pop(weight, None)
        if handle is None:
            return self.held
        if not handle.arrived:
            handle.arrived = True
            self.here.update(handle.weights)
            if len(handle.weights) > 1 and self.rules.world_size > 1:
                for name in handle.weights:
                    self._change(self.sizes[name])
        peak = self.held
        handle.waiting -= 1
        if not handle.waiting:
            self._change(-handle.extra)
        return peak

    def _release(self, visit: ModuleVisit) -> int:
        peak = self.held
        key = (visit.module, self.step)
        released = self.remembered.get(key)
        if released is None:
            chosen = set()
            # __params_to_release: neither what was fetched for a later place, nor what is needed again soon.
            for weight in visit.weights:
                if weight in self.persistent or self.recent.get(weight, -1) > self.step:
                    continue
                places = self.places[weight]
                index = bisect.bisect_left(places, self.step)
                if index == len(places) or self.distance[places[index]] - self.distance[self.step] >= self.rules.reuse:
                    chosen.add(weight)
            released = self.decided[key] = frozenset(chosen)
        weights = set(visit.weights)
        if not visit.forward:
            recomputed = self.backward.pop(visit.module, set())
            weights = weights | recomputed
            released = released | (recomputed - self.persistent)
        for weight in weights:
            self.users[weight].discard(visit.module)
            if weight in released and weight in self.here and not self.users[weight]:
                self.here.remove(weight)
                self.live -= self.sizes[weight]
                if weight in visit.kept:
                    self.views[weight] = self.views.get(weight, 0) + self.sizes[weight]
                else:
                    self._change(-self.sizes[weight])
            if not visit.forward:
                self._change(-self.views.pop(weight, 0))
        return peak

    def _change(self, size: int) -> None:
        self.held += size
        self.blocks.append(size)


@functools.lru_cache(maxsize=64)
def _held(rules: GatheredWeights, known: Visits, visits: Visits) -> tuple[list[tuple[int, int]], list[int]]:
    order = [visit for visit in known if visit]
    remembered: Releases = {}
    if not rules.keeps:
        forward = [*itertools.takewhile(lambda visit: visit.forward, order)]
        forward_only = RecordedPass(forward, rules, {})
        for visit in forward:
            forward_only.at(visit)
        remembered = forward_only.decided
    run = RecordedPass(order, rules, remembered)
    held: list[tuple[int, int]] = []
    for current in visits:
        peak = run.at(current) if current else run.held
        held.append((rules.width * peak, rules.width * run.held))
    return held, [rules.width * size for size in run.blocks]


class GradientMemory:
    """The gradients of a single process: the backward pass allocates them, and later micro-batches add to them.

    Attributes:
        gradients: bytes of completed gradients.
        buffers: bytes of the buffers for their exchange.
        gathered: bytes of other ranks' weights.
    """

    def __init__(self, weights: Weights, width: int):
        self.sizes = weights.sizes
        self.width = width
        self.gradients = self.buffers = 0

    @property
    def gathered(self) -> int:
        return 0

    @property
    def held(self) -> int:
        return self.gradients + self.buffers + self.gathered

    def begin(self, first: bool, last: bool) -> None:
        """Start the backward pass of a micro-batch, which may be the first or the last one of an update."""
        self.first = first
        self.last = last
        if first:
            self.gradients = 0

    def enter(self, step: TracedStep) -> int:
        """Start a traced step. Returns the peak of the bytes that are held while it runs."""
        return self.held

    def complete(self, name: str) -> int:
        """Pass the completed gradient of a weight from the backward pass to the engine.

        Returns: the peak bytes held while it runs, temporaries included, without this gradient.
        """
        if not self.first:
            return self.held
        size = self.width * self.sizes[name]
        self.gradients += size
        return self.held - size  # it stays where backward has made it

    def finish(self) -> int:
        """End the backward pass. Returns the peak bytes held while it runs, temporaries included."""
        return self.held


class DdpGradients(GradientMemory):
    """The gradients of DDP: the buckets of all gradients stay allocated, and gradients are views of them."""

    def begin(self, first: bool, last: bool) -> None:
        self.first = False
        self.gradients = self.width * sum(self.sizes.values())


class BucketGradients(GradientMemory):
    """The gradients of ZeRO: they are collected in a bucket, which is reduced when the next gradient does not fit.

    This is a closed form of what DeepSpeed does weight by weight. A bucket of several gradients is copied as a whole
    to be reduced. ZeRO-1 keeps a gradient that is larger than the bucket until the pass ends, on every rank.

    Args:
        zero: DeepSpeed's DeepSpeedZeroConfig.
        kept: bytes of a micro-batch's gradients that this rank keeps, from its first reduction on; 0: they are counted
            among the states, or offloaded.
        part_of: (elements of a gradient) -> elements that this rank offloads to the host; None: gradients are not
            offloaded.
    """

    def __init__(
        self, weights: Weights, zero: Any, width: int, kept: int, part_of: Callable[[int], int] | None = None
    ):
        super().__init__(weights, width)
        self.stage = int(zero.stage)
        self.kept = kept
        self.part_of = part_of
        self.capacity = width * int(zero.reduce_bucket_size)
        self.contiguous = bool(zero.contiguous_gradients or (part_of and self.stage < 3))
        has_buffer = self.contiguous and self.stage < 3  # ZeRO-3's buffer is counted among the states
        self.buffer = self.capacity * (2 if zero.overlap_comm else 1) if has_buffer else 0

    def begin(self, first: bool, last: bool) -> None:
        self.first = first
        self.last = last
        earlier = {1: self.width * sum(self.sizes.values()), 2: self.kept}  # bytes of earlier micro-batches, by stage
        self.gradients = 0 if first else earlier.get(self.stage, 0)
        self.buffers = 0 if first else self.buffers
        self.filled = self.count = self.largest = 0  # bytes, gradients, and elements of the largest in the bucket
        self.outside = 0  # bytes of gradients that are not in the bucket's buffer
        self.is_kept = False

    def complete(self, name: str) -> int:
        size = self.width * self.sizes[name]
        self.buffers = self.buffer
        if self.stage == 1 and not self.last:
            self.gradients += size * self.first
            return self.held
        if self.stage == 1 and not self.first:
            self.gradients -= size  # it goes into the bucket with what was accumulated
        peak = self._reduce() if self.filled and self.filled + size > self.capacity else self.held
        if self.part_of and self.stage < 3 and size > self.capacity:
            peak = max(peak, self.held + size)  # it is cloned
        outside = size if not self.contiguous or size > self.capacity else 0  # it stays where backward allocated it
        self.outside += outside
        self.gradients += outside
        self.filled = self.filled + size
        self.count = self.count + 1
        self.largest = max(self.largest, self.sizes[name])
        return max(peak, self.held - outside)

    def finish(self) -> int:
        if self.stage == 1 and not self.last:
            return self.held
        peak = self._reduce()
        self._release()
        self.buffers = 0
        return peak

    def _reduce(self) -> int:
        if not self.is_kept:
            self.is_kept = True
            self.gradients = self.gradients + self.kept
        copied = self.filled if self.count > 1 else 0
        peak = self.held + copied
        if self.part_of:  # temporaries while it is copied to the host
            wide = max(NORM_BYTES, MASTER_BYTES if self.width != MASTER_BYTES else 0) * self.last
            temporaries = self.width * self.part_of(self.largest) + copied if self.stage == 3 else 0
            peak = max(peak, self.held + temporaries + wide * self.part_of(self.largest))
        if self.stage > 1 or not self.contiguous:
            self._release()
        self.filled = self.count = self.largest = 0
        return peak

    def _release(self) -> None:
        self.gradients = self.gradients - self.outside
        self.outside = 0


@dataclass(frozen=True)
class ModelStates:
    """The model states under one strategy, and the memory of its engine in each phase, in bytes. `weights`,
    `optimizer`, `gradients` and `buffers` are always on the device."""

    weights: int
    optimizer: int
    # makes the model of the gradients in a backward pass, for the rank that keeps most of them
    engine: Callable[[], GradientMemory]
    gradients: int = 0
    buffers: int = 0
    gathered: GatheredWeights | None = None  # other processes' weights during the passes; None: there are none
    # on the device during the optimizer's step, in addition to weights and optimizer: the maximum during the step
    step: dict[str, int] = field(default_factory=dict)
    # on the device while the engine is made, when nothing else is there. ZeRO-1 and 2 flatten the weights into a copy
    # on the device if it has room for that, and otherwise on the host: the copy does not decide what fits
    load: int = 0
    host: dict[str, int] = field(default_factory=dict)  # on the host, for this process
    disk: int = 0  # on a disk of the machine, for this process; without checkpoints
    overlaps: bool = False  # True if weights are gathered, and gradients reduced, on separate streams
    late: tuple[int, ...] = ()  # tensors of `optimizer` that the first step allocates, after activations were freed
    gradients_each: bool = False  # True if each weight's gradient is a separate tensor until the step

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
) -> ModelStates:
    """Return the states of DDP, with its buckets, or of a single process, whose backward pass allocates gradients."""
    width = trained_dtype.itemsize
    weight_bytes = width * weights.trained + weights.frozen_bytes(frozen_dtype)
    workspaces = [0 if on_gpu else NORM_BYTES, ADAFACTOR_BYTES if optim == "adafactor" else 0]
    engine_class = DdpGradients if world_size > 1 else GradientMemory
    late = weights.late_states(lambda weight: weight.size)
    adam_share = weights.state_bytes(optim) / max(1, sum(late))
    return ModelStates(
        weights=weight_bytes,
        optimizer=weights.state_bytes(optim),
        engine=lambda: engine_class(weights, width),
        step={"gradients": width * weights.trained, "workspace": max(workspaces) * weights.largest},
        load=weight_bytes,
        late=tuple(int(adam_share * size) for size in late),
        gradients_each=world_size == 1,
    )


def first_stages_states(
    weights: Weights, zero: Any, world_size: int, dtype: torch.dtype, accumulates: bool, *, on_gpu: bool
) -> ModelStates:
    """Return the states of ZeRO-1 or ZeRO-2 (stage_1_and_2.py).

    Args:
        zero: DeepSpeed's DeepSpeedZeroConfig of the resolved configuration: defaults are DeepSpeed's.
        accumulates: True if an update has more than one micro-batch.
    """
    width = dtype.itemsize
    groups = [FlatGroup(group, world_size) for group in weights.groups]
    shards = [group.partition for group in groups]
    shard = sum(shards)
    offload = zero.offload_optimizer
    all_kept = kept_by_rank(groups, weights.sizes)
    fullest = max(all_kept, key=all_kept.__getitem__)
    offloads = offload_target(offload) != "none"
    kept = 0 if offloads else width * all_kept[fullest]  # grads_in_partition
    weight_bytes = width * shard * world_size + weights.frozen_bytes(dtype)

    def part_of(size: int) -> int:
        return min(size, max(shards))

    optimizer = MASTER_BYTES * shard + sum(group.moments_bytes * group.partition for group in groups)
    common: dict[str, Any] = {
        "weights": weight_bytes,
        "load": weight_bytes,
        "engine": lambda: BucketGradients(weights, zero, width, kept, part_of if offloads else None),
        "overlaps": bool(zero.overlap_comm),
    }
    if offloads:
        host = {
            "optimizer": _pinned(optimizer, offload, on_gpu, parts=3),
            "gradients": _pinned(4 * shard, offload, on_gpu) + (width * shard if accumulates else 0),
            "buffers": _pinned(width * (shard + weights.largest), offload, on_gpu),
        }
        return ModelStates(optimizer=0, buffers=width * weights.largest, host=host, **common)
    # Step by step: norms in fp64; each group's gradients in a flat copy, and another copy in fp32.
    slices = [size for group in groups for parts in group.parts.values() for rank, size in parts if rank == fullest]
    moments = [NORM_BYTES * max(slices, default=0)]
    moments += [width * size + (MASTER_BYTES * size if width != MASTER_BYTES else 0) for size in shards]
    if not on_gpu:  # gloo gathers into a separate tensor, after gradients are freed
        moments.append(width * max(shards) * world_size - kept)
    return ModelStates(
        optimizer=optimizer,
        step={"gradients": kept, "workspace": max(moments)},
        **common,
    )


def third_stage_states(
    weights: Weights, zero: Any, world_size: int, width: int, on_gpu: bool, *, keeps_layers: bool
) -> ModelStates:
    """Return the states of ZeRO-3 (stage3.py). `keeps_layers`: as `keeps` of GatheredWeights."""

    def part_of(size: int) -> int:
        return -(-size // world_size)

    def shard_of(group: Iterable[Weight]) -> int:
        return sum(part_of(weight.size) for weight in group)

    groups = [shard_of(group) for group in weights.groups]
    shard = shard_of(weights.all)
    trained = sum(groups)
    optimizer = sum((MASTER_BYTES + group[0].moments_bytes) * size for group, size in zip(weights.groups, groups))
    offloads_weights = offload_target(zero.offload_param) != "none"
    copies = world_size > 1 or offloads_weights  # a single rank reads its shards in place (_no_gather_coalesced)
    threshold = int(zero.param_persistence_threshold) if copies else 0  # weights up to this size are never sharded
    gathered = None
    if copies:
        gathered = GatheredWeights(
            sizes=tuple((weight.name, weight.size) for weight in weights.all),
            frozen=frozenset(weight.name for weight in weights.all if not weight.trained),
            width=width,
            world_size=world_size,
            keeps=keeps_layers,
            shards_copied=offloads_weights,
            threshold=threshold,
            ahead=int(zero.prefetch_bucket_size),
            live=int(zero.max_live_parameters),
            reuse=int(zero.max_reuse_distance),
        )
    persistent = sum(weight.size for weight in weights.all if weight.size <= threshold)
    offloads = offload_target(zero.offload_optimizer) != "none"
    wide = 0 if width == MASTER_BYTES else MASTER_BYTES  # gradients of the step in fp32
    host: dict[str, int] = {}
    if offloads_weights:
        host["weights"] = _pinned(width * shard, zero.offload_param, on_gpu)
    largest = part_of(weights.largest)
    on_disk = offload_target(zero.offload_optimizer) == "nvme"
    if on_disk:  # buffers of what is swapped in at a time, as many as a sub-group has tensors (SwapBufferManager)
        swapped_in = min(int(zero.sub_group_size) + largest, max(groups, default=0))
        host["optimizer"] = int(zero.offload_optimizer.buffer_count) * MASTER_BYTES * swapped_in
        host["gradients"] = _pinned(width * trained, zero.offload_optimizer, on_gpu)
    elif offloads:
        host["optimizer"] = _pinned(optimizer, zero.offload_optimizer, on_gpu, 3)
        host["gradients"] = _pinned((4 + width) * trained, zero.offload_optimizer, on_gpu, 2)
    ranks_per_copy = int(zero.zero_hpz_partition_size)  # ZeRO++'s copies: _partition_param_sec
    secondary = sum(-(-weight.size // ranks_per_copy) for weight in weights.all) if ranks_per_copy > 1 else 0
    gradients = 0 if offloads else width * trained
    sub_group = max((min(int(zero.sub_group_size), group) for group in groups), default=0)
    return ModelStates(
        weights=width * (persistent + secondary + (0 if offloads_weights else shard)),
        optimizer=0 if offloads else optimizer,
        engine=lambda: BucketGradients(weights, zero, width, 0, part_of if offloads else None),
        gradients=gradients,
        buffers=width * int(zero.reduce_bucket_size) if zero.contiguous_gradients else 0,
        gathered=gathered,
        step={} if offloads else {"workspace": max(NORM_BYTES * largest, (width + wide) * sub_group)},
        load=width * (persistent + (0 if offloads_weights else shard)),  # zero.Init allocates shards where they stay
        host=host,
        disk=(MASTER_BYTES + MOMENTS_BYTES + 4) * trained if on_disk else 0,  # gradients too
        overlaps=bool(zero.overlap_comm),
    )


def offload_target(offload: Any) -> str:
    """Return the device of one of DeepSpeed's offload sections: none, cpu or nvme."""
    device = getattr(offload, "device", None) or "none"
    return str(getattr(device, "value", device))


def pinned_bytes(sizes: list[int]) -> int:
    """Return the bytes of page-locked memory: torch rounds each block up to a power of two (CachingHostAllocator)."""
    return sum(1 << (size - 1).bit_length() for size in sizes)


def _pinned(size: int, offload: Any, on_gpu: bool, parts: int = 1) -> int:
    """Return the bytes of host memory that a size takes in blocks, page-locked where DeepSpeed is told so."""
    if not (on_gpu and getattr(offload, "pin_memory", False)) or size < parts:
        return size
    return pinned_bytes(parts * [math.ceil(size / parts)])
