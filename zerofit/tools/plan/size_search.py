"""The largest candidate that fits: micro-batches, or lengths of rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

FURTHEST = 16  # times as large a candidate as the largest that was seen to fit


class Sized(Protocol):
    """What was predicted of a candidate."""

    @property
    def fits(self) -> bool: ...

    @property
    def device_bytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


def search(candidates: Sequence[int], predict: Callable[[int], T], limit: int) -> list[T]:
    """The predictions that were needed, by size; with the largest candidate that fits and the next one.

    Memory grows almost in proportion to the size, so two predictions tell where to look.

    Args:
        candidates: ascending.
        limit: bytes of a device.
    """
    made: dict[int, T] = {}
    fits, fails = -1, len(candidates)
    while fails - fits > 1:
        place = _next_place(made, candidates, fits, fails, limit)
        made[place] = predict(candidates[place])
        if made[place].fits:
            fits = place
        else:
            fails = place
    return [made[place] for place in sorted(made)]


def _next_place(made: Mapping[int, Sized], candidates: Sequence[int], fits: int, fails: int, limit: int) -> int:
    """Where to look next: the smallest, four times as many; then where the line through two predictions reaches the
    limit (not too far beyond what was seen) and, every other time between two bounds, halfway."""
    if fits < 0:
        return 0 if not made else fails // 2
    growing = fails == len(candidates)
    further = [place for place in made if place < fits] if growing else [fails]
    if not further:
        return min(4 * fits + 3, fails - 1)
    if not growing and len(made) % 2:
        return (fits + fails) // 2
    low, high = sorted((fits, further[-1]))
    rise, run = made[high].device_bytes - made[low].device_bytes, candidates[high] - candidates[low]
    size = candidates[high] + (limit - made[high].device_bytes) * run / rise if rise > 0 else candidates[-1]
    place = sum(candidate <= size for candidate in candidates) - 1
    return min(max(place, fits + 1), fails - 1, FURTHEST * fits + 3 if growing else fails)
