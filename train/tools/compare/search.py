"""Which batch size is tried next, and when the largest is known. Nothing here launches or measures anything.

One launch goes up from size to size until memory runs out; then it is over, since ranks whose collectives have come
apart cannot be used any more. So the order of sizes is: up by doubling, straight to the size that the peaks of the
smaller ones predict, and from there in small steps. What a process has done before may have cut its memory into
pieces; so the largest size that fits, and the next one, which does not, are each confirmed in a fresh process.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

CREEP = 0.03  # of a size: what counts as a small step


@dataclass(frozen=True)
class Fact:
    """A batch size (of one process) that was tried.

    Args:
        fresh: it was the first of its process.
        peak: the largest peak of any rank, in bytes, against which a limit is held; None where it does not fit.
    """

    size: int
    fits: bool
    fresh: bool
    peak: int | None = None


@dataclass(frozen=True)
class Known:
    """What follows from facts, for sizes in ascending order.

    Where facts contradict each other the one of a fresh process counts, and the later one of two such.
    """

    sizes: list[int]
    facts: list[Fact]

    def _verdicts(self) -> dict[int, Fact]:
        found: dict[int, Fact] = {}
        for fact in self.facts:
            if fact.size not in found or fact.fresh or not found[fact.size].fresh:
                found[fact.size] = fact
        return {size: found[size] for size in sorted(found)}

    @property
    def fails(self) -> int | None:
        """The smallest size that does not fit."""
        return next((fact.size for fact in self._verdicts().values() if not fact.fits), None)

    @property
    def fits(self) -> int:
        """The largest size that fits, below any that does not; 0: none."""
        fails = self.fails
        fitting = [size for size, fact in self._verdicts().items() if fact.fits and (fails is None or size < fails)]
        return max(fitting, default=0)

    @property
    def points(self) -> list[tuple[int, int]]:
        """(size, peak) of what fits, of fresh processes alone where these are enough for a line."""
        found = [fact for fact in self._verdicts().values() if fact.fits and fact.peak]
        fresh = [fact for fact in found if fact.fresh]
        return [(fact.size, fact.peak) for fact in (fresh if len(fresh) > 1 else found)]

    def is_confirmed(self, size: int) -> bool:
        """Whether what is known of a size was seen in a fresh process."""
        return size in self._verdicts() and self._verdicts()[size].fresh

    @property
    def is_bracketed(self) -> bool:
        """Whether no size in question lies between the largest that fits and the smallest that does not."""
        return not _between(self.sizes, self.fits, self.fails)


@dataclass(frozen=True)
class Step:
    """The next launch: the size that it begins with, and whether that is all."""

    first: int
    alone: bool = False


def next_step(known: Known, limit: int | None, visit: Sequence[int] = ()) -> Step | None:
    """The launch that is needed next; None where the largest size is known and confirmed.

    Args:
        limit: bytes, against which the peaks are held; None where it is not known.
        visit: sizes that are not to be skipped.
    """
    fits, fails = known.fits, known.fails
    if not known.is_bracketed:
        return Step(next_size(known.sizes, fits, fails, known.points, limit, visit))
    if fails is not None and not known.is_confirmed(fails):
        return Step(fails)  # should it fit after all, the launch goes on from there
    if fits and not known.is_confirmed(fits):
        return Step(fits, alone=True)
    return None


def next_size(
    sizes: list[int],
    fits: int,
    fails: int | None,
    points: list[tuple[int, int]],
    limit: int | None,
    visit: Sequence[int] = (),
) -> int | None:
    """The size to try after `fits`, below `fails`; None where none lies between.

    Args:
        points: (size, peak bytes) of what fits.
        limit: bytes; with two points it says which size will be the last.
        visit: sizes that are not to be skipped.
    """
    open_sizes = _between(sizes, fits, fails)
    if not open_sizes:
        return None
    if not fits:
        return open_sizes[0]
    predicted = predict(points, limit)
    halfway = 2 * fits if fails is None else (fits + fails) // 2
    if predicted is None or (fails is not None and predicted >= fails):  # unknown, or proven wrong
        wanted = halfway
    elif predicted > fits:
        wanted = predicted if fails is not None else min(predicted, halfway)
    else:  # it was too low, or is exact: on in small steps that double
        last = fits - max((size for size, _ in points if size < fits), default=0)
        wanted = fits + (2 * last if last <= CREEP * fits else 1)
    if fails is not None:  # each launch takes its share of what is open, however the predictions err
        wanted = min(max(wanted, fits + (fails - fits) // 8), fails - (fails - fits) // 8)
    chosen = open_sizes[max(0, bisect_right(open_sizes, wanted) - 1)]
    return next((size for size in sorted(visit) if fits < size < chosen and size in open_sizes), chosen)


def predict(points: list[tuple[int, int]], limit: int | None) -> int | None:
    """The largest size whose peak would stay within the limit, by a line through the two largest sizes."""
    if limit is None or len(points) < 2:
        return None
    (low, low_peak), (high, high_peak) = sorted(points)[-2:]
    if high_peak <= low_peak:
        return None
    return high + int((limit - high_peak) * (high - low) / (high_peak - low_peak))


def _between(sizes: list[int], fits: int, fails: int | None) -> list[int]:
    stop = len(sizes) if fails is None else bisect_left(sizes, fails)
    return sizes[bisect_right(sizes, fits) : stop]
