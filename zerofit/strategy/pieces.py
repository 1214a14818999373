"""A range of a parameter, or of the share of it that tensor parallelism has cut out: what one rank holds of it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zerofit.model.tensor_parallel.cut import Cut

SAMPLES = 16  # of a parameter


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened parameter of this shape; with a cut, of the flattened share."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    cut: Cut | None = None

    def runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (first elements in the flattened parameter, first elements in the piece, lengths) of what is
        contiguous in both, in ascending order."""
        if self.cut is None:
            first, last, length = (np.array([value]) for value in (self.start, 0, self.stop - self.start))
            return first, last, length
        starts, lengths = self.cut.runs()
        stops = np.cumsum(lengths)
        first, last = np.maximum(stops - lengths, self.start), np.minimum(stops, self.stop)
        within = first < last
        starts = starts + first - (stops - lengths)
        return starts[within], first[within] - self.start, (last - first)[within]

    def find(self, elements: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (which of these elements of the flattened parameter are in this piece, where they are in it)."""
        starts, first, lengths = self.runs()
        run = np.searchsorted(starts, elements, "right") - 1
        offset = elements - starts[run]
        inside = (run >= 0) & (offset < lengths[run])
        return np.flatnonzero(inside), (first[run] + offset)[inside]


def sampled_elements(num_elements: int) -> np.ndarray:
    """Elements of a flattened parameter, the first and the last included, by whose values a checkpoint is checked."""
    return np.linspace(0, num_elements - 1, min(num_elements, SAMPLES)).astype(np.int64)


def overlaps(one: Piece, other: Piece) -> Iterator[tuple[int, int, int]]:
    """Yield (first element in the one, first in the other, length) of what two pieces have in common."""
    (a, in_a, of_a), (b, in_b, of_b) = one.runs(), other.runs()
    i = j = 0
    while i < len(a) and j < len(b):
        first, last = max(a[i], b[j]), min(a[i] + of_a[i], b[j] + of_b[j])
        if first < last:
            yield int(in_a[i] + first - a[i]), int(in_b[j] + first - b[j]), int(last - first)
        if a[i] + of_a[i] < b[j] + of_b[j]:
            i += 1
        else:
            j += 1
