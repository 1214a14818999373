"""Weights of other processes that ZeRO-3 holds during the passes, as its coordinator decides.

The decisions are those of DeepSpeed 0.19: runtime/zero/partitioned_param_coordinator.py (fetch_sub_module,
release_sub_module), and what a handle of partition_parameters.py holds (_all_gather_sequential, _all_gather_dtype).

Each visit of a module fetches at least one weight ahead, also where the module has no weight of its own, so what is
fetched ahead grows layer by layer, up to stage3_max_live_parameters.

Before training, a loss in chunks is checked by forward passes alone (zerofit/model/preflight.py), and DeepSpeed
remembers for each module what is released after it (lru_cache of __params_to_release): then layers are released as
soon as they have run, for the rest of the run. Classifiers and models with the full loss have no such check, and keep
a layer that is needed again within stage3_max_reuse_distance.
"""

import bisect
import functools
import itertools
from dataclasses import dataclass
from typing import Any

from zerofit.estimate.allocations import Visit
from zerofit.estimate.traced_steps import TracedStep
from zerofit.estimate.weights import Weights

Visits = tuple[Visit | None, ...]  # that steps begin with


@dataclass(frozen=True)
class GatheredWeights:
    """Other ranks' weights that ZeRO-3 holds during a pass: what its coordinator decides by. Sizes are in elements."""

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

    @classmethod
    def of(
        cls, weights: Weights, zero: Any, width: int, world_size: int, *, keeps: bool, shards_copied: bool
    ) -> "GatheredWeights":
        return cls(
            sizes=tuple((weight.name, weight.size) for weight in weights.all),
            frozen=frozenset(weight.name for weight in weights.all if not weight.trained),
            width=width,
            world_size=world_size,
            keeps=keeps,
            shards_copied=shards_copied,
            threshold=int(zero.param_persistence_threshold),
            ahead=int(zero.prefetch_bucket_size),
            live=int(zero.max_live_parameters),
            reuse=int(zero.max_reuse_distance),
        )

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
        self.rules, self.remembered = rules, remembered
        self.sizes = sizes = dict(rules.sizes)
        self.decided: dict[tuple[str, int], frozenset[str]] = {}
        order = [visit for visit in known if visit.enters]
        self.queue = [(weight, place) for place, visit in enumerate(order) for weight in visit.weights]
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
        self.next = self.step = self.live = self.held = 0

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
        while self.next < len(self.queue) and len(passed) < len(fresh):
            weight, self.recent[weight] = self._pop()
            passed.add(weight)
        self._fetch_ahead()
        self.step += 1
        return max(most, self.held)

    def _pop(self) -> tuple[str, int]:
        self.next += 1
        return self.queue[self.next - 1]

    def _fetch_ahead(self) -> None:
        most, size, chosen = min(self.rules.live - self.live, self.rules.ahead), 0, []
        while self.next < len(self.queue) and size < most:
            weight, place = self._pop()
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
        most, key = self.held, (visit.module, self.step)
        released = self.remembered.get(key)
        if released is None:
            released = self.decided[key] = self._decide(visit)
        weights = set(visit.weights)
        if not visit.forward:
            again = self.backward.pop(visit.module, set())
            weights, released = weights | again, released | (again - self.persistent)
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

    def _decide(self, visit: Visit) -> frozenset[str]:
        """__params_to_release: not what was fetched for a later place, and not what is needed again soon."""
        released = set()
        for weight in visit.weights:
            if weight in self.persistent or self.recent.get(weight, -1) > self.step:
                continue
            places = self.places[weight]
            at = bisect.bisect_left(places, self.step)
            if at == len(places) or self.distance[places[at]] - self.distance[self.step] >= self.rules.reuse:
                released.add(weight)
        return frozenset(released)


@functools.lru_cache(maxsize=64)
def _held(rules: GatheredWeights, known: Visits, visits: Visits) -> tuple[list[tuple[int, int]], list[int]]:
    order, remembered = [visit for visit in known if visit], dict[tuple[str, int], frozenset[str]]()
    if not rules.keeps:
        forward = [*itertools.takewhile(lambda visit: visit.forward, order)]
        alone = KnownPass(forward, rules, {})
        for visit in forward:
            alone.at(visit)
        remembered = alone.decided
    run, held = KnownPass(order, rules, remembered), list[tuple[int, int]]()
    for met in visits:
        most = run.at(met) if met else run.held
        held.append((rules.width * most, rules.width * run.held))
    return held, [rules.width * size for size in run.blocks]
