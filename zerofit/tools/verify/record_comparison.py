"""Compares the records of two runs line by line: metrics, and the ledger of samples. Pure functions."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

FIGURES = {"loss": "loss", "grad_norm": "gradient norm", "learning_rate": "learning rate"}


@dataclass(frozen=True)
class Difference:
    """Between the metrics of two runs.

    Args:
        largest: the largest relative difference of each figure in any update; NaN where a figure is not a number.
        problems: updates that are missing, repeated, or only in one of the runs.
    """

    largest: dict[str, float]
    problems: tuple[str, ...]


def compare_metrics(lines: list[dict[str, Any]], reference: list[dict[str, Any]], num_updates: int) -> Difference:
    """Compare the lines of updates 1 to `num_updates` with those of a reference; other lines do not count."""
    ours, theirs = _by_update(lines), _by_update(reference)
    problems = [*_gaps(lines, num_updates, ""), *_gaps(reference, num_updates, " of the reference")]
    largest = {}
    for figure in FIGURES:
        differences = [
            relative_difference(ours[update].get(figure), theirs[update].get(figure))
            for update in ours.keys() & theirs.keys()
        ]
        is_number = differences and not any(map(math.isnan, differences))
        largest[figure] = max(differences) if is_number else math.nan
    return Difference(largest, tuple(problems))


def relative_difference(value: float | None, expected: float | None) -> float:
    """|value - expected| / |expected|; 0 if they are equal, NaN if one of them is not a finite number."""
    if value is None or expected is None or not (math.isfinite(value) and math.isfinite(expected)):
        return math.nan
    if value == expected:
        return 0.0
    return abs(value - expected) / max(abs(expected), 1e-12)


def _by_update(lines: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {line["update"]: line for line in lines if line["update"] > 0}


def _gaps(lines: list[dict[str, Any]], num_updates: int, whose: str) -> list[str]:
    counts, expected = Counter(line["update"] for line in lines if line["update"] > 0), range(1, num_updates + 1)
    wrong = {
        "missing": [update for update in expected if update not in counts],
        f"beyond {num_updates}": [update for update in counts if update not in expected],
        "more than once": [update for update, number in counts.items() if number > 1],
    }
    return [f"updates {what}{whose}: {', '.join(map(str, several[:5]))}" for what, several in wrong.items() if several]


@dataclass(frozen=True)
class Ledger:
    """Samples of a run against those of a reference.

    Args:
        repeated: how often samples were trained on more than in the reference.
        skipped: how often less.
        elsewhere: updates with other samples than in the reference, or that are missing or repeated.
    """

    repeated: int
    skipped: int
    elsewhere: int

    @property
    def is_same(self) -> bool:
        return not (self.repeated or self.skipped or self.elsewhere)


def compare_samples(lines: list[dict[str, Any]], reference: list[dict[str, Any]]) -> Ledger:
    """Compare the lines of two samples.jsonl, each with `update` and `samples`.

    Raises:
        ValueError: the reference has no samples, so that everything would agree.
    """
    ours, theirs = (Counter(index for line in run for index in line["samples"]) for run in (lines, reference))
    if not theirs:
        raise ValueError("the reference has no samples")
    of_updates, expected = (
        Counter((line["update"], *sorted(line["samples"])) for line in run) for run in (lines, reference)
    )
    elsewhere = len({update for update, *_ in (of_updates - expected) | (expected - of_updates)})
    return Ledger((ours - theirs).total(), (theirs - ours).total(), elsewhere)
