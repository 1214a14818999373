"""Weights of other processes that ZeRO-3 holds during the passes (partitioned_param_coordinator.py).

A weight is fetched before its module runs, and more are fetched ahead: as many as stage3_prefetch_bucket_size holds.
After the forward pass it is kept if its backward pass is nearer than stage3_max_reuse_distance elements: up to half a
billion weights all are gathered at the end of the forward pass, and the backward pass releases layer after layer.

That holds for classifiers and for the full loss. A loss in chunks is checked before training by forward passes alone
(train/model/preflight.py), and DeepSpeed remembers for each module what is released after it (lru_cache of
__params_to_release): then each layer is released as soon as it has run, and one layer, more or less, is fetched ahead.
"""

from typing import Any

from train.tools.plan.steps import Step
from train.tools.plan.weights import Weights, number_of

AFTER = "backward of after"  # of head and loss


class Gathered:
    """
    Args:
        width: bytes of a weight.
        keeps: layers are kept between their forward and their backward pass.
    """

    def __init__(self, weights: Weights, zero: Any, width: int, keeps: bool = True):
        threshold = int(zero.param_persistence_threshold)
        sharded = [weight for weight in weights.all if weight.size > threshold]
        self.width, self.total = width, sum(weight.size for weight in sharded)
        self.layers: dict[tuple[str, int], int] = {}
        for weight in sharded:
            for stack in weights.stacks:
                if weight.name.startswith(f"{stack}."):
                    place = stack, number_of(weight.name, stack)
                    self.layers[place] = self.layers.get(place, 0) + weight.size
        self.others = self.total - sum(self.layers.values())  # embeddings and head
        self.head = sum(weight.size for weight in sharded if weight.name == weights.head)
        self.keeps, self.ahead = keeps, min(self.total, int(zero.prefetch_bucket_size))
        if not keeps:
            self.ahead = max(self.layers.values(), default=self.ahead)
        near = min(self.total, int(zero.max_reuse_distance) // 2, int(zero.max_live_parameters))
        self.kept = near if keeps else min(near, self.others)  # from the forward to the backward pass
        self.most = min(self.total, near + max(weights.layer, weights.largest) + self.ahead)

    @property
    def most_bytes(self) -> int:
        """The most that is gathered at once."""
        layers = self.total if self.keeps else self.others + 2 * max(self.layers.values(), default=0)
        return self.width * min(self.most, layers)

    def begin(self) -> None:
        """A forward pass begins."""
        self.now, self.place = self.others - self.head, None

    def at(self, step: Step) -> int:
        """Bytes during a step; call it for each step of a pass, in order."""
        place = step.place or step.name
        if not self.keeps:
            now = self.others - (self.head if step.phase == "forward" else 0)
            return self.width * min(self.most, now + self.layers.get(place, 0) + self.ahead)
        if step.phase == "loss":
            self.now, place = self.total, None
        elif place != self.place and step.phase == "forward":
            self.now += self.layers.get(place, 0)
        elif place != self.place:
            self.now -= self.layers.get(self.place, self.head if self.place == AFTER else 0)
        self.place = place
        ahead = self.ahead if step.phase == "forward" else 0
        return self.width * min(self.most, self.now + ahead, self.total)
