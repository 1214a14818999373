"""How fast a device does each kind of operation: from its maker's figures, or as `zerofit plan --calibrate` found."""

import bisect
import math
from dataclasses import dataclass, field

from zerofit.estimate.operations import BY_FLOPS, MATRIX, MEMORY, Operation


@dataclass(frozen=True)
class Curve:
    """A rate that depends on the size of what is done: (size, rate) in the order of sizes. Between two sizes it is
    interpolated on a logarithmic scale; beyond the first and the last one it stays."""

    points: tuple[tuple[float, float], ...]

    def at(self, size: float) -> float:
        place = bisect.bisect_left(self.points, (size, 0.0))
        if place == 0:
            return self.points[0][1]
        if place == len(self.points):
            return self.points[-1][1]
        (low, first), (high, second) = self.points[place - 1], self.points[place]
        part = math.log(max(size, 1) / max(low, 1)) / math.log(high / max(low, 1))
        return first * (second / first) ** part

    def times(self, factor: float) -> "Curve":
        return Curve(tuple((size, factor * rate) for size, rate in self.points))


@dataclass(frozen=True)
class Speeds:
    """What one process of a device reaches.

    Attributes:
        rates: {(kind, half precision): FLOP/s of matrix products and attention, else bytes/s}.
        operation_s: what starting an operation takes.
        is_queued: operations are started while others run (a GPU); else starting one is added to it (a CPU).
        adam: elements/s of the host's Adam, of all processes of a machine together.
        host_link: bytes/s between the host and this device, in one direction; None: they have the same memory.
        contention: the part of hidden communication that computation loses.
        peak_half: FLOP/s of half precision that a utilisation refers to; None: there is none.
        source: where these figures are from.
    """

    rates: dict[tuple[str, bool], Curve]
    operation_s: float
    is_queued: bool
    adam: float
    host_link: float | None
    contention: float
    peak_half: float | None
    source: str
    notes: tuple[str, ...] = field(default=())

    def seconds(self, operation: Operation) -> float:
        kind, half, flops, moved = operation
        memory = self.memory_seconds(moved, half) if kind in BY_FLOPS else 0.0
        size = flops if kind in BY_FLOPS else moved
        work = max(memory, size / self.rates[kind, half].at(size))
        return max(work, self.operation_s) if self.is_queued else work + self.operation_s

    def memory_seconds(self, moved: float, half: bool = False) -> float:
        """The time in which so many bytes are read and written."""
        return moved / self.rates[MEMORY, half].at(moved) if moved else 0.0

    def computes(self, half: bool) -> bool:
        """Whether the rate of matrix products in this precision is known."""
        return (MATRIX, half) in self.rates
