"""The stages of a pipeline: which weights each has, and the passes of a micro-batch through it.

A stage has some of the layers (zerofit/model/stages.py), the first one the embedding too, the last one head and loss.
Under 1F1B a stage keeps what its backward passes need of several micro-batches at once: `stages - number`, or all of
an update's (deepspeed/runtime/pipe/schedule.py, TrainSchedule).
"""

from dataclasses import dataclass, replace
from typing import Any

from zerofit.estimate.operations import EXCHANGES
from zerofit.estimate.traced_steps import TracedStep
from zerofit.estimate.weights import Weights, number_of
from zerofit.model.families import StagePlan
from zerofit.model.stages import cut_layers
from zerofit.strategy.layout import ParallelLayout


@dataclass(frozen=True)
class Stage:
    """One of `stages` stages of a pipeline, which has `layers` layers."""

    number: int
    stages: int
    layers: int

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.stages - 1

    def in_flight(self, micro_batches: int) -> int:
        """Micro-batches whose forward pass is done and whose backward pass is not, at most."""
        return min(micro_batches, self.stages - self.number)


WHOLE = Stage(0, 1, 0)  # no pipeline


def stages_of(layout: ParallelLayout, model: Any) -> list[Stage]:
    """Return the stages of which one needs most: the first, the last, and the first of those with most layers.

    Args:
        model: all of it, on "meta".
    """
    if layout.pipeline == 1:
        return [WHOLE]
    cut = cut_layers(model, layout.pipeline)
    every = [Stage(number, layout.pipeline, len(layers)) for number, layers in enumerate(cut)]
    longest = max(every, key=lambda stage: stage.layers)
    return list(dict.fromkeys((every[0], longest, every[-1])))


def weights_of_stage(weights: Weights, stage: Stage, plan: StagePlan, body: str) -> Weights:
    """Return the weights of a stage, whose layers are called as if they were the first ones.

    Args:
        body: the name of the model's body.
    """
    stack, before = f"{body}.{plan.layers}", tuple(f"{body}.{name}." for name in plan.before)
    is_tied = not weights.head

    def belongs(name: str) -> bool:
        if name.startswith(f"{stack}."):
            return number_of(name, stack) < stage.layers
        if name.startswith(before):
            return stage.is_first or (stage.is_last and is_tied and name.startswith(before[0]))
        return stage.is_last

    return replace(weights, all=tuple(weight for weight in weights.all if belongs(weight.name)))


def steps_of_stage(
    steps: list[TracedStep], stage: Stage, weights: Weights, hidden: int, width: int, *, embedded: int = 0
) -> list[TracedStep]:
    """The passes of a micro-batch through a stage.

    What a stage receives stands where the embedding's output would; so does what is made of positions and masks.

    Args:
        steps: of a model with the stage's layers, embedding, head and loss.
        weights: of the stage.
        hidden: bytes of the hidden states that stages exchange.
        width: bytes of an element of a gradient.
        embedded: bytes of the embedding's output where layers keep parts of it: the model's code holds it until its
            forward pass ends.
    """
    found: list[TracedStep] = []
    live = 0
    first_place: tuple[str, int] | tuple[()] | None = None  # (): passed
    for at, step in enumerate(steps):
        in_head = step.phase == "loss" or step.name == "backward of after"
        if (in_head and not stage.is_last) or (step.name == "backward of before" and not stage.is_first):
            continue
        if step.phase == "backward" and not stage.is_last:
            if first_place is None:
                live, first_place = live - embedded, step.place
            elif first_place and step.place != first_place:  # the received gradient stays in its buffer
                live, first_place = live + hidden, ()
        operations, completed, gradient = step.operations, step.completed, step.gradient
        if step.name == "before" and not stage.is_first:
            operations = tuple(one for one in operations if one.kind not in EXCHANGES)
        delta = step.end - step.start
        ends_head = step.name == "backward of after" and (at + 1 == len(steps) or steps[at + 1].name != step.name)
        tied = _tied_table(steps, weights) if stage.is_last and ends_head and not completed else ""
        if tied:  # nothing else adds to its gradient here
            completed, gradient = tied, width * weights.sizes[tied]
            delta -= gradient
        if completed and completed not in weights.sizes:
            completed, gradient = "", 0
        found.append(
            step._replace(
                start=live,
                end=live + delta,
                operations=operations,
                completed=completed,
                gradient=gradient,
                head=step.head if stage.is_last else 0,
            )
        )
        live += delta
    return found


def _tied_table(steps: list[TracedStep], weights: Weights) -> str:
    """The weight that head and embedding have in common: the one of the stage that the embedding's backward pass
    would complete; empty: there is none."""
    names = [step.completed for step in steps if step.name == "backward of before" and step.completed]
    return next((name for name in names if name in weights.sizes), "")
