"""The search for the largest batch size: which size to try next, and when the largest is known. Pure functions:
nothing is launched or measured.

Each size is one launch. The search begins where `zerofit plan` predicts the limit, then follows the line through the
peaks that were measured, until some size fits and the next one does not.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

SMALL_STEP_FRACTION = 0.03  # part of a size that counts as a small step
MAX_GROWTH_FACTOR = 4  # next size / largest size that fits, while no size is known that does not fit
Peaks = Mapping[int, int | None]  # {size that was tried: its peak in bytes; None: it does not fit}


def find_bounds(peaks: Peaks) -> tuple[int, int | None]:
    """Return (the largest size that fits below the smallest that does not; 0: none, that smallest size; None:
    none)."""
    fails = min((size for size, peak in peaks.items() if peak is None), default=None)
    fitting = [size for size, peak in peaks.items() if peak is not None and (fails is None or size < fails)]
    return max(fitting, default=0), fails


def choose_next_size(
    sizes: Sequence[int],
    peaks: Peaks,
    limit: int,
    guess: int = 0,
    *,
    per_sample: float | None = None,
) -> int | None:
    """Return the size to try next; None: the largest size that fits is known.

    Args:
        sizes: all candidate batch sizes, ascending.
        limit: bytes that a peak may have.
        guess: the largest size that is predicted to fit; 0: no prediction.
        per_sample: bytes by which a peak is predicted to grow with each sample.
    """
    fits, fails = find_bounds(peaks)
    stop = len(sizes) if fails is None else bisect_left(sizes, fails)
    remaining = sizes[bisect_right(sizes, fits) : stop]
    if not remaining:
        return None
    if guess and not peaks:
        return _at_most(remaining, guess)
    if not fits:
        if guess and fails and len(peaks) < 3:  # the guess was too high: go down by a sixteenth, then by a quarter
            return _at_most(remaining, fails - max(1, fails // (16, 4)[len(peaks) - 1]))
        return remaining[0]
    points = sorted((size, peak) for size, peak in peaks.items() if peak is not None and size <= fits)
    return _at_most(remaining, _target(points, fails, limit, per_sample))


def _target(points: list[tuple[int, int]], fails: int | None, limit: int, per_sample: float | None) -> int:
    """Return the size to try, which need not be one of the candidate sizes.

    Args:
        points: (size, peak) of sizes that fit, ascending.
    """
    fits, peak = points[-1]
    if len(points) > 1:  # the slope between the two largest sizes, else the predicted one
        per_sample = (peak - points[-2][1]) / (fits - points[-2][0])
    predicted = fits + int((limit - peak) / per_sample) if per_sample and per_sample > 0 else None
    halfway = MAX_GROWTH_FACTOR * fits if fails is None else (fits + fails) // 2
    if predicted is None or (fails is not None and predicted >= fails):  # no prediction, or a wrong one
        return halfway
    if predicted <= fits:  # the prediction was too low, or is exact: take small steps that double
        last = fits - points[-2][0] if len(points) > 1 else fits
        target = fits + (2 * last if last <= SMALL_STEP_FRACTION * fits else 1)
        return target if fails is None else min(target, halfway)
    if fails is None:
        return min(predicted, halfway)
    # Each launch narrows the bracket by an eighth at least, even if predictions are wrong.
    return min(max(predicted, fits + (fails - fits) // 8), fails - (fails - fits) // 8)


def _at_most(sizes: Sequence[int], size: int) -> int:
    """Return the largest of the sizes up to `size`, else the smallest."""
    return sizes[max(0, bisect_right(sizes, size) - 1)]
