"""Which batch size is tried next, and when the largest is known. Pure functions: nothing is launched or measured.

One launch tries larger and larger sizes until memory runs out. Then it ends, since its ranks have left their
collectives at different places. The sizes double until the peaks of smaller ones predict the largest; that one is
tried next, and then small steps. Earlier trials may have fragmented the memory of a process; so the largest size that
fits and the next one, which does not fit, are each confirmed in a fresh process.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

SMALL_STEP = 0.03  # part of a size that counts as a small step


@dataclass(frozen=True)
class Fact:
    """A batch size (of one process) that was tried.

    Args:
        fresh: it was the first one of its process.
        peak: the largest peak of any rank, in bytes, as the limit counts it; None where the size does not fit.
    """

    size: int
    fits: bool
    fresh: bool
    peak: int | None = None


@dataclass(frozen=True)
class SearchState:
    """What is known from all facts so far. `sizes` are in ascending order.

    Where facts contradict each other, one from a fresh process counts, and among those the latest.
    """

    sizes: list[int]
    facts: list[Fact]

    def _latest(self) -> dict[int, Fact]:
        by_size: dict[int, Fact] = {}
        for fact in self.facts:
            if fact.size not in by_size or fact.fresh or not by_size[fact.size].fresh:
                by_size[fact.size] = fact
        return {size: by_size[size] for size in sorted(by_size)}

    @property
    def fails(self) -> int | None:
        """The smallest size that does not fit."""
        return next((fact.size for fact in self._latest().values() if not fact.fits), None)

    @property
    def fits(self) -> int:
        """The largest size that fits, below any that does not; 0: none."""
        fails = self.fails
        fitting = [size for size, fact in self._latest().items() if fact.fits and (fails is None or size < fails)]
        return max(fitting, default=0)

    @property
    def points(self) -> list[tuple[int, int]]:
        """(size, peak) of the sizes that fit; only of fresh processes where there are two or more."""
        fitting = [fact for fact in self._latest().values() if fact.fits and fact.peak]
        fresh = [fact for fact in fitting if fact.fresh]
        return [(fact.size, fact.peak) for fact in (fresh if len(fresh) > 1 else fitting)]

    def is_confirmed(self, size: int) -> bool:
        """Whether a size was tried in a fresh process."""
        return size in self._latest() and self._latest()[size].fresh

    @property
    def is_bracketed(self) -> bool:
        """Whether no size is left between the largest that fits and the smallest that does not."""
        return not _between(self.sizes, self.fits, self.fails)


@dataclass(frozen=True)
class Step:
    """The next launch: the size that it begins with, and whether it tries only that one."""

    first: int
    only_first: bool = False


def next_step(
    state: SearchState,
    limit: int | None,
    must_try: Sequence[int] = (),
    guess: int = 0,
    per_sample: float | None = None,
) -> Step | None:
    """The launch that is needed next; None where the largest size is known and confirmed.

    Args:
        limit: bytes that a peak may have; None where it is not known.
        must_try: sizes that must not be skipped.
        guess: the largest size that is predicted to fit: the first launch begins with it; 0: there is no prediction.
        per_sample: bytes by which a peak is predicted to grow with each sample.
    """
    fits, fails = state.fits, state.fails
    if guess and not state.facts:
        return Step(_at_most(state.sizes, guess))
    if guess and not fits and not state.is_bracketed and len(state.facts) < 3:  # it was too high: by a little, or more
        part = (16, 4)[len(state.facts) - 1]
        return Step(_at_most(_between(state.sizes, 0, fails), fails - max(1, fails // part)))
    if not state.is_bracketed:
        return Step(next_size(state.sizes, fits, fails, state.points, limit, must_try, per_sample))
    if fails is not None and not state.is_confirmed(fails):
        return Step(fails)  # if it fits after all, the launch continues with larger ones
    if fits and not state.is_confirmed(fits):
        return Step(fits, only_first=True)
    return None


def next_size(
    sizes: list[int],
    fits: int,
    fails: int | None,
    points: list[tuple[int, int]],
    limit: int | None,
    must_try: Sequence[int] = (),
    per_sample: float | None = None,
) -> int | None:
    """The size to try after `fits`, below `fails`; None where none lies between.

    Args:
        points: (size, peak bytes) of sizes that fit.
        limit: bytes; with two points it predicts the largest size.
        must_try: sizes that must not be skipped.
        per_sample: bytes by which a peak is predicted to grow with each sample, for want of a second point.
    """
    open_sizes = _between(sizes, fits, fails)
    if not open_sizes:
        return None
    if not fits:
        return open_sizes[0]
    predicted = predict(points, limit, per_sample)
    halfway = 2 * fits if fails is None else (fits + fails) // 2
    if predicted is None or (fails is not None and predicted >= fails):  # no prediction, or a wrong one
        target = halfway
    elif predicted > fits and len(points) == 1:  # the slope is not measured: a second point first, within the limit
        target = fits + max(1, (predicted - fits) * 3 // 4)
    elif predicted > fits:
        target = predicted if fails is not None else min(predicted, halfway)
    else:  # the prediction was too low, or is exact: small steps that double
        last = fits - max((size for size, _ in points if size < fits), default=0)
        target = fits + (2 * last if last <= SMALL_STEP * fits else 1)
    if fails is not None and predicted is not None and predicted <= fits:
        target = min(target, halfway)
    elif fails is not None:  # each launch narrows the bracket by an eighth at least, even if predictions are wrong
        target = min(max(target, fits + (fails - fits) // 8), fails - (fails - fits) // 8)
    chosen = open_sizes[max(0, bisect_right(open_sizes, target) - 1)]
    return next((size for size in sorted(must_try) if fits < size < chosen and size in open_sizes), chosen)


def predict(points: list[tuple[int, int]], limit: int | None, per_sample: float | None = None) -> int | None:
    """The largest size with a peak within the limit, by a straight line through the two largest sizes, or through a
    single one if the slope is known from elsewhere."""
    if limit is not None and len(points) == 1 and per_sample:
        ((size, peak),) = points
        return size + int((limit - peak) / per_sample)
    if limit is None or len(points) < 2:
        return None
    (low, low_peak), (high, high_peak) = sorted(points)[-2:]
    if high_peak <= low_peak:
        return None
    return high + int((limit - high_peak) * (high - low) / (high_peak - low_peak))


def _at_most(sizes: list[int], size: int) -> int:
    return sizes[max(0, bisect_right(sizes, size) - 1)]


def _between(sizes: list[int], fits: int, fails: int | None) -> list[int]:
    stop = len(sizes) if fails is None else bisect_left(sizes, fails)
    return sizes[bisect_right(sizes, fits) : stop]


@dataclass(frozen=True)
class SearchVariable:
    """What trials make larger and larger: batches, or with --lengths rows.

    Args:
        option: of the recipe; each launch sets it to the size that it begins with.
        size, short: one of them, in messages and as a column.
        largest, holds: what is found, as a column, and of a strategy that holds it.
        rate: the throughput that is plotted, as a trial has it.
    """

    option: str
    size: str
    short: str
    largest: str
    holds: str
    rate: str


BATCHES = SearchVariable(
    "per_device_train_batch_size",
    "batch size",
    "batch",
    "largest batch",
    "the largest batch, {:,} per process",
    "samples_per_s",
)
LENGTHS = SearchVariable(
    "block_size", "length", "length", "longest rows", "the longest rows, {:,} tokens", "tokens_per_s"
)
