"""Weights of other processes that ZeRO-3 holds during the passes, as DeepSpeed's coordinator decides (coordinator.py).

Each visit of a module fetches at least one weight ahead, also where the module has no weight of its own, so what is
fetched ahead grows layer by layer, up to stage3_max_live_parameters.

Before training, a loss in chunks is checked by forward passes alone (zerofit/model/preflight.py), and DeepSpeed
remembers for each module what is released after it (lru_cache of __params_to_release): then layers are released as
soon as they have run, for the rest of the run. Classifiers and models with the full loss have no such check, and keep
a layer that is needed again within stage3_max_reuse_distance.
"""

import functools
import itertools
from typing import Any

from zerofit.estimate.module_visits import Visit
from zerofit.estimate.traced_steps import TracedStep
from zerofit.estimate.weights import Weights
from zerofit.estimate.zero3_coordinator import FetchRules, KnownPass

Visits = tuple[Visit | None, ...]  # that steps begin with


class GatheredWeights:
    """
    Args:
        width: bytes of a weight.
        keeps: training was not preceded by forward passes alone.
        offloads: shards are on the host.
    """

    def __init__(self, weights: Weights, zero: Any, width: int, world_size: int, keeps: bool, offloads: bool):
        self.width, self.keeps = width, keeps
        self.sizes = tuple((weight.name, weight.size) for weight in weights.all)
        self.frozen = frozenset(weight.name for weight in weights.all if not weight.trained)
        self.rules = FetchRules(
            int(zero.param_persistence_threshold), int(zero.prefetch_bucket_size), int(zero.max_live_parameters),
            int(zero.max_reuse_distance), world_size, offloads,
        )  # fmt: skip

    def follow(self, training: list[TracedStep], evaluation: list[TracedStep] | None = None) -> list[tuple[int, int]]:
        """For each step of a pass: (the most bytes at the visit that it begins with, bytes after that).

        Args:
            training: a forward and backward pass, whose order DeepSpeed has recorded.
            evaluation: a forward pass; follow it in place of the training pass.
        """
        known = tuple(step.visit for step in training)
        visits = known if evaluation is None else tuple(step.visit for step in evaluation)
        return _held(known, visits, self.sizes, self.frozen, self.rules, self.keeps, self.width)[0]

    def blocks(self, training: list[TracedStep]) -> list[int]:
        """Bytes of what a training pass gathers, and (negative) releases, block by block."""
        known = tuple(step.visit for step in training)
        return _held(known, known, self.sizes, self.frozen, self.rules, self.keeps, self.width)[1]


@functools.lru_cache(maxsize=64)
def _held(
    known: Visits, visits: Visits, sizes: tuple[tuple[str, int], ...], frozen: frozenset[str], rules: FetchRules,
    keeps: bool, width: int,
) -> tuple[list[tuple[int, int]], list[int]]:  # fmt: skip
    by_name, order = dict(sizes), [visit for visit in known if visit]
    remembered: dict[tuple[str, int], frozenset[str]] = {}
    if not keeps:
        forward = [*itertools.takewhile(lambda visit: visit.forward, order)]
        alone = KnownPass(forward, by_name, frozen, rules, {})
        for visit in forward:
            alone.at(visit)
        remembered = alone.decided
    run = KnownPass(order, by_name, frozen, rules, remembered)
    held: list[tuple[int, int]] = []
    for met in visits:
        most = run.at(met) if met else run.held
        held.append((width * most, width * run.held))
    return held, [width * size for size in run.blocks]
