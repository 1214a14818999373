"""The passes of the full model, put together from the segments of a trace of few layers."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from zerofit.estimate.allocations import Segment
from zerofit.estimate.module_visits import Visit
from zerofit.estimate.operations import Operation


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
    """The passes of the full model: the last layer that was traced of each stack is repeated.

    Args:
        stacks: {name of a stack: its layers in the full model}.
    """
    steps, live, head, backward = [], 0, 0, False
    traced: dict[str, int] = {}  # the last layer
    for _, *where in map(_title, ([segment] for segment in segments)):
        if len(where) == 2:
            traced[where[0]] = max(where[1], traced.get(where[0], 0))
    trains = any(_title([segment])[0].startswith("backward") for segment in segments)
    runs = [list(run) for _, run in itertools.groupby(segments, key=lambda segment: segment.name)]
    for at, run in enumerate(runs):
        name, *where = _title(run)
        backward = backward or name.startswith("backward")
        is_last_of_forward = not backward and (at + 1 == len(runs) or _title(runs[at + 1])[0].startswith("backward"))
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


def _title(run: list[Segment]) -> tuple[Any, ...]:
    return run[0].name if isinstance(run[0].name, tuple) else (run[0].name,)


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
