"""Two records of a run, line by line: metrics, and the ledger of samples. Pure functions."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

FIGURES = {"loss": "loss", "grad_norm": "gradient norm", "learning_rate": "learning rate"}


@dataclass(frozen=True)
class Difference:
    """Between the metrics of two runs.

    Args:
        largest: of each figure, the largest relative difference in any update; NaN where a figure is no number.
        problems: updates that are missing, come twice, or are not in the other.
    """

    largest: dict[str, float]
    problems: tuple[str, ...]

    def within(self, tolerance: float) -> bool:
        return not self.problems and all(value <= tolerance for value in self.largest.values())  # NaN is not


def compare_metrics(lines: list[dict[str, Any]], reference: list[dict[str, Any]], num_updates: int) -> Difference:
    """Compare the lines of updates 1 to `num_updates` with those of a reference; others than updates do not count."""
    ours, theirs = (_by_update(each) for each in (lines, reference))
    problems = [*_gaps(ours, num_updates, ""), *_gaps(theirs, num_updates, "of the reference ")]
    both = sorted(ours.keys() & theirs.keys())
    largest = {}
    for figure in FIGURES:
        differences = [relative_difference(ours[update][0].get(figure), theirs[update][0].get(figure))
                       for update in both]  # fmt: skip
        largest[figure] = _largest(differences)
    return Difference(largest, tuple(problems))


def relative_difference(value: float | None, expected: float | None) -> float:
    """|value - expected| / |expected|; 0 for equal ones, NaN where one of them is no finite number."""
    if value is None or expected is None or not (math.isfinite(value) and math.isfinite(expected)):
        return math.nan
    if value == expected:
        return 0.0
    return abs(value - expected) / max(abs(expected), 1e-12)


def _largest(differences: list[float]) -> float:
    if not differences or any(math.isnan(value) for value in differences):
        return math.nan
    return max(differences)


def _by_update(lines: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        if line["update"] > 0:
            found.setdefault(line["update"], []).append(line)
    return found


def _gaps(found: dict[int, list], num_updates: int, whose: str) -> list[str]:
    missing = [update for update in range(1, num_updates + 1) if update not in found]
    beyond = [update for update in found if update > num_updates]
    twice = [update for update, lines in found.items() if len(lines) > 1]
    said = []
    for updates, what in ((missing, "missing"), (beyond, f"beyond {num_updates}"), (twice, "there more than once")):
        if updates:
            verb = "is" if len(updates) == 1 else "are"
            named = ", ".join(map(str, updates[:5])) + (", ..." if len(updates) > 5 else "")
            said.append(f"update{'s' if len(updates) > 1 else ''} {whose}{named} {verb} {what}")
    return said


@dataclass(frozen=True)
class Ledger:
    """Samples of a run against those of a reference.

    Args:
        repeated: samples that were trained on more often than in the reference, each time counted.
        skipped: less often.
        elsewhere: updates that are not made of the samples that they should be made of, or are not there once.
    """

    repeated: int
    skipped: int
    elsewhere: int

    @property
    def is_same(self) -> bool:
        return not (self.repeated or self.skipped or self.elsewhere)


def compare_samples(lines: list[dict[str, Any]], reference: list[dict[str, Any]]) -> Ledger:
    """Compare two samples.jsonl, lines of `update` and `samples`.

    Raises:
        ValueError: the reference has no samples, with which everything would agree.
    """
    ours, theirs = (Counter(index for line in each for index in line["samples"]) for each in (lines, reference))
    if not theirs:
        raise ValueError("the reference has no samples")
    of_updates, expected = (
        {update: [sorted(line["samples"]) for line in found] for update, found in _by_update(each).items()}
        for each in (lines, reference)
    )
    elsewhere = sum(of_updates.get(update) != expected.get(update) for update in of_updates.keys() | expected.keys())
    return Ledger((ours - theirs).total(), (theirs - ours).total(), elsewhere)
