"""The results of a comparison as numbers: a row for each candidate, and a sentence that sums them up."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from zerofit.record.terminal import rounded
from zerofit.tools.compare.guess import Guess
from zerofit.tools.compare.search import BATCHES, Fact, SearchState, SearchVariable
from zerofit.tools.compare.trial_files import peak_of


def fact_of(line: dict[str, Any]) -> Fact:
    """A line of the journal, as the search needs it."""
    fits = line["outcome"] == "fits"
    return Fact(line["size"], fits, line["fresh"], peak_of(line) if fits else None)


BUSY = 2  # a load average of so many times the cores, or the ranks, is that of other programs too
RATES = (
    *("samples_per_s", "tokens_per_s", "evaluation_samples_per_s", "evaluation_seconds", "evaluation_samples"),
    *("seconds", "load", "cores"),
)


def with_rates_of(line: dict[str, Any], timed: list[dict[str, Any]]) -> dict[str, Any]:
    """A simulated trial with the rates that were measured at its size, or without any."""
    rates = next((rated for rated in reversed(timed) if rated["size"] == line["size"]), {})
    kept = {name: value for name, value in line.items() if name not in (*RATES, "loss")}
    return kept | {name: rates[name] for name in RATES if name in rates}


@dataclass
class StrategyRow:
    """One candidate. Memory is in bytes; batch sizes are those of one process.

    Args:
        trials: the lines of the journal, one for each size that was tried.
        about: what its trials have in common (the `ready` line): numbers of samples, parameters and so on.
        problem: why there is no result; empty: there is one.
        guess: what `zerofit plan` predicted; None: nothing.
    """

    name: str
    sizes: list[int]
    trials: list[dict[str, Any]]
    about: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    launches: int = 0
    seconds: float = 0.0
    guess: Guess | None = None

    @property
    def state(self) -> SearchState:
        return SearchState(self.sizes, list(map(fact_of, self.trials)))

    @property
    def largest(self) -> int:
        """The largest batch that fits; 0: none does, or it is not known."""
        return 0 if self.problem else self.state.fits

    @property
    def fails(self) -> dict[str, Any] | None:
        """The trial of the smallest batch that does not fit; None: there is none."""
        fails = self.state.fails
        lines = [line for line in self.trials if line["size"] == fails and line["outcome"] != "fits"]
        return max(lines, key=lambda line: line["fresh"], default=None)

    @property
    def is_confirmed(self) -> bool:
        """Whether both sides of the limit were tried in fresh processes."""
        state = self.state
        sides = [size for size in (state.fits, state.fails) if size]
        return state.is_bracketed and all(map(state.is_confirmed, sides))

    def at(self, size: int | None) -> dict[str, Any] | None:
        """The trial of a size that fits, from a fresh process if there is one."""
        lines = [line for line in self.trials if line["size"] == size and line["outcome"] == "fits"]
        return max(lines, key=lambda line: line["fresh"], default=None)

    @property
    def fitting(self) -> list[dict[str, Any]]:
        """A trial of each size that fits, ascending."""
        sizes = sorted({line["size"] for line in self.trials if line["size"] <= self.largest})
        return [line for line in map(self.at, sizes) if line]

    @property
    def timed(self) -> list[dict[str, Any]]:
        """A trial of each size that fits and was timed, ascending."""
        return [line for line in self.fitting if "samples_per_s" in line]

    @property
    def best(self) -> dict[str, Any] | None:
        """The trial with the most samples a second."""
        return max(self.timed, key=lambda line: line["samples_per_s"], default=None)

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """The trial of the largest size with a timed evaluation."""
        return next((line for line in reversed(self.fitting) if "evaluation_seconds" in line), None)

    @property
    def epoch_s(self) -> float | None:
        """Seconds of an epoch at the best throughput, with all rows at the greatest length."""
        return self.about["num_samples"] / self.best["samples_per_s"] if self.best and self.about else None

    @property
    def in_fresh_processes(self) -> list[dict[str, Any]]:
        """The trials that were the first of their process, if there are at least two; else all that fit."""
        fresh = [line for line in self.fitting if line["fresh"]]
        return fresh if len(fresh) > 1 else self.fitting

    @property
    def bytes_per_sample(self) -> float | None:
        """Growth of the peak with each sample, from the smallest size to the largest."""
        lines = self.in_fresh_processes
        if len(lines) < 2 or lines[0]["size"] == lines[-1]["size"]:
            return None
        grown = peak_of(lines[-1], with_evaluation=False) - peak_of(lines[0], with_evaluation=False)
        return grown / (lines[-1]["size"] - lines[0]["size"])

    @property
    def held(self) -> dict[str, int]:
        """Bytes of weights and of optimizer state that stay from update to update, on the rank that has most."""
        line = next((line for line in self.fitting if line.get("held")), None)
        return {name: max(rank[name] for rank in line["held"]) for name in line["held"][0]} if line else {}

    @property
    def limit_text(self) -> str:
        """The largest batch in words, and whether a larger one may fit."""
        if self.problem:
            return "failed"
        fails = self.fails
        if not self.largest:
            return f"none ({outcome_text(fails)})" if fails else "not known"
        return f"{self.largest}" if fails else f"{self.largest} or more"


def outcome_text(line: dict[str, Any] | None) -> str:
    """Why a size does not fit, in words."""
    if line is None:
        return ""
    if line["outcome"] == "timed_out":
        return "timed out"
    phase = f" in {line['phase']}" if line.get("phase") else ""
    return ("out of host memory" if line.get("where") == "host" else "out of memory") + phase


def common_size(rows: list[StrategyRow]) -> int | None:
    """The largest batch that fits under every candidate; those that hold no batch at all are not counted."""
    return min((row.largest for row in rows if row.largest), default=None)


def factor(row: StrategyRow, first: StrategyRow) -> float | None:
    """The largest batch as a multiple of the first row's; None where one of them holds none."""
    return row.largest / first.largest if row.largest and first.largest else None


def speed_up(row: StrategyRow, first: StrategyRow) -> float | None:
    """Samples a second as a multiple of the first row's, each at its best batch."""
    return row.best["samples_per_s"] / first.best["samples_per_s"] if row.best and first.best else None


def rates(line: dict[str, Any]) -> tuple[float, float]:
    """(samples a second of the slowest timed update, of the fastest)."""
    seconds = line.get("seconds") or [1.0]
    samples = line["samples_per_s"] * statistics.median(seconds)
    return samples / max(seconds), samples / min(seconds)


def spread(line: dict[str, Any]) -> str:
    """How far the timed updates lie apart: their range, of the median."""
    low, high = rates(line)
    return f"{(high - low) / line['samples_per_s']:.0%}"


def load_text(line: dict[str, Any]) -> str:
    """The machine's load average before the updates and after them."""
    return " to ".join(f"{load:.1f}" for load in line.get("load") or ()) or "-"


def _is_disturbed(line: dict[str, Any]) -> bool:
    """Whether other programs were at work too while these updates were timed."""
    return max(line.get("load") or [0.0]) > BUSY * max(line.get("cores") or 1, len(line["ranks"]))


def conclusion(rows: list[StrategyRow], variable: SearchVariable = BATCHES) -> str:
    """The results in one to three sentences."""
    failed, rows = [row.name for row in rows if row.problem], [row for row in rows if not row.problem]
    sentences = [*_sentences(rows, variable)] if rows else []
    sentences += [f"{', '.join(failed)}: failed, without a result."] if failed else []
    return " ".join(sentences)


def _sentences(rows: list[StrategyRow], variable: SearchVariable) -> Iterator[str]:
    first, largest = rows[0], max(row.largest for row in rows)
    if not largest:
        names = ", ".join(row.name for row in rows)
        yield f"No {variable.short} fits within this limit under {names}."
        return
    holders = [row for row in rows if row.largest == largest]
    times = factor(holders[0], first)
    against = f", {rounded(times)} times the {first.largest:,} of {first.name}" if times and times != 1 else ""
    holds = f"hold{'s' if len(holders) == 1 else ''} {variable.holds.format(largest)}"
    yield f"{' and '.join(row.name for row in holders)} {holds}{against}."
    timed = [row for row in rows if row.best]
    if timed and variable is BATCHES:
        fastest = max(timed, key=lambda row: row.best["samples_per_s"])
        faster = speed_up(fastest, first)
        against = f", {rounded(faster)} times {first.name} at its best" if faster and fastest is not first else ""
        rate = f"{rounded(fastest.best['samples_per_s'])} samples/s{against}"
        disturbed = [row for row in timed if _is_disturbed(row.best)]
        if disturbed:
            loads = ", ".join(f"{row.name} {load_text(row.best)}" for row in disturbed)
            yield (
                f"No strategy is called the fastest: other programs were at work on the {disturbed[0].best['cores']} "
                f"cores (load average: {loads}). Measure again on a quiet machine."
            )
            return
        yield f"The fastest is {fastest.name} at {fastest.best['size']} per process: {rate}."
        low = rates(fastest.best)[0]
        near = [row.name for row in timed if row is not fastest and rates(row.best)[1] >= low]
        if near:
            yield f"From {' and '.join(near)} it differs by no more than the timed updates do among themselves."
