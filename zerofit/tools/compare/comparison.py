"""The comparison itself: launch after launch, until the largest batch, or the longest rows, of every candidate are
known and confirmed."""

import shutil
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from zerofit.launch.runs import LaunchedRun
from zerofit.recipe.errors import UserError
from zerofit.recipe.parsing import read_yaml
from zerofit.recipe.places import digest_of_code
from zerofit.record.terminal import duration, rounded, say
from zerofit.tools.compare.candidates import Candidate, one_batch
from zerofit.tools.compare.guess import Guess, guess
from zerofit.tools.compare.results import StrategyRow, common_size, fact_of, outcome_text, with_rates_of
from zerofit.tools.compare.search import SearchState, Step, next_step
from zerofit.tools.compare.trial_files import NOT_MEASURED_WITH, TrialJournal, TrialRequest, key_of, peak_of
from zerofit.tools.compare.trial_launch import TrialLaunch, TrialOutcome
from zerofit.tools.compare.trial_machine import Limits, Timer, TrialMachine

MIB = 2**20
LARGEST = 4096  # no larger batch is tried, unless it is named


class Comparison:
    """All launches of one `zerofit compare`.

    Args:
        options: of compare.
        recipe: the file of the trials' recipe.
        output: the folder of journal, trials and report.
        timer: times updates where the machine is simulated; None: nothing is timed there.
    """

    def __init__(
        self,
        options,
        candidates: list[Candidate],
        machine: TrialMachine,
        limits: Limits,
        recipe: Path,
        output: Path,
        timer: Timer | None = None,
    ):
        self.options, self.candidates, self.machine, self.limits = options, candidates, machine, limits
        self.recipe, self.output = recipe, output
        self.journal = TrialJournal(output / "journal.jsonl")
        self.variable = options.variable
        self.steps = 1 if machine.simulated else options.steps  # whose peak counts, and not its time
        self.timer = timer
        self.sizes = options.sizes or [*range(options.granularity, LARGEST + 1, options.granularity)]
        self.named = [] if options.lengths else options.sizes or []  # each of them is tried, if it is not too large
        code = digest_of_code(without=NOT_MEASURED_WITH)
        self.keys = {candidate.name: self._key(candidate, code) for candidate in candidates}
        self.problems: dict[str, str] = {}

    def run(self) -> None:
        """Launch until every result is known.

        Raises:
            UserError: no candidate gives a result: a mistake in the recipe, or too low a limit.
        """
        if self.journal.end_interrupted_launches():
            say("resumes where it was interrupted")
        self._guess()
        for candidate in self.candidates:
            self._search(candidate)
        if len(self.problems) == len(self.candidates):
            raise UserError(list(dict.fromkeys(self.problems.values())))
        while self._try_what_is_missing():
            for candidate in self.candidates:
                if candidate.name not in self.problems:
                    self._search(candidate, again=True)
        if self.timer is not None:
            for candidate, row in zip(self.candidates, self.rows()):
                self._time(candidate, row)

    def _guess(self) -> None:
        """Predict what is searched and was not predicted before."""
        new = [each for each in self.candidates if not self._guess_of(each) and not self._trials(each)]
        limit = self.limits.device or min((device.total for device in self.machine.devices), default=None)
        if self.named or not new or limit is None:
            return
        say("predicts where to begin, as zerofit plan does")
        guesses = guess(
            {
                "task": self.options.task,
                "recipe": str(self.recipe),
                "num_processes": self.options.num_processes,
                "kind": self.machine.kind,
                "limit": limit,
                "sizes": self.sizes,
                "by_length": bool(self.options.lengths),
                "has_gpu_kernels": self.machine.kind == "cuda" or bool(self.machine.simulated),
                "candidates": {each.name: [str(each.config), each.flags] for each in new},
            }
        )
        for candidate in new:
            if candidate.name in guesses:
                self.journal.add("guess", key=self.keys[candidate.name], **asdict(guesses[candidate.name]))

    def _guess_of(self, candidate: Candidate) -> Guess | None:
        lines = self.journal.of(self.keys[candidate.name], "guess")
        return Guess(**{field.name: lines[-1][field.name] for field in fields(Guess)}) if lines else None

    def _try_what_is_missing(self) -> bool:
        """Try the sizes of --batch_sizes that have no result, and the largest that all hold, in fresh processes.

        Returns whether a limit has changed.
        """
        before = [row.largest for row in self.rows()]
        common = common_size(self.rows())
        for candidate, row in zip(self.candidates, self.rows()):
            missing = {size for size in self.named if size < row.largest and not row.at(size)}
            if common and row.largest and not (row.at(common) or {}).get("fresh"):
                missing.add(common)
            for size in sorted(missing):
                step = Step(size, only_first=True)
                say(f"{candidate.name}: from {size} up, " + ("which all hold" if size == common else "as asked for"))
                ending = self._launch(candidate, step)
                problem = self._problem(step, ending)
                if problem:
                    self.problems[candidate.name] = problem
        return before != [row.largest for row in self.rows()]

    def rows(self) -> list[StrategyRow]:
        """The results of each candidate so far."""
        rows = []
        for candidate in self.candidates:
            key = self.keys[candidate.name]
            ready, ends = self.journal.of(key, "ready"), self.journal.of(key, "end")
            trials = self._trials(candidate)
            if self.machine.simulated:
                timed = self.journal.of(self._timed_key(candidate), "size") if self.timer else []
                trials = [with_rates_of(line, timed) for line in trials]
            rows.append(
                StrategyRow(
                    candidate.name,
                    self.sizes,
                    trials,
                    ready[-1]["about"] if ready else {},
                    self.problems.get(candidate.name, ""),
                    len(self.journal.of(key, "launch")),
                    sum(line["seconds"] or 0.0 for line in ends),
                    self._guess_of(candidate),
                )
            )
        return rows

    # ---------------------------------------------------------------------------------------------------------- search

    def _search(self, candidate: Candidate, again: bool = False) -> None:
        died, launched = False, False
        while (step := self._next_step(candidate)) is not None:
            state, launched = self._state(candidate), True
            self._say_step(candidate, state, step)
            ending = self._launch(candidate, step, again=died)
            died = ending.how == "killed" and self._state(candidate).facts == state.facts
            problem = self._problem(step, ending)
            if problem:
                self.problems[candidate.name] = problem
                say(f"{candidate.name}: {problem}")
                return
        if launched or not again:
            self._say_limit(candidate)

    def _time(self, candidate: Candidate, row: StrategyRow) -> None:
        """Time updates on this machine, at the largest batch that all hold and at the candidate's own."""
        sizes = sorted({row.largest, common_size(self.rows())} - {0, None} - {line["size"] for line in row.timed})
        if not sizes:
            return
        precision, _ = self.timer.precision(row.about["precision"])
        say(f"{candidate.name}: timed at {' and '.join(map(str, sizes))}, in {precision}")
        request = TrialRequest(sizes=sizes, first=sizes[0], only_first=False, steps=self.options.steps, must_try=sizes)
        ending = self._run(
            candidate, request, self._timed_key(candidate), self.timer.machine, ("--precision", precision)
        )
        if ending.how != "done":
            say(f"{candidate.name}: not timed. {ending.text}")

    def _timed_key(self, candidate: Candidate) -> str:
        return key_of(of=self.keys[candidate.name], steps=self.options.steps, machine=self.timer.machine.identity)

    def _next_step(self, candidate: Candidate) -> Step | None:
        predicted = self._guess_of(candidate)
        more = (predicted.size, predicted.per_sample) if predicted else ()
        return next_step(self._state(candidate), self.limits.device, self._sizes_to_try(), *more)

    def _state(self, candidate: Candidate) -> SearchState:
        return SearchState(self.sizes, list(map(fact_of, self._trials(candidate))))

    def _trials(self, candidate: Candidate) -> list[dict[str, Any]]:
        """The journal's results for the sizes that are compared."""
        results = self.journal.sizes(self.keys[candidate.name], 60 * self.options.trial_minutes)
        return [line for line in results if line["size"] in self.sizes]

    def _problem(self, step: Step, ending: TrialOutcome) -> str:
        """Why a candidate cannot be tried any further; empty if it can."""
        if ending.how == "failed":
            return f"failed at {self.variable.size} {step.first}. {ending.text}"
        return ending.text if ending.how in ("too_small", "refused") else ""

    def _launch(self, candidate: Candidate, step: Step, again: bool = False) -> TrialOutcome:
        state, options, predicted = self._state(candidate), self.options, self._guess_of(candidate)
        request = TrialRequest(
            sizes=self.sizes,
            first=step.first,
            only_first=step.only_first,
            steps=self.steps,
            fits=state.fits,
            fails=state.fails,
            must_try=self._sizes_to_try(),
            points=state.points,
            per_sample=predicted and predicted.per_sample,
            memory_limit=self.limits.device,
            by_length=bool(options.lengths),
        )
        return self._run(candidate, request, self.keys[candidate.name], self.machine, again=again)

    def _run(
        self,
        candidate: Candidate,
        request: TrialRequest,
        key: str,
        machine: TrialMachine,
        flags: tuple[str, ...] = (),
        again: bool = False,
    ) -> TrialOutcome:
        options = self.options
        folder = self.output / "trials" / f"{self.journal.launches + 1:03}-{candidate.folder_name}-{request.first}"
        shutil.rmtree(folder, ignore_errors=True)  # left by a comparison that was killed at this point
        evaluated = candidate.overrides.get("per_device_eval_batch_size")  # its own: trials evaluate one batch of it
        flags = (*candidate.flags, *flags, f"--{self.variable.option}", str(request.first))
        flags += ("--max_eval_samples", str(one_batch(options, int(evaluated)))) if evaluated else ()
        program = ("-m", "zerofit.tools.compare.trial", options.task, str(request.write(folder)))
        trial = LaunchedRun(options.task, candidate.config, self.recipe, folder / "run", flags, program)
        answered = partial(self._report, timed=machine is not self.machine)
        launch = TrialLaunch(
            trial,
            options.num_processes,
            request,
            candidate,
            key,
            self.journal,
            machine,
            answered,
            60 * options.trial_minutes,
            again,
        )
        ending = launch.run()
        if ending.how in ("out_of_memory", "timed_out", "killed"):
            what = outcome_text({"outcome": ending.how, "where": ending.where, "phase": ending.phase})
            what = ending.text if ending.how == "killed" else f"{what} ({ending.text})"
            say(f"  {launch.trying:>6}  {what}")
        return ending

    def _sizes_to_try(self) -> list[int]:
        """Sizes that a search must not skip: those that were named, and the largest of the other candidates."""
        return self.named or [row.largest for row in self.rows() if row.largest]

    def _key(self, candidate: Candidate, code: str) -> str:
        options = self.options
        return key_of(
            code=code,
            recipe=self.recipe.read_text(),
            task=options.task,
            pair=self.pair_of(candidate),
            overrides=candidate.overrides,
            num_processes=options.num_processes,
            device=self.limits.device,
            steps=self.steps,
            machine=self.machine.identity,
        )

    def pair_of(self, candidate: Candidate) -> dict[str, Any]:
        """The contents of the candidate's YAML and JSON."""
        pair = {"yaml": read_yaml(candidate.config) or {}}
        json_file = (pair["yaml"].get("deepspeed_config") or {}).get("deepspeed_config_file")
        if json_file and Path(json_file).is_file():
            pair["json"] = Path(json_file).read_text()
        return pair

    # ------------------------------------------------------------------------------------------------------- messages

    def _say_step(self, candidate: Candidate, state: SearchState, step: Step) -> None:
        between = f", between {state.fits} and {state.fails}" if state.fails else ""
        what = f"{step.first} again, in a fresh process" if state.is_bracketed else f"from {step.first} up{between}"
        say(f"{candidate.name}: {what}")

    def _report(self, line: dict[str, Any], timed: bool) -> None:
        """Tell of a size that fits: its peak (unless only its time counts), and its rate where devices are real."""
        if line["event"] == "fits":
            limit = f" of {self.limits.device / MIB:,.0f}" if self.limits.device else ""
            peak = [] if timed else [f"fits: {peak_of(line) / MIB:,.0f}{limit} MiB"]
            rate = [f"{rounded(line['samples_per_s'])} samples/s"] if timed or not self.machine.simulated else []
            say(f"  {line['size']:>6}  {', '.join(peak + rate)}")

    def _say_limit(self, candidate: Candidate) -> None:
        row = next(row for row in self.rows() if row.name == candidate.name)
        fails = row.fails
        beyond = f", and {fails['size']} does not" if fails else f", and no larger {self.variable.size} was asked for"
        result = (
            f"holds {row.largest}{beyond}" if row.largest or not fails else f"holds nothing, not even {fails['size']}"
        )
        if fails and fails.get("phase") == "evaluate":
            result += " because of the evaluation: a smaller per_device_eval_batch_size may help"
        say(f"{candidate.name}: {result} ({row.launches} launches, {duration(row.seconds)})")
