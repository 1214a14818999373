"""The passes of the full model, from a trace of few layers, and the stages of a pipeline.

The stages of a pipeline: which weights each has, and the passes of a micro-batch through it.

A stage has some of the layers (zerofit/model/stages.py), the first one the embedding too, the last one head and loss.
Under 1F1B a stage keeps what its backward passes need of several micro-batches at once: `stages - number`, or all of
an update's (deepspeed/runtime/pipe/schedule.py, TrainSchedule).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zerofit.estimate.allocations import EXCHANGES, Operation, Segment, Visit
from zerofit.estimate.weights import Weights, number_of
from zerofit.model.families import StagePlan


class TracedStep(NamedTuple):
    """A segment in its place in the passes of the full model; sizes in bytes, without gradients that are complete."""

    phase: str
    name: str
    place: tuple[str, int] | None  # (stack, number of the layer)
    start: int
    rise: int  # of the peak above the start
    end: int  # alive after it
    head: int  # of `start`, what head and loss hold
    completed: str = ""  # the parameter of the full model whose gradient is completed at its end
    gradient: int = 0  # of that gradient
    operations: tuple[Operation, ...] = ()
    visit: Visit | None = None  # of a module, that it begins with
    offloaded: int = 0  # bytes that leave for the host
    blocks: tuple[int, ...] = ()  # made, and (negative) released, in order


def compose(segments: list[Segment], stacks: dict[str, int]) -> list[TracedStep]:
    """The passes of the full model: the last layer that was traced of each stack is repeated. `stacks`: {name of a
    stack: its layers in the full model}."""
    steps, live, head, backward = [], 0, 0, False
    traced: dict[str, int] = {}  # the last layer
    for _, *where in (segment.name for segment in segments):
        if len(where) == 2:
            traced[where[0]] = max(where[1], traced.get(where[0], 0))
    trains = any(segment.name[0].startswith("backward") for segment in segments)
    runs = [list(run) for _, run in itertools.groupby(segments, key=lambda segment: segment.name)]
    for at, run in enumerate(runs):
        name, *where = run[0].name
        backward = backward or name.startswith("backward")
        is_last_of_forward = not backward and (at + 1 == len(runs) or runs[at + 1][0].name[0].startswith("backward"))
        phase = "backward" if backward else ("loss" if is_last_of_forward else "forward")
        contents = [(tuple(segment.operations), tuple(segment.blocks)) for segment in run]
        places = _places(where, traced, stacks, backward)
        for place in places:
            if not backward and place != places[0]:
                live -= sum(segment.offloaded for segment in run)  # the input of the layer before is not held any more
            before, in_full = live, _renaming(where, place)
            for segment, (computed, blocks) in zip(run, contents):
                end = live + segment.delta
                steps.append(
                    TracedStep(
                        phase,
                        name,
                        place,
                        live,
                        segment.rise,
                        end,
                        head,
                        in_full(segment.completed),
                        segment.gradient,
                        computed,
                        _visit(segment.visit, in_full),
                        segment.offloaded,
                        blocks,
                    )
                )
                if is_last_of_forward or name == "backward of after":
                    head = max(0, head + segment.delta)
                live = end
            if not trains and place != places[-1]:  # only a backward pass needs what went into a layer
                live = before
    return steps


def _places(
    where: list[Any], traced: dict[str, int], stacks: dict[str, int], backward: bool
) -> list[tuple[str, int] | None]:
    """The layers of the full model that a traced one stands for, in the order of the pass."""
    if len(where) < 2:
        return [None]
    stack, index = where
    if index < traced[stack]:
        return [(stack, index)]
    numbers = range(index, stacks[stack])
    return [(stack, number) for number in (reversed(numbers) if backward else numbers)]


def _renaming(where: list[Any], place: tuple[str, int] | None) -> Callable[[str], str]:
    """Return a function: a name in the traced model -> the one in the full model, of the layer at `place`."""
    if place is None or place[1] == where[1]:
        return str
    traced, full = f"{place[0]}.{where[1]}.", f"{place[0]}.{place[1]}."
    return lambda name: full + name[len(traced) :] if name.startswith(traced) else name


def _visit(visit: Visit | None, in_full: Callable[[str], str]) -> Visit | None:
    if visit is None or in_full is str:
        return visit
    module, enters, forward, *named = visit
    return Visit(in_full(f"{module}.")[:-1], enters, forward, *(tuple(map(in_full, names)) for names in named))


def extrapolate(
    first: list[TracedStep], at_first: int, second: list[TracedStep], at_second: int, batch_size: int
) -> list[TracedStep]:
    """The steps of a larger batch, on the line through those of two smaller ones."""
    part = (batch_size - at_second) / (at_second - at_first)

    def further(small: int, large: int) -> int:
        return round(large + part * (large - small))

    return [
        b._replace(
            start=further(a.start, b.start),
            rise=further(a.rise, b.rise),
            end=further(a.end, b.end),
            head=further(a.head, b.head),
            offloaded=further(a.offloaded, b.offloaded),
            blocks=tuple(map(further, a.blocks, b.blocks)),
        )
        for a, b in zip(first, second, strict=True)
    ]


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


def weights_of_stage(weights: Weights, stage: Stage, plan: StagePlan, body: str) -> Weights:
    """Return the weights of a stage, whose layers are called as if they were the first ones. `body`: the name of the
    model's body."""
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
