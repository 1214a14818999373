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
    ours, theirs = (_by_update(run) for run in (lines, reference))
    problems = [*_gaps(ours, num_updates, ""), *_gaps(theirs, num_updates, "of the reference ")]
    both = sorted(ours.keys() & theirs.keys())
    largest = {}
    for figure in FIGURES:
        differences = [
            relative_difference(ours[update][0].get(figure), theirs[update][0].get(figure)) for update in both
        ]
        largest[figure] = _largest(differences)
    return Difference(largest, tuple(problems))


def relative_difference(value: float | None, expected: float | None) -> float:
    """|value - expected| / |expected|; 0 if they are equal, NaN if one of them is not a finite number."""
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
    by_update: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        if line["update"] > 0:
            by_update.setdefault(line["update"], []).append(line)
    return by_update


def _gaps(by_update: dict[int, list[dict[str, Any]]], num_updates: int, whose: str) -> list[str]:
    missing = [update for update in range(1, num_updates + 1) if update not in by_update]
    beyond = [update for update in by_update if update > num_updates]
    twice = [update for update, lines in by_update.items() if len(lines) > 1]
    problems = []
    for updates, what in ((missing, "missing"), (beyond, f"beyond {num_updates}"), (twice, "there more than once")):
        if updates:
            verb = "is" if len(updates) == 1 else "are"
            named = ", ".join(map(str, updates[:5])) + (", ..." if len(updates) > 5 else "")
            problems.append(f"update{'s' if len(updates) > 1 else ''} {whose}{named} {verb} {what}")
    return problems


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
        {
            update: [sorted(line["samples"]) for line in update_lines]
            for update, update_lines in _by_update(run).items()
        }
        for run in (lines, reference)
    )
    elsewhere = sum(of_updates.get(update) != expected.get(update) for update in of_updates.keys() | expected.keys())
    return Ledger((ours - theirs).total(), (theirs - ours).total(), elsewhere)
