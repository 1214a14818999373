"""The search for the largest batch size: which one is tried next, and when the largest is known. Pure functions:
nothing is launched or measured.

Each size is one launch. The search begins where `zerofit plan` predicts the limit, then follows the line through the
peaks that were measured, until some size fits and the next one does not.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

SMALL_STEP_FRACTION = 0.03  # part of a size that counts as a small step
MAX_GROWTH_FACTOR = 4  # times the largest size that fits, while none is known that does not
Peaks = Mapping[int, int | None]  # {size that was tried: its peak in bytes; None: it does not fit}


def find_bounds(peaks: Peaks) -> tuple[int, int | None]:
    """Return (the largest size that fits, below any that does not; 0: none, the smallest that does not fit)."""
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
    """Return the size to try next; None where no size is left between the largest that fits and the next one.

    Args:
        sizes: all candidate batch sizes, ascending.
        limit: bytes that a peak may have.
        guess: the largest size that is predicted to fit; 0: there is no prediction.
        per_sample: bytes by which a peak is predicted to grow with each sample.
    """
    fits, fails = find_bounds(peaks)
    stop = len(sizes) if fails is None else bisect_left(sizes, fails)
    left = sizes[bisect_right(sizes, fits) : stop]
    if not left:
        return None
    if guess and not peaks:
        return _at_most(left, guess)
    if not fits:
        if guess and fails and len(peaks) < 3:  # it was too high: by a little, or more
            return _at_most(left, fails - max(1, fails // (16, 4)[len(peaks) - 1]))
        return left[0]
    points = sorted((size, peak) for size, peak in peaks.items() if peak is not None and size <= fits)
    return _at_most(left, _target(points, fails, limit, per_sample))


def _target(points: list[tuple[int, int]], fails: int | None, limit: int, per_sample: float | None) -> int:
    """Return the size to try, which need not be one of the candidate sizes.

    Args:
        points: (size, peak) of sizes that fit, ascending.
    """
    fits, peak = points[-1]
    if len(points) > 1:  # a straight line through the two largest sizes, else one of the predicted slope
        per_sample = (peak - points[-2][1]) / (fits - points[-2][0])
    predicted = fits + int((limit - peak) / per_sample) if per_sample and per_sample > 0 else None
    halfway = MAX_GROWTH_FACTOR * fits if fails is None else (fits + fails) // 2
    if predicted is None or (fails is not None and predicted >= fails):  # no prediction, or a wrong one
        return halfway
    if predicted <= fits:  # it was too low, or is exact: small steps that double
        last = fits - points[-2][0] if len(points) > 1 else fits
        target = fits + (2 * last if last <= SMALL_STEP_FRACTION * fits else 1)
        return target if fails is None else min(target, halfway)
    if fails is None:
        return min(predicted, halfway)
    # Each launch narrows the bracket by an eighth at least, even if predictions are wrong.
    return min(max(predicted, fits + (fails - fits) // 8), fails - (fails - fits) // 8)


def _at_most(sizes: Sequence[int], size: int) -> int:
    return sizes[max(0, bisect_right(sizes, size) - 1)]
