"""The memory that a strategy keeps on a device and on the host: weights, optimizer, buffers, gathered weights, its
step, and its gradients while they are completed one after another.

Sources: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py and stage3.py, read with the resolved configuration;
zerofit/strategy/engines.py for DDP and one process. Sizes are in bytes of one process, the one that holds most.
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

from zerofit.estimate.allocations import Visit
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

Visits = tuple[Visit | None, ...]  # that steps begin with


@dataclass(frozen=True)
class GatheredWeights:
    """Other ranks' weights that ZeRO-3 holds during a pass: what its coordinator decides by. Sizes are in elements.

    The decisions are those of DeepSpeed 0.19: runtime/zero/partitioned_param_coordinator.py (fetch_sub_module,
    release_sub_module), and what a handle of partition_parameters.py holds (_all_gather_sequential,
    _all_gather_dtype).

    Each visit of a module fetches at least one weight ahead, also where the module has no weight of its own, so what
    is fetched ahead grows layer by layer, up to stage3_max_live_parameters.

    Before training, a loss in chunks is checked by forward passes alone (zerofit/model/preflight.py), and DeepSpeed
    remembers for each module what is released after it (lru_cache of __params_to_release): then layers are released
    as soon as they have run, for the rest of the run. Classifiers and models with the full loss have no such check,
    and keep a layer that is needed again within stage3_max_reuse_distance.
    """

    sizes: tuple[tuple[str, int], ...]  # the name of each weight, and its size
    frozen: frozenset[str]  # names of weights that are not trained
    width: int  # bytes of an element
    world_size: int
    keeps: bool  # layers, where training was not preceded by forward passes alone
    shards_copied: bool  # shards are on the host, and a copy is on the device while a weight is fetched
    threshold: int  # weights up to this size are not sharded
    ahead: int  # fetched ahead at each visit, at least
    live: int  # nothing is fetched ahead beyond so much
    reuse: int  # a weight that is needed again within this distance is kept

    def follow(self, training: list[TracedStep], evaluation: list[TracedStep] | None = None) -> list[tuple[int, int]]:
        """Return (the most bytes at the visit that it begins with, bytes after that) for each step of a pass.

        Args:
            training: a forward and backward pass, whose order DeepSpeed has recorded.
            evaluation: a forward pass; follow it in place of the training pass.
        """
        known = tuple(step.visit for step in training)
        return _held(self, known, known if evaluation is None else tuple(step.visit for step in evaluation))[0]

    def blocks(self, training: list[TracedStep]) -> list[int]:
        """Bytes of what a training pass gathers, and (negative) releases, block by block."""
        known = tuple(step.visit for step in training)
        return _held(self, known, known)[1]


@dataclass
class Handle:
    """An all-gather: of one weight into its own place; of several into a flat buffer, from which each is copied."""

    weights: list[str]
    extra: int  # that it holds beside the weights
    waiting: int  # weights whose module has not come yet
    arrived: bool = False


class KnownPass:
    """A pass in the order of an earlier one.

    Args:
        known: the visits of the earlier one.
        remembered: {(module, visits before it): what is released after it}, where that was decided earlier.
    """

    def __init__(self, known: list[Visit], rules: GatheredWeights, remembered: dict[tuple[str, int], frozenset[str]]):
        self.rules = rules
        self.remembered = remembered
        self.sizes = sizes = dict(rules.sizes)
        self.decided: dict[tuple[str, int], frozenset[str]] = {}
        order = [visit for visit in known if visit.enters]
        self.queue = deque((weight, place) for place, visit in enumerate(order) for weight in visit.weights)
        self.places: dict[str, list[int]] = {}
        for weight, place in self.queue:
            self.places.setdefault(weight, []).append(place)
        self.distance = [*itertools.accumulate((sum(sizes[one] for one in v.weights) for v in order), initial=0)]
        self.persistent = {name for name, size in sizes.items() if size <= rules.threshold}
        self.here = set(self.persistent)
        self.users: dict[str, set[str]] = {name: set() for name in sizes}
        self.handles: dict[str, Handle] = {}
        self.recent: dict[str, int] = {}  # the last place for which a weight was taken from the queue
        self.views: dict[str, int] = {}  # held of weights that were released, until their backward pass is done
        self.backward: dict[str, set[str]] = {}  # modules in their backward pass: frozen weights, computed with again
        self.blocks: list[int] = []  # taken, and (negative) given back, in order
        self.step = self.live = self.held = 0

    def at(self, visit: Visit) -> int:
        """Go through a visit. Returns the most that is held meanwhile; `held` is what is held then."""
        return self._fetch(visit) if visit.enters else self._release(visit)

    def _fetch(self, visit: Visit) -> int:
        if not visit.forward:
            self.backward.setdefault(visit.module, set())
        self._gather([weight for weight in visit.weights if weight not in self.here and weight not in self.handles])
        most = self.held
        for weight in visit.weights:
            self.users[weight].add(visit.module)
            if visit.forward and self.backward and weight in self.rules.frozen:
                owner = next(reversed(self.backward))
                self.backward[owner].add(weight)
                self.users[weight].add(owner)
            most = max(most, self._wait(weight))
        fresh = {one for one in visit.weights if self.recent.get(one, -1) < self.step}
        passed: set[str] = set()
        while self.queue and len(passed) < len(fresh):
            weight, place = self.queue.popleft()
            self.recent[weight] = place
            passed.add(weight)
        self._fetch_ahead()
        self.step += 1
        return max(most, self.held)

    def _fetch_ahead(self) -> None:
        most = min(self.rules.live - self.live, self.rules.ahead)
        size = 0
        chosen = []
        while self.queue and size < most:
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
        handle = Handle(weights, extra, len(weights))
        self.handles |= dict.fromkeys(weights, handle)

    def _wait(self, weight: str) -> int:
        """Wait for a weight's all-gather. Returns the most bytes that are held meanwhile."""
        handle = self.handles.pop(weight, None)
        if handle is None:
            return self.held
        if not handle.arrived:
            handle.arrived = True
            self.here.update(handle.weights)
            if len(handle.weights) > 1 and self.rules.world_size > 1:
                for one in handle.weights:
                    self._change(self.sizes[one])
        most = self.held
        handle.waiting -= 1
        if not handle.waiting:
            self._change(-handle.extra)
        return most

    def _release(self, visit: Visit) -> int:
        most = self.held
        key = (visit.module, self.step)
        released = self.remembered.get(key)
        if released is None:
            chosen = set()
            # __params_to_release: neither what was fetched for a later place, nor what is needed again soon.
            for weight in visit.weights:
                if weight in self.persistent or self.recent.get(weight, -1) > self.step:
                    continue
                places = self.places[weight]
                at = bisect.bisect_left(places, self.step)
                if at == len(places) or self.distance[places[at]] - self.distance[self.step] >= self.rules.reuse:
                    chosen.add(weight)
            released = self.decided[key] = frozenset(chosen)
        weights = set(visit.weights)
        if not visit.forward:
            again = self.backward.pop(visit.module, set())
            weights = weights | again
            released = released | (again - self.persistent)
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
        return most

    def _change(self, size: int) -> None:
        self.held += size
        self.blocks.append(size)


@functools.lru_cache(maxsize=64)
def _held(rules: GatheredWeights, known: Visits, visits: Visits) -> tuple[list[tuple[int, int]], list[int]]:
    order = [visit for visit in known if visit]
    remembered: dict[tuple[str, int], frozenset[str]] = {}
    if not rules.keeps:
        forward = [*itertools.takewhile(lambda visit: visit.forward, order)]
        alone = KnownPass(forward, rules, {})
        for visit in forward:
            alone.at(visit)
        remembered = alone.decided
    run = KnownPass(order, rules, remembered)
    held: list[tuple[int, int]] = []
    for met in visits:
        most = run.at(met) if met else run.held
        held.append((rules.width * most, rules.width * run.held))
    return held, [rules.width * size for size in run.blocks]


class GradientMemory:
    """Gradients as a single process has them: backward makes them, and later micro-batches are added to them.

    Attributes:
        gradients: held of completed gradients.
        buffers: held for their exchange.
        gathered: held of other ranks' weights.
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
        self.first = False
        self.gradients = self.width * sum(self.sizes.values())


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
        self.stage = int(zero.stage)
        self.kept = kept
        self.part_of = part_of
        self.capacity = width * int(zero.reduce_bucket_size)
        self.contiguous = bool(zero.contiguous_gradients or (part_of and self.stage < 3))
        has_buffer = self.contiguous and self.stage < 3  # that of ZeRO-3 is among the states
        self.buffer = self.capacity * (2 if zero.overlap_comm else 1) if has_buffer else 0

    def begin(self, first: bool, last: bool) -> None:
        self.first = first
        self.last = last
        earlier = {1: self.width * sum(self.sizes.values()), 2: self.kept}  # of the micro-batches before
        self.gradients = 0 if first else earlier.get(self.stage, 0)
        self.buffers = 0 if first else self.buffers
        self.filled = self.count = self.largest = 0  # bytes, gradients, and elements of the largest in the bucket
        self.own = 0  # bytes of gradients that do not lie in its buffer
        self.is_kept = False

    def complete(self, name: str) -> int:
        size = self.width * self.sizes[name]
        self.buffers = self.buffer
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
        self.filled = self.filled + size
        self.count = self.count + 1
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
            self.is_kept = True
            self.gradients = self.gradients + self.kept
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
        self.gradients = self.gradients - self.own
        self.own = 0


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
    shard = sum(shards)
    offload = zero.offload_optimizer
    all_kept = kept_by_rank(groups, weights.sizes)
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
    """ZeRO-3 (stage3.py), which may keep layers between their forward and their backward pass (`GatheredWeights`)."""

    def part_of(size: int) -> int:
        return -(-size // world_size)

    def shard_of(group: Iterable[Weight]) -> int:
        return sum(part_of(weight.size) for weight in group)

    groups = [shard_of(group) for group in weights.groups]
    shard = shard_of(weights.all)
    trained = sum(groups)
    optimizer = sum((MASTER_BYTES + group[0].moments_bytes) * size for group, size in zip(weights.groups, groups))
    offloads_weights = offload_target(zero.offload_param) != "none"
    copies = world_size > 1 or offloads_weights  # alone, a rank reads its shards in place (_no_gather_coalesced)
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
        gathered=gathered,
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
