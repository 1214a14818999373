"""What a comparison has found, as numbers: a row for each contender, and the sentence that follows from them."""

from dataclasses import dataclass, field
from typing import Any

from train.record.terminal import rounded
from train.tools.compare.journal import peak_of
from train.tools.compare.search import Fact, Known


def fact_of(line: dict[str, Any]) -> Fact:
    """What the search needs of a line of the journal."""
    fits = line["outcome"] == "fits"
    return Fact(line["size"], fits, line["fresh"], peak_of(line) if fits else None)


@dataclass
class Row:
    """One contender. Sizes in bytes, batch sizes of one process.

    Args:
        trials: the lines of the journal, one for each size that was tried.
        about: what its trials had in common (the `ready` line): numbers of samples, parameters and so on.
        problem: why nothing was found; empty: something was.
    """

    name: str
    sizes: list[int]
    trials: list[dict[str, Any]]
    about: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    launches: int = 0
    seconds: float = 0.0

    @property
    def known(self) -> Known:
        return Known(self.sizes, list(map(fact_of, self.trials)))

    @property
    def largest(self) -> int:
        """The largest batch that fits; 0: none, or not known."""
        return 0 if self.problem else self.known.fits

    @property
    def fails(self) -> dict[str, Any] | None:
        """The trial of the next larger one; None: there was none to try."""
        fails = self.known.fails
        lines = [line for line in self.trials if line["size"] == fails and line["outcome"] != "fits"]
        return max(lines, key=lambda line: line["fresh"], default=None)

    @property
    def is_confirmed(self) -> bool:
        """Whether both sides of the limit were seen in fresh processes."""
        known = self.known
        sides = [size for size in (known.fits, known.fails) if size]
        return known.is_bracketed and all(map(known.is_confirmed, sides))

    def at(self, size: int | None) -> dict[str, Any] | None:
        """The trial of a size that fits, that of a fresh process if there is one."""
        lines = [line for line in self.trials if line["size"] == size and line["outcome"] == "fits"]
        return max(lines, key=lambda line: line["fresh"], default=None)

    @property
    def fitting(self) -> list[dict[str, Any]]:
        """A trial of each size that fits, ascending."""
        sizes = sorted({line["size"] for line in self.trials if line["size"] <= self.largest})
        return [line for line in map(self.at, sizes) if line]

    @property
    def best(self) -> dict[str, Any] | None:
        """The trial with the most samples a second."""
        return max(self.fitting, key=lambda line: line["samples_per_s"], default=None)

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """The trial of the largest size in a process of which an evaluation was timed."""
        return next((line for line in reversed(self.fitting) if "evaluation_seconds" in line), None)

    @property
    def epoch_s(self) -> float | None:
        """Seconds of an epoch at that throughput, all rows at the greatest length."""
        return self.about["num_samples"] / self.best["samples_per_s"] if self.best and self.about else None

    @property
    def of_fresh(self) -> list[dict[str, Any]]:
        """Those trials that were the first of their process, if there are two or more; else all that fit."""
        fresh = [line for line in self.fitting if line["fresh"]]
        return fresh if len(fresh) > 1 else self.fitting

    @property
    def bytes_per_sample(self) -> float | None:
        """By how much the peak grows with each sample, from the smallest size to the largest."""
        lines = self.of_fresh
        if len(lines) < 2 or lines[0]["size"] == lines[-1]["size"]:
            return None
        grown = peak_of(lines[-1], with_evaluation=False) - peak_of(lines[0], with_evaluation=False)
        return grown / (lines[-1]["size"] - lines[0]["size"])

    @property
    def held(self) -> dict[str, int]:
        """What the rank that holds most keeps from update to update: weights, and the optimizer's state."""
        line = next((line for line in self.fitting if line.get("held")), None)
        return {name: max(rank[name] for rank in line["held"]) for name in line["held"][0]} if line else {}

    @property
    def limit_text(self) -> str:
        """What is said of the limit: the largest batch, and how sure that is."""
        if self.problem:
            return "failed"
        fails = self.fails
        if not self.largest:
            return f"none ({outcome_text(fails)})" if fails else "not known"
        return f"{self.largest}" if fails else f"{self.largest} or more"


def outcome_text(line: dict[str, Any] | None) -> str:
    """In words why a size does not fit."""
    if line is None:
        return ""
    if line["outcome"] == "timed_out":
        return "timed out"
    phase = f" in {line['phase']}" if line.get("phase") else ""
    return ("out of host memory" if line.get("where") == "host" else "out of memory") + phase


def common_size(rows: list[Row]) -> int | None:
    """The largest batch that everything holds which holds any."""
    return min((row.largest for row in rows if row.largest), default=None)


def factor(row: Row, first: Row) -> float | None:
    """How many times as large a batch as the first row's; None where one of them holds none."""
    return row.largest / first.largest if row.largest and first.largest else None


def speed_up(row: Row, first: Row) -> float | None:
    """Samples a second against the first row's, each at its best batch."""
    return row.best["samples_per_s"] / first.best["samples_per_s"] if row.best and first.best else None


def conclusion(rows: list[Row]) -> str:
    """A sentence or two that follow from the numbers."""
    failed, rows = [row.name for row in rows if row.problem], [row for row in rows if not row.problem]
    about_failed = f" {', '.join(failed)}: failed, nothing is known." if failed else ""
    return (_conclusion(rows) + about_failed).strip()


def _conclusion(rows: list[Row]) -> str:
    fitting = [row for row in rows if row.largest]
    if not fitting:
        names = ", ".join(row.name for row in rows)
        return f"Within this limit not a single batch fits under {names}." if rows else ""
    first, most = rows[0], max(row.largest for row in fitting)
    largest = [row for row in fitting if row.largest == most]
    fastest = max(fitting, key=lambda row: row.best["samples_per_s"])
    names = " and ".join(row.name for row in largest)
    hold = f"{names} hold{'s' if len(largest) == 1 else ''}"
    if len(fitting) == 1 and len(rows) > 1:
        others = ", ".join(row.name for row in rows if row is not fitting[0])
        said = f"Only {names} fits: up to {most} a process ({others}: nothing)"
    elif len(largest) == len(fitting):
        said = (
            f"All that fit hold the same batch of {most} a process" if len(fitting) > 1 else f"{hold} {most} a process"
        )
    else:
        times = factor(largest[0], first)
        against = f", {rounded(times)} times the {first.largest} of {first.name}" if times and times != 1 else ""
        if not first.largest:
            against = f"; {first.name} holds none"
        said = f"{hold} the largest batch, {most} a process{against}"
    best = fastest.best
    faster = speed_up(fastest, first)
    against = f", {rounded(faster)} times {first.name} at its best" if faster and fastest is not first else ""
    rate = f"{rounded(best['samples_per_s'])} samples/s{against}"
    return f"{said}. The fastest is {fastest.name} at {best['size']} a process: {rate}."
