"""All launches of a comparison: the search for the largest batch, timed updates, and the results as numbers."""

import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zerofit.estimate.peak import CUBLAS_WORKSPACE_BYTES, CUDA_CONTEXT_BYTES
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import digest_of_code
from zerofit.record.terminal import duration, log_lines, rounded
from zerofit.tools.compare.candidates import Candidate, CompareOptions, limit_eval_samples
from zerofit.tools.compare.search import choose_next_size, find_bounds
from zerofit.tools.compare.trial import (
    Journal,
    TrialMachine,
    hash_values,
    peak_bytes,
    run_trial,
    timed_precision,
)
from zerofit.tools.runs import LaunchedRun
from zerofit.tools.tool_recipe import read_with_recipe

BUSY_LOAD_FACTOR = 2  # a load average above this many times the cores (or ranks) means that other programs run, too
TIMING_FIELDS = ("samples_per_s", "tokens_per_s", "seconds", "load", "cores")


@dataclass
class StrategyRow:
    """The results of a candidate. Memory is in bytes; batch sizes are per process.

    Args:
        trials: the result lines of the journal, one per size that was tried, ascending.
        problem: why there is no result; empty: there is one.
        predicted: {size: peak} as predicted by `zerofit plan`.
    """

    name: str
    trials: list[dict[str, Any]]
    problem: str = ""
    launches: int = 0
    seconds: float = 0.0
    predicted: dict[int, int] = field(default_factory=dict)

    @property
    def peaks(self) -> dict[int, int | None]:
        """{size that was tried: peak in bytes; None: it does not fit}."""
        return {line["size"]: peak_bytes(line) if "ranks" in line else None for line in self.trials}

    @property
    def largest(self) -> int:
        """The largest batch that fits; 0: none does, or it is not known."""
        return 0 if self.problem else find_bounds(self.peaks)[0]

    @property
    def smallest_misfit(self) -> dict[str, Any] | None:
        """The trial of the smallest batch that does not fit; None: there is none."""
        return next((line for line in self.trials if line["size"] == find_bounds(self.peaks)[1]), None)

    @property
    def fitting(self) -> list[dict[str, Any]]:
        """The trials of sizes that fit, ascending."""
        return [line for line in self.trials if line["size"] <= self.largest]

    def at(self, size: int | None) -> dict[str, Any] | None:
        """The trial of this size; None: it was not tried, or does not fit."""
        return next((line for line in self.fitting if line["size"] == size), None)

    @property
    def about(self) -> dict[str, Any]:
        """The values that all trials share: numbers of samples, parameters and so on; empty: nothing was measured."""
        return next((line["about"] for line in self.trials if "about" in line), {})

    @property
    def timed(self) -> list[dict[str, Any]]:
        """The trials of sizes that fit and were timed, ascending."""
        return [line for line in self.fitting if "samples_per_s" in line]

    @property
    def best(self) -> dict[str, Any] | None:
        """The trial with the most samples per second; None: nothing was timed."""
        return max(self.timed, key=lambda line: line["samples_per_s"], default=None)

    @property
    def limit_text(self) -> str:
        """The largest batch in words, and whether a larger one may fit."""
        if self.problem:
            return "failed"
        if not self.largest:
            return f"none ({describe_outcome(self.smallest_misfit)})" if self.smallest_misfit else "not known"
        return f"{self.largest}" if self.smallest_misfit else f"{self.largest} or more"

    def predicted_peak(self, size: int) -> float:
        """Interpolate the peak of a size between the two nearest predicted sizes."""
        nearest = sorted(sorted(self.predicted, key=lambda predicted: abs(predicted - size))[:2])
        low = self.predicted[nearest[0]]
        high = self.predicted[nearest[-1]]
        return low + (size - nearest[0]) * (high - low) / max(1, nearest[-1] - nearest[0])


def describe_outcome(line: dict[str, Any]) -> str:
    """Say why a size does not fit, in words."""
    if line["outcome"] == "timed_out":
        return "timed out"
    phase = f" in {line['phase']}" if line.get("phase") else ""
    return ("out of host memory" if line.get("where") == "host" else "out of memory") + phase


def find_common_size(rows: list[StrategyRow]) -> int | None:
    """Return the largest batch that fits under every candidate that holds any batch; None: no candidate holds one."""
    return min((row.largest for row in rows if row.largest), default=None)


def compute_speed_up(row: StrategyRow, first: StrategyRow) -> float | None:
    """Return the row's samples per second divided by those of `first`, each at its best batch; None: one was not
    timed."""
    return row.best["samples_per_s"] / first.best["samples_per_s"] if row.best and first.best else None


def find_rate_range(line: dict[str, Any]) -> tuple[float, float]:
    """Return (samples per second of the slowest timed update, of the fastest)."""
    samples = line["samples_per_s"] * statistics.median(line["seconds"])
    return samples / max(line["seconds"]), samples / min(line["seconds"])


def format_spread(line: dict[str, Any]) -> str:
    """Return the range of the timed updates' rates, as a percentage of the median rate."""
    low, high = find_rate_range(line)
    return f"{(high - low) / line['samples_per_s']:.0%}"


def format_load(line: dict[str, Any]) -> str:
    """Return the machine's load average before and after the timed updates, as text."""
    return " to ".join(f"{load:.1f}" for load in line["load"])


def summarize_results(rows: list[StrategyRow]) -> str:
    """Return the results in one to three sentences."""
    failed = [row.name for row in rows if row.problem]
    rows = [row for row in rows if not row.problem]
    sentences: list[str] = []
    largest = max((row.largest for row in rows), default=0)
    if largest:
        first = rows[0]
        holders = [row for row in rows if row.largest == largest]
        against = ""
        if first.largest not in (0, largest):
            against = f", {rounded(largest / first.largest)} times the {first.largest:,} of {first.name}"
        holds = f"{' and '.join(row.name for row in holders)} {'holds' if len(holders) == 1 else 'hold'}"
        sentences.append(f"{holds} the largest batch, {largest:,} per process{against}.")
    elif rows:
        sentences.append(f"No batch fits within this limit under {', '.join(row.name for row in rows)}.")
    timed = [(row, row.best) for row in rows if row.best]
    disturbed = [
        (row, line)
        for row, line in timed
        if max(line["load"]) > BUSY_LOAD_FACTOR * max(line["cores"], len(line["ranks"]))
    ]
    if disturbed:
        loads = ", ".join(f"{row.name} {format_load(line)}" for row, line in disturbed)
        sentences.append(
            f"No strategy is called the fastest: other programs were at work on the {disturbed[0][1]['cores']} "
            f"cores (load average: {loads}). Measure again on a quiet machine."
        )
    elif timed:
        fastest, best = max(timed, key=lambda pair: pair[1]["samples_per_s"])
        speed_up = compute_speed_up(fastest, rows[0])
        against = (
            f", {rounded(speed_up)} times {rows[0].name} at its best" if speed_up and fastest is not rows[0] else ""
        )
        rate = f"{rounded(best['samples_per_s'])} samples/s{against}"
        sentences.append(f"The fastest is {fastest.name} at {best['size']} per process: {rate}.")
        low = find_rate_range(best)[0]
        similar = [row.name for row, line in timed if row is not fastest and find_rate_range(line)[1] >= low]
        if similar:
            sentences.append(
                f"From {' and '.join(similar)} it differs by no more than the timed updates do among themselves."
            )
    if failed:
        sentences.append(f"{', '.join(failed)}: failed, without a result.")
    return " ".join(sentences)


MAX_BATCH_SIZE = 4096  # no larger batch is tried, unless --batch_sizes names it
# a change of this code leaves the results of trials valid
CODE_OUTSIDE_TRIALS = ("tools/compare/", "tools/plan/", "tools/verify.py", "estimate/", "cli.py")


@dataclass
class Comparison:
    """All launches of one `zerofit compare`.

    Args:
        limit: bytes that a rank may use of its device; None: all of it.
        recipe: the file of the trials' recipe.
        output: the folder of journal, trials and report.
        timer: the machine that times updates where devices are simulated; None: devices are real, or nothing is timed.
    """

    options: CompareOptions
    candidates: list[Candidate]
    machine: TrialMachine
    limit: int | None
    recipe: Path
    output: Path
    timer: TrialMachine | None

    def __post_init__(self) -> None:
        options = self.options
        machine = self.machine
        self.max_bytes = self.limit or min(device.total for device in machine.devices)  # largest peak that fits
        self.journal = Journal(self.output / "journal.jsonl")
        self.sizes = options.micro_batches or [*range(options.granularity, MAX_BATCH_SIZE + 1, options.granularity)]
        self.problems: dict[str, str] = {}
        code = digest_of_code(without=CODE_OUTSIDE_TRIALS)
        self.keys = {
            candidate.name: hash_values(
                code=code,
                recipe=self.recipe.read_text(encoding="utf-8"),
                task=options.task,
                pair=candidate.contents,
                overrides=candidate.overrides,
                num_processes=options.num_processes,
                device=self.limit,
                steps=1 if machine.simulated else options.steps,
                machine=machine.identity,
            )
            for candidate in self.candidates
        }

    def run(self) -> None:
        """Launch trials until every result is known. Raises UserError: no candidate has a result."""
        if self.journal.end_interrupted_launches():
            log_lines("resumes where it was interrupted")
        for candidate in self.candidates:
            self._search(candidate)
        if len(self.problems) == len(self.candidates):
            raise UserError(list(dict.fromkeys(self.problems.values())))
        while True:  # try sizes of --batch_sizes without a result, and the common size, until no limit changes
            rows = self.rows()
            common = find_common_size(rows)
            for candidate, row in zip(self.candidates, rows):
                wanted = {*(self.options.micro_batches or ()), *filter(None, [common])}
                for size in sorted(size for size in wanted if size < row.largest and not row.at(size)):
                    self._try(candidate, size)
                if self._row(candidate).largest != row.largest:  # a smaller size did not fit: there is a gap below
                    self._search(candidate)
            if [row.largest for row in self.rows()] == [row.largest for row in rows]:
                break
        if self.timer is not None:
            self._time_updates(self.timer)

    def rows(self) -> list[StrategyRow]:
        """Return the results of each candidate so far."""
        return [self._row(candidate) for candidate in self.candidates]

    def _row(self, candidate: Candidate) -> StrategyRow:
        key = self.keys[candidate.name]
        predictions = self.journal.lines_of(key, "prediction")
        results = self.journal.results(key, 60 * self.options.trial_minutes)
        trials = [line for size, line in results.items() if size in self.sizes]
        if self.machine.simulated:  # rates are those of the trials that were timed at these sizes
            timed = self.journal.results(self._timed_key(candidate, self.timer), 0.0) if self.timer else {}
            trials = [
                {name: value for name, value in line.items() if name not in (*TIMING_FIELDS, "loss")}
                for line in trials
            ]
            for line in trials:
                line |= {name: value for name, value in timed.get(line["size"], {}).items() if name in TIMING_FIELDS}
        return StrategyRow(
            candidate.name,
            trials,
            problem=self.problems.get(candidate.name, ""),
            launches=len(self.journal.lines_of(key, "launch")),
            seconds=sum(line["seconds"] or 0.0 for line in self.journal.lines_of(key, "end")),
            predicted=dict(map(tuple, predictions[-1]["peaks"])) if predictions else {},
        )

    # ---------------------------------------------------------------------------------------------------------- search

    def _search(self, candidate: Candidate) -> None:
        """Find the largest batch of a candidate, and log it. `zerofit plan` predicts where the search begins, unless
        the journal has results."""
        row = self._row(candidate)
        if not (self.options.micro_batches or row.predicted or row.trials):
            try:
                peaks = predict_peaks(
                    candidate, self.options, self.recipe, self.machine, self.max_bytes, sizes=self.sizes
                )
            except Exception as error:  # what cannot be predicted is searched
                log_lines(f"{candidate.name}: not predicted: {first_line(error)}")
            else:
                self.journal.add("prediction", key=self.keys[candidate.name], peaks=peaks)
                row = self._row(candidate)
        guess = max((size for size, peak in row.predicted.items() if peak <= self.max_bytes), default=0)
        per_sample = row.predicted_peak(guess + 1) - row.predicted_peak(guess) if len(row.predicted) > 1 else None
        while candidate.name not in self.problems:
            size = choose_next_size(
                self.sizes, self._row(candidate).peaks, self.max_bytes, guess, per_sample=per_sample
            )
            if size is None:
                break
            self._try(candidate, size)
        row = self._row(candidate)
        if row.problem:
            return
        fails = row.smallest_misfit
        beyond = f"and {fails['size']} does not" if fails else "and no larger batch size was asked for"
        result = f"holds {row.largest}, {beyond}"
        if fails and not row.largest:
            result = f"holds nothing, not even {fails['size']}"
        if fails and fails.get("phase") == "evaluate":
            result += " because of the evaluation: a smaller per_device_eval_batch_size may help"
        log_lines(f"{row.name}: {result} ({row.launches} launches, {duration(row.seconds)})")

    def _try(self, candidate: Candidate, size: int) -> None:
        """Measure a size. The result goes into the journal, or the reason why there is none into `problems`."""
        steps = 1 if self.machine.simulated else self.options.steps  # simulated: only the peak counts
        key = self.keys[candidate.name]
        result = self._launch(candidate, size, key, self.machine, steps)
        if result["outcome"] == "killed":  # once more: what kills it twice is taken for a lack of host memory
            result = self._launch(candidate, size, key, self.machine, steps)
            if result["outcome"] == "killed":
                result = {**result, "outcome": "out_of_memory", "where": "host"}
        if result["outcome"] in ("refused", "failed"):
            at = f"failed at batch size {size}. " if result["outcome"] == "failed" else ""
            self.problems[candidate.name] = f"{at}{result['text']}"
            log_lines(f"{candidate.name}: {self.problems[candidate.name]}")
            return
        self.journal.add("size", key=key, size=size, **result)
        message = describe_outcome(result)
        if result["outcome"] == "fits":
            limit = f" of {self.limit / 2**20:,.0f}" if self.limit else ""
            rate = "" if self.machine.simulated else f", {rounded(result['samples_per_s'])} samples/s"
            message = f"fits: {peak_bytes(result) / 2**20:,.0f}{limit} MiB{rate}"
        log_lines(f"  {candidate.name}  {size:>5}  {message}")

    def _time_updates(self, timer: TrialMachine) -> None:
        """Time updates on the real machine, at the common size and at each candidate's largest batch."""
        for candidate, row in zip(self.candidates, self.rows()):
            if not row.largest:
                continue
            sizes = filter(None, (row.largest, find_common_size(self.rows())))
            for size in sorted({*sizes} - {line["size"] for line in row.timed}):
                precision, _ = timed_precision(timer, row.about["precision"])
                key = self._timed_key(candidate, timer)
                flags = ("--precision", precision)
                result = self._launch(candidate, size, key, timer, self.options.steps, flags=flags)
                if result["outcome"] != "fits":
                    message = result.get("text") or describe_outcome(result)
                    log_lines(f"{candidate.name}: not timed at {size}. {message}")
                    continue
                self.journal.add("size", key=key, size=size, **result)
                log_lines(
                    f"  {candidate.name}  {size:>5}  {rounded(result['samples_per_s'])} samples/s, in {precision}"
                )

    def _timed_key(self, candidate: Candidate, timer: TrialMachine) -> str:
        return hash_values(of=self.keys[candidate.name], steps=self.options.steps, machine=timer.identity)

    def _launch(
        self,
        candidate: Candidate,
        size: int,
        key: str,
        machine: TrialMachine,
        steps: int,
        *,
        flags: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """Launch a trial and write its begin and end into the journal. Returns what run_trial returns."""
        options = self.options
        launch = self.journal.begin(key=key, candidate=candidate.name, size=size)
        folder = self.output / "trials" / f"{launch['launch']:03}-{candidate.folder_name}-{size}"
        eval_batch = candidate.overrides.get("per_device_eval_batch_size")  # a trial evaluates one such batch
        flags = (*candidate.flags, *flags, "--per_device_train_batch_size", str(size))
        flags += ("--max_eval_samples", str(limit_eval_samples(options, int(eval_batch)))) if eval_batch else ()
        result = run_trial(
            LaunchedRun(options.task, candidate.config, self.recipe, folder / "run", flags),
            options.num_processes,
            launch["mark"],
            {"steps": steps, "memory_limit": self.limit if machine is self.machine else None},
            machine.variables(options.num_processes),
            patience_s=60 * options.trial_minutes,
        )
        self.journal.end(launch, result["outcome"], result.pop("seconds_taken"))
        return result


def predict_peaks(
    candidate: Candidate, options: CompareOptions, recipe: Path, machine: TrialMachine, limit: int, *, sizes: list[int]
) -> list[tuple[int, int]]:
    """Return [(size, predicted peak in bytes)] of the sizes that `zerofit plan` tries to find the largest that fits
    `limit`."""
    from zerofit.estimate.planned_model import read_planned_model
    from zerofit.tools.plan.plan_options import PlanOptions, resolve_layout
    from zerofit.tools.plan.planner import MemoryBudget, Planner, search

    words = ["--task", options.task, "--config", str(recipe), *candidate.flags]
    words += ["--strategies", str(candidate.config), "--gpu_memory", "1GiB"]
    planned, _ = read_with_recipe(PlanOptions, words, "zerofit plan")
    on_cuda = machine.kind == "cuda"
    processes = options.num_processes
    model = read_planned_model(planned, options.task, on_gpu=True)
    model = replace(model, cpu_kernels=not (on_cuda or machine.simulated))
    planner = Planner(planned, model, MemoryBudget(limit + CUDA_CONTEXT_BYTES, None, processes, processes))
    resolved = resolve_layout(str(candidate.config), planned, model, processes, processes)

    def predict(size: int) -> SimpleNamespace:
        peak = planner.predict(resolved, size).peak
        # The limit counts what an allocator reserves; a simulated one has neither workspaces nor unused blocks.
        counted_bytes = (
            peak.needed - (peak.device - peak.reserved) if on_cuda else peak.allocated - CUBLAS_WORKSPACE_BYTES
        )
        return SimpleNamespace(size=size, device_bytes=counted_bytes, fits=counted_bytes <= limit)

    return [(prediction.size, prediction.device_bytes) for prediction in search(sizes, predict, limit)]
