"""How fast a device does each kind of operation: from its maker's figures, or as `zerofit plan --calibrate` found."""

import bisect
import math
from dataclasses import dataclass

from zerofit.estimate.operations import ATTENTION, BY_FLOPS, MATRIX, MEMORY, Operation
from zerofit.estimate.time_constants import ATTENTION_ROWS, FILL, MISALIGNED, NARROW_HEADS, TILES, UNEVEN


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


def product_efficiency(shape: tuple[int, ...], multiprocessors: int) -> float:
    """What a matrix product reaches of a GPU's best, by its tiles, their waves, its depth and its alignment.

    Args:
        shape: (products, M, N, K).
    """
    count, rows, columns, depth = shape

    def filled(height: int, width: int) -> float:
        tiles = count * math.ceil(rows / height) * math.ceil(columns / width)
        waves = math.ceil(tiles / multiprocessors)
        return count * rows * columns / (waves * multiprocessors * height * width)

    best = max(quality * filled(height, width) for height, width, quality in TILES)
    aligned = 1.0
    for width in (columns, depth):
        aligned = min(aligned, MISALIGNED if width % 8 else UNEVEN if width % 64 else 1.0)
    return best * aligned * depth / (depth + FILL)


def attention_efficiency(shape: tuple[int, ...]) -> float:
    """What attention reaches of its best.

    Args:
        shape: (rows x heads, queries, keys, width of a head).
    """
    _, queries, _, width = shape
    return queries / (queries + ATTENTION_ROWS) * (NARROW_HEADS if width <= 64 else 1.0)


@dataclass(frozen=True)
class Speeds:
    """What one process of a device reaches.

    Attributes:
        rates: {(kind, half precision): FLOP/s of matrix products and attention, else bytes/s}.
        operation_s: what starting an operation takes.
        is_queued: operations are started while others run (a GPU); else starting one is added to it (a CPU).
        multiprocessors: of a GPU whose products and attention reach what their shapes allow; None: rates are measured.
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
    multiprocessors: int | None = None

    def seconds(self, operation: Operation) -> float:
        """Of its work alone: what starting it takes is not included."""
        kind, half, flops, moved, shape = operation
        if kind not in BY_FLOPS:
            return moved / self.rates[kind, half].at(moved)
        rate = self.rates[kind, half].at(flops)
        if self.multiprocessors and kind == MATRIX and shape:
            rate *= product_efficiency(shape, self.multiprocessors)
        elif self.multiprocessors and kind == ATTENTION and shape:
            rate *= attention_efficiency(shape)
        return max(self.memory_seconds(moved, half), flops / rate)

    def memory_seconds(self, moved: float, half: bool = False) -> float:
        """The time in which so many bytes are read and written."""
        return moved / self.rates[MEMORY, half].at(moved) if moved else 0.0

    def computes(self, half: bool) -> bool:
        """Whether the rate of matrix products in this precision is known."""
        return (MATRIX, half) in self.rates
