"""The passes of a model of which every N-th layer is recomputed, put together from two traces: each layer's steps are
those of the trace that recomputes every layer, or those of the one that recomputes none."""

import itertools
from dataclasses import dataclass

import torch

from zerofit.estimate.traced_steps import TracedStep
from zerofit.estimate.tracer import Tracer
from zerofit.model.recomputation import count_layers


@dataclass(frozen=True, eq=False)
class EveryNth:
    """Stands for a Tracer.

    Args:
        again: traces a model that recomputes every layer.
        kept: traces one that recomputes none.
        every: N.
    """

    again: Tracer
    kept: Tracer
    every: int

    @property
    def traced_sizes(self) -> list[int]:
        return self.again.traced_sizes

    @property
    def largest_traced(self) -> int:
        return self.again.largest_traced

    def steps(self, batch_size: int, layers: int | None = None) -> list[TracedStep]:
        """As Tracer.steps."""
        first = first_layers(self.again.full, self.again.stacks)
        steps, live = [], 0
        both = zip(_parts(self.again.steps(batch_size, layers)), _parts(self.kept.steps(batch_size, layers)),
                   strict=True)  # fmt: skip
        for (_, place, again), (_, _, kept) in both:
            is_kept = place is not None and (first[place[0]] + place[1]) % self.every
            for step in kept if is_kept else again:
                end = live + step.end - step.start
                steps.append(step._replace(start=live, end=end))
                live = end
        return steps


def first_layers(model: torch.nn.Module, stacks: dict[str, int]) -> dict[str, int]:
    """{name of a stack: the number of its first layer}, as zerofit/model/recomputation.py numbers layers."""
    counts = [count_layers(model.get_submodule(name)) for name in stacks]
    return dict(zip(stacks, itertools.accumulate([0, *counts])))


def _parts(steps: list[TracedStep]) -> list[tuple[str, tuple[str, int] | None, list[TracedStep]]]:
    """(name, place, steps) of each layer in each pass, and of what comes between."""
    grouped = itertools.groupby(steps, key=lambda step: (step.name, step.place))
    return [(*key, list(part)) for key, part in grouped]
