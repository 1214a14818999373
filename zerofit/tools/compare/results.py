"""The results of a comparison as numbers: a row for each candidate, and a sentence that sums them up."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from zerofit.record.terminal import rounded
from zerofit.tools.compare.search import bounds
from zerofit.tools.compare.trial import peak_bytes

BUSY = 2  # a load average above this many times the cores, or the ranks, is that of other programs too
RATES = (
    *("samples_per_s", "tokens_per_s", "evaluation_samples_per_s", "evaluation_seconds", "evaluation_samples"),
    *("seconds", "load", "cores"),
)


def with_rates_of(line: dict[str, Any], timed: dict[str, Any] | None) -> dict[str, Any]:
    """A simulated trial with the rates of a trial that was timed at its size, or without any."""
    kept = {name: value for name, value in line.items() if name not in (*RATES, "loss")}
    return kept | {name: timed[name] for name in RATES if timed and name in timed}


@dataclass
class StrategyRow:
    """One candidate. Memory is in bytes; batch sizes are those of one process.

    Args:
        trials: the results of the journal, one for each size that was tried, ascending.
        problem: why there is no result; empty: there is one.
        predicted: {size: peak} of the sizes that `zerofit plan` predicted.
    """

    name: str
    trials: list[dict[str, Any]]
    problem: str = ""
    launches: int = 0
    seconds: float = 0.0
    predicted: dict[int, int] = field(default_factory=dict)

    @property
    def peaks(self) -> dict[int, int | None]:
        """{size: peak in bytes, None where it does not fit} of the sizes that were tried."""
        return {line["size"]: peak_bytes(line) if "ranks" in line else None for line in self.trials}

    @property
    def largest(self) -> int:
        """The largest batch that fits; 0: none does, or it is not known."""
        return 0 if self.problem else bounds(self.peaks)[0]

    @property
    def smallest_misfit(self) -> dict[str, Any] | None:
        """The trial of the smallest batch that does not fit; None: there is none."""
        return next((line for line in self.trials if line["size"] == bounds(self.peaks)[1]), None)

    @property
    def fitting(self) -> list[dict[str, Any]]:
        """The trials of sizes that fit, ascending."""
        return [line for line in self.trials if line["size"] <= self.largest]

    def at(self, size: int | None) -> dict[str, Any] | None:
        """The trial of a size that fits."""
        return next((line for line in self.fitting if line["size"] == size), None)

    @property
    def about(self) -> dict[str, Any]:
        """The values that all its trials have in common: numbers of samples, parameters and so on."""
        return next((line["about"] for line in self.trials if "about" in line), {})

    @property
    def timed(self) -> list[dict[str, Any]]:
        """The trials of sizes that fit and were timed, ascending."""
        return [line for line in self.fitting if "samples_per_s" in line]

    @property
    def best(self) -> dict[str, Any] | None:
        """The trial with the most samples a second."""
        return max(self.timed, key=lambda line: line["samples_per_s"], default=None)

    @property
    def epoch_s(self) -> float | None:
        """Seconds of an epoch at the best throughput, with all rows at the greatest length."""
        return self.about["num_samples"] / self.best["samples_per_s"] if self.best and self.about else None

    @property
    def limit_text(self) -> str:
        """The largest batch in words, and whether a larger one may fit."""
        if self.problem:
            return "failed"
        if not self.largest:
            return f"none ({outcome_text(self.smallest_misfit)})" if self.smallest_misfit else "not known"
        return f"{self.largest}" if self.smallest_misfit else f"{self.largest} or more"

    def predicted_peak(self, size: int) -> float:
        """The peak of a size, on the line through the two predicted sizes that are nearest to it."""
        near = sorted(sorted(self.predicted, key=lambda each: abs(each - size))[:2])
        low, high = self.predicted[near[0]], self.predicted[near[-1]]
        return low + (size - near[0]) * (high - low) / max(1, near[-1] - near[0])


def outcome_text(line: dict[str, Any]) -> str:
    """Say why a size does not fit, in words."""
    if line["outcome"] == "timed_out":
        return "timed out"
    phase = f" in {line['phase']}" if line.get("phase") else ""
    return ("out of host memory" if line.get("where") == "host" else "out of memory") + phase


def common_size(rows: list[StrategyRow]) -> int | None:
    """The largest batch that fits under every candidate; those that hold no batch at all are not counted."""
    return min((row.largest for row in rows if row.largest), default=None)


def speed_up(row: StrategyRow, first: StrategyRow) -> float | None:
    """Samples a second as a multiple of the first row's, each at its best batch."""
    return row.best["samples_per_s"] / first.best["samples_per_s"] if row.best and first.best else None


def rates(line: dict[str, Any]) -> tuple[float, float]:
    """Return (samples a second of the slowest timed update, of the fastest)."""
    seconds = line.get("seconds") or [1.0]
    samples = line["samples_per_s"] * statistics.median(seconds)
    return samples / max(seconds), samples / min(seconds)


def spread(line: dict[str, Any]) -> str:
    """The range of the timed updates' seconds, as a fraction of their median."""
    low, high = rates(line)
    return f"{(high - low) / line['samples_per_s']:.0%}"


def load_text(line: dict[str, Any]) -> str:
    """The machine's load average before the updates and after them."""
    return " to ".join(f"{load:.1f}" for load in line.get("load") or ()) or "-"


def _is_disturbed(line: dict[str, Any]) -> bool:
    """Return whether other programs were at work too while these updates were timed."""
    return max(line.get("load") or [0.0]) > BUSY * max(line.get("cores") or 1, len(line["ranks"]))


def conclusion(rows: list[StrategyRow]) -> str:
    """The results in one to three sentences."""
    failed, rows = [row.name for row in rows if row.problem], [row for row in rows if not row.problem]
    sentences = [*_sentences(rows)] if rows else []
    sentences += [f"{', '.join(failed)}: failed, without a result."] if failed else []
    return " ".join(sentences)


def _sentences(rows: list[StrategyRow]) -> Iterator[str]:
    first, largest = rows[0], max(row.largest for row in rows)
    if not largest:
        yield f"No batch fits within this limit under {', '.join(row.name for row in rows)}."
        return
    holders = [row for row in rows if row.largest == largest]
    against = ""
    if first.largest not in (0, largest):
        against = f", {rounded(largest / first.largest)} times the {first.largest:,} of {first.name}"
    holds = "holds" if len(holders) == 1 else "hold"
    yield f"{' and '.join(row.name for row in holders)} {holds} the largest batch, {largest:,} per process{against}."
    timed = [(row, row.best) for row in rows if row.best]
    if not timed:
        return
    fastest, best = max(timed, key=lambda pair: pair[1]["samples_per_s"])
    disturbed = [(row, line) for row, line in timed if _is_disturbed(line)]
    if disturbed:
        loads = ", ".join(f"{row.name} {load_text(line)}" for row, line in disturbed)
        yield (
            f"No strategy is called the fastest: other programs were at work on the {disturbed[0][1]['cores']} "
            f"cores (load average: {loads}). Measure again on a quiet machine."
        )
        return
    faster = speed_up(fastest, first)
    against = f", {rounded(faster)} times {first.name} at its best" if faster and fastest is not first else ""
    rate = f"{rounded(best['samples_per_s'])} samples/s{against}"
    yield f"The fastest is {fastest.name} at {best['size']} per process: {rate}."
    low = rates(best)[0]
    near = [row.name for row, line in timed if row is not fastest and rates(line)[1] >= low]
    if near:
        yield f"From {' and '.join(near)} it differs by no more than the timed updates do among themselves."
