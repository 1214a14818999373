"""The comparison itself: launch after launch, until the largest batch of every candidate is known."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zerofit.estimate.peak import CUBLAS_WORKSPACE_BYTES, CUDA_CONTEXT_BYTES
from zerofit.launch.runs import LaunchedRun
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.places import digest_of_code
from zerofit.record.terminal import duration, log_lines, rounded
from zerofit.tools.compare.candidates import Candidate, CompareOptions, one_batch
from zerofit.tools.compare.results import StrategyRow, common_size, outcome_text, with_rates_of
from zerofit.tools.compare.search import next_size
from zerofit.tools.compare.trial import Journal, key_of, peak_bytes, run_trial
from zerofit.tools.compare.trial_machine import TrialMachine, launch_environment, timed_precision
from zerofit.tools.tool_recipe import read_with_recipe

LARGEST = 4096  # no larger batch is tried, unless it is named
NOT_MEASURED_WITH = (
    "tools/compare/",
    "tools/plan/",
    "tools/verify/",
    "estimate/",
    "cli.py",
)  # code that a trial does not run


class Comparison:
    """All launches of one `zerofit compare`.

    Args:
        options: of compare.
        limit: bytes that a rank may use of its device; None: all of it.
        recipe: the file of the trials' recipe.
        output: the folder of journal, trials and report.
        timer: the real machine, which times updates where devices are simulated; None: nothing is timed there.
    """

    def __init__(
        self,
        options: CompareOptions,
        candidates: list[Candidate],
        *,
        machine: TrialMachine,
        limit: int | None,
        recipe: Path,
        output: Path,
        timer: TrialMachine | None,
    ):
        self.options, self.candidates, self.machine, self.limit = options, candidates, machine, limit
        self.recipe, self.output, self.timer = recipe, output, timer
        self.room = limit or min(device.total for device in machine.devices)  # what a peak may have
        self.journal = Journal(output / "journal.jsonl")
        self.sizes = options.micro_batches or [*range(options.granularity, LARGEST + 1, options.granularity)]
        self.problems: dict[str, str] = {}
        code = digest_of_code(without=NOT_MEASURED_WITH)
        self.keys = {
            candidate.name: key_of(
                code=code,
                recipe=recipe.read_text(encoding="utf-8"),
                task=options.task,
                pair=candidate.contents,
                overrides=candidate.overrides,
                num_processes=options.num_processes,
                device=limit,
                steps=1 if machine.simulated else options.steps,
                machine=machine.identity,
            )
            for candidate in candidates
        }

    def run(self) -> None:
        """Launch until every result is known.

        Raises:
            UserError: no candidate gives a result: a mistake in the recipe.
        """
        if self.journal.end_interrupted_launches():
            log_lines("resumes where it was interrupted")
        for candidate in self.candidates:
            self._predict(candidate)
            self._search(candidate)
        if len(self.problems) == len(self.candidates):
            raise UserError(list(dict.fromkeys(self.problems.values())))
        while self._try_what_is_missing():
            pass
        if self.timer is not None:
            self._time_updates(self.timer)

    def rows(self) -> list[StrategyRow]:
        """The results of each candidate so far."""
        rows = []
        for candidate in self.candidates:
            key, trials = self.keys[candidate.name], [*self._results(candidate).values()]
            if self.machine.simulated:
                timed = self.journal.results(self._timed_key(candidate, self.timer), 0.0) if self.timer else {}
                trials = [with_rates_of(line, timed.get(line["size"])) for line in trials]
            seconds = sum(line["seconds"] or 0.0 for line in self.journal.lines_of(key, "end"))
            rows.append(
                StrategyRow(
                    candidate.name,
                    trials,
                    problem=self.problems.get(candidate.name, ""),
                    launches=len(self.journal.lines_of(key, "launch")),
                    seconds=seconds,
                    predicted=self._predicted(candidate),
                )
            )
        return rows

    # ---------------------------------------------------------------------------------------------------------- search

    def _predict(self, candidate: Candidate) -> None:
        """Let `zerofit plan` predict where the search begins, unless something is known of it."""
        if self.options.micro_batches or self._predicted(candidate) or self._results(candidate):
            return
        try:
            peaks = predict_peaks(candidate, self.options, self.recipe, self.machine, self.room, sizes=self.sizes)
        except Exception as error:  # what cannot be predicted is searched
            log_lines(f"{candidate.name}: not predicted: {first_line(error)}")
        else:
            self.journal.add("prediction", key=self.keys[candidate.name], peaks=peaks)

    def _predicted(self, candidate: Candidate) -> dict[int, int]:
        """{size: peak in bytes} of the sizes that were predicted; empty: there is no prediction."""
        lines = self.journal.lines_of(self.keys[candidate.name], "prediction")
        return dict(map(tuple, lines[-1]["peaks"])) if lines else {}

    def _results(self, candidate: Candidate) -> dict[int, dict[str, Any]]:
        """The journal's results for the sizes that are compared."""
        results = self.journal.results(self.keys[candidate.name], 60 * self.options.trial_minutes)
        return {size: line for size, line in results.items() if size in self.sizes}

    def _search(self, candidate: Candidate) -> None:
        """Find the largest batch of a candidate."""
        row = self._row(candidate)
        guess = max((size for size, peak in row.predicted.items() if peak <= self.room), default=0)
        per_sample = row.predicted_peak(guess + 1) - row.predicted_peak(guess) if len(row.predicted) > 1 else None
        while candidate.name not in self.problems:
            must_try = self.options.micro_batches or [row.largest for row in self.rows() if row.largest]
            size = next_size(self.sizes, self._row(candidate).peaks, self.room, must_try, guess, per_sample=per_sample)
            if size is None:
                break
            self._try(candidate, size)
        self._log_limit(self._row(candidate))

    def _row(self, candidate: Candidate) -> StrategyRow:
        return next(row for row in self.rows() if row.name == candidate.name)

    def _try_what_is_missing(self) -> bool:
        """Try the sizes of --batch_sizes that have no result, and the largest that all hold. Returns whether a limit
        has changed."""
        before = [row.largest for row in self.rows()]
        common = common_size(self.rows())
        for candidate, row in zip(self.candidates, self.rows()):
            wanted = {*(self.options.micro_batches or ()), *filter(None, [common])}
            for size in sorted(size for size in wanted if size < row.largest and not row.at(size)):
                self._try(candidate, size)
            if self._row(candidate).largest != row.largest:  # a smaller size did not fit, and so there is a gap below
                self._search(candidate)
        return before != [row.largest for row in self.rows()]

    def _try(self, candidate: Candidate, size: int) -> None:
        """Measure a size; the result, or why the candidate has none, is known afterwards."""
        steps = 1 if self.machine.simulated else self.options.steps  # whose peak counts, and not its time
        result = self._launch(candidate, size, self.keys[candidate.name], self.machine, steps)
        if result["outcome"] == "killed":
            result = self._launch(candidate, size, self.keys[candidate.name], self.machine, steps)
            if result["outcome"] == "killed":
                result = {**result, "outcome": "out_of_memory", "where": "host"}
        if result["outcome"] in ("refused", "failed"):
            at = f"failed at batch size {size}. " if result["outcome"] == "failed" else ""
            self.problems[candidate.name] = f"{at}{result['text']}"
            log_lines(f"{candidate.name}: {self.problems[candidate.name]}")
            return
        self.journal.add("size", key=self.keys[candidate.name], size=size, **result)
        said = outcome_text(result)
        if result["outcome"] == "fits":
            limit = f" of {self.limit / 2**20:,.0f}" if self.limit else ""
            rate = "" if self.machine.simulated else f", {rounded(result['samples_per_s'])} samples/s"
            said = f"fits: {peak_bytes(result) / 2**20:,.0f}{limit} MiB{rate}"
        log_lines(f"  {candidate.name}  {size:>5}  {said}")

    def _time_updates(self, timer: TrialMachine) -> None:
        """Time updates on the real machine, at the largest batch that all hold and at each candidate's own."""
        for candidate, row in zip(self.candidates, self.rows()):
            if not row.largest:
                continue
            sizes = filter(None, (row.largest, common_size(self.rows())))
            for size in sorted({*sizes} - {line["size"] for line in row.timed}):
                precision, _ = timed_precision(timer, row.about["precision"])
                key, flags = self._timed_key(candidate, timer), ("--precision", precision)
                result = self._launch(candidate, size, key, timer, self.options.steps, flags=flags)
                if result["outcome"] != "fits":
                    said = result.get("text") or outcome_text(result)
                    log_lines(f"{candidate.name}: not timed at {size}. {said}")
                    continue
                self.journal.add("size", key=key, size=size, **result)
                log_lines(
                    f"  {candidate.name}  {size:>5}  {rounded(result['samples_per_s'])} samples/s, in {precision}"
                )

    def _timed_key(self, candidate: Candidate, timer: TrialMachine) -> str:
        return key_of(of=self.keys[candidate.name], steps=self.options.steps, machine=timer.identity)

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
        """One trial, as run_trial returns it. Its launch is in the journal."""
        options = self.options
        launch = self.journal.begin(key=key, candidate=candidate.name, size=size)
        folder = self.output / "trials" / f"{launch['launch']:03}-{candidate.folder_name}-{size}"
        evaluated = candidate.overrides.get("per_device_eval_batch_size")  # its own: trials evaluate one batch of it
        flags = (*candidate.flags, *flags, "--per_device_train_batch_size", str(size))
        flags += ("--max_eval_samples", str(one_batch(options, int(evaluated)))) if evaluated else ()
        result = run_trial(
            LaunchedRun(options.task, candidate.config, self.recipe, folder / "run", flags),
            options.num_processes,
            launch["mark"],
            {"steps": steps, "memory_limit": self.limit if machine is self.machine else None},
            launch_environment(machine, options.num_processes),
            patience_s=60 * options.trial_minutes,
        )
        self.journal.end(launch, result["outcome"], result.pop("seconds_taken"))
        return result

    def _log_limit(self, row: StrategyRow) -> None:
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


def predict_peaks(
    candidate: Candidate, options: CompareOptions, recipe: Path, machine: TrialMachine, limit: int, *, sizes: list[int]
) -> list[tuple[int, int]]:
    """Return (size, peak as the limit counts it) of the sizes that `zerofit plan` looks at to find the largest that
    fits."""
    from zerofit.estimate.read_model import read_planned_model
    from zerofit.tools.plan.layouts import resolve_layout
    from zerofit.tools.plan.plan_options import PlanOptions
    from zerofit.tools.plan.planner import Planner, search
    from zerofit.tools.plan.prediction import Budget

    words = ["--task", options.task, "--config", str(recipe), *candidate.flags]
    words += ["--strategies", str(candidate.config), "--gpu_memory", "1GiB"]
    planned, _ = read_with_recipe(PlanOptions, words, "zerofit plan")
    on_cuda, processes = machine.kind == "cuda", options.num_processes
    model = read_planned_model(planned, options.task, on_gpu=True)
    model = replace(model, cpu_kernels=not (on_cuda or machine.simulated))
    planner = Planner(planned, model, Budget(limit + CUDA_CONTEXT_BYTES, None, processes, processes))
    resolved = resolve_layout(str(candidate.config), planned, model, processes, processes)

    def predict(size: int) -> SimpleNamespace:
        peak = planner.predict(resolved, size).peak
        # The limit counts what an allocator reserves; a simulated one has neither workspaces nor unused blocks.
        counted = peak.needed - (peak.device - peak.reserved) if on_cuda else peak.allocated - CUBLAS_WORKSPACE_BYTES
        return SimpleNamespace(size=size, device_bytes=counted, fits=counted <= limit)

    return [(each.size, each.device_bytes) for each in search(sizes, predict, limit)]
