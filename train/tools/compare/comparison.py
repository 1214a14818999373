"""The comparison itself: launch after launch, until every contender's largest batch is known and confirmed."""

import shutil
from pathlib import Path
from typing import Any

import psutil
import yaml

from train.recipe.errors import UserError
from train.record.terminal import duration, rounded, say
from train.tools.compare.candidates import Candidate
from train.tools.compare.journal import Journal, code_hash, key_of, peak_of
from train.tools.compare.machine import Limits, Machine
from train.tools.compare.results import Row, common_size, fact_of, outcome_text
from train.tools.compare.search import Known, Step, next_step, predict
from train.tools.compare.trial_launch import Ending, TrialLaunch
from train.tools.compare.trial_request import TrialRequest
from train.tools.launches import Trial

MIB = 2**20


class Comparison:
    """All launches of one `zerofit compare`.

    Args:
        options: of compare.
        recipe: the file of the recipe that all trials have.
        output: the folder of journal, trials and report.
    """

    def __init__(
        self, options, candidates: list[Candidate], machine: Machine, limits: Limits, recipe: Path, output: Path
    ):
        self.options, self.candidates, self.machine, self.limits = options, candidates, machine, limits
        self.recipe, self.output = recipe, output
        self.journal = Journal(output / "journal.jsonl")
        self.sizes = options.sizes or list(range(options.granularity, options.max_batch_size + 1, options.granularity))
        code = code_hash()
        self.keys = {candidate.name: self._key(candidate, code) for candidate in candidates}
        self.problems: dict[str, str] = {}

    def run(self) -> None:
        """Launch whatever is not known yet.

        Raises:
            UserError: nothing can be found out under any of them: a mistake in the recipe, or too low a limit.
        """
        if self.journal.end_what_was_left():
            say("goes on where it was interrupted")
        for candidate in self.candidates:
            self._search(candidate)
        if len(self.problems) == len(self.candidates):
            raise UserError(list(dict.fromkeys(self.problems.values())))
        while self._try_what_is_missing():
            for candidate in self.candidates:
                if candidate.name not in self.problems:
                    self._search(candidate, again=True)

    def _try_what_is_missing(self) -> bool:
        """Try the largest size that all hold, in fresh processes, and sizes that were named; whether a limit moved."""
        before = [row.largest for row in self.rows()]
        common = common_size(self.rows())
        for candidate, row in zip(self.candidates, self.rows()):
            missing = {size for size in self.options.sizes or [] if size < row.largest and not row.at(size)}
            if common and row.largest and not (row.at(common) or {}).get("fresh"):
                missing.add(common)
            for size in sorted(missing):
                step = Step(size, alone=True)
                say(f"{candidate.name}: {size} is missing" + (", which all hold" if size == common else ""))
                ending = self._launch(candidate, step)
                problem = self._problem(step, ending)
                if problem:
                    self.problems[candidate.name] = problem
        return before != [row.largest for row in self.rows()]

    def rows(self) -> list[Row]:
        """What is known of each contender."""
        found = []
        for candidate in self.candidates:
            key = self.keys[candidate.name]
            ready, ends = self.journal.of(key, "ready"), self.journal.of(key, "end")
            trials = self._trials(candidate)
            found.append(Row(
                candidate.name, self.sizes, trials, ready[-1]["about"] if ready else {},
                self.problems.get(candidate.name, ""), len(self.journal.of(key, "launch")),
                sum(line["seconds"] or 0.0 for line in ends),
            ))  # fmt: skip
        return found

    # ---------------------------------------------------------------------------------------------------------- search

    def _search(self, candidate: Candidate, again: bool = False) -> None:
        died, launched = False, False
        while (step := next_step(self._known(candidate), self.limits.device, self._wanted())) is not None:
            known, launched = self._known(candidate), True
            self._say_step(candidate, known, step)
            ending = self._launch(candidate, step, again=died)
            died = ending.how == "killed" and self._known(candidate).facts == known.facts
            problem = self._problem(step, ending)
            if problem:
                self.problems[candidate.name] = problem
                say(f"{candidate.name}: {problem}")
                return
        if launched or not again:
            self._say_limit(candidate)

    def _known(self, candidate: Candidate) -> Known:
        return Known(self.sizes, list(map(fact_of, self._trials(candidate))))

    def _trials(self, candidate: Candidate) -> list[dict[str, Any]]:
        """What was found for the sizes in question."""
        found = self.journal.sizes(self.keys[candidate.name], 60 * self.options.trial_minutes)
        return [line for line in found if line["size"] in self.sizes]

    def _problem(self, step: Step, ending: Ending) -> str:
        """Why there is no use in going on with a contender; empty if there is."""
        if ending.how == "failed":
            return f"failed at batch size {step.first}. {ending.text}"
        return ending.text if ending.how in ("too_small", "refused") else ""

    def _launch(self, candidate: Candidate, step: Step, again: bool = False) -> Ending:
        known, options = self._known(candidate), self.options
        folder = self.output / "trials" / f"{self.journal.launches + 1:03}-{candidate.folder_name}-{step.first}"
        shutil.rmtree(folder, ignore_errors=True)  # of a comparison that was killed right here
        me = psutil.Process()
        request = TrialRequest(
            sizes=self.sizes, first=step.first, alone=step.alone, steps=options.steps, pid=me.pid,
            started=me.create_time(), fits=known.fits, fails=known.fails, visit=self._wanted(),
            points=known.points, memory_limit=self.limits.device, host_memory_limit=self.limits.host,
        )  # fmt: skip
        flags = (*candidate.flags, *candidate.in_trials, "--per_device_train_batch_size", str(step.first))
        program = ("-m", "train.tools.compare.trial", options.task, str(request.write(folder)))
        trial = Trial(options.task, candidate.config, self.recipe, folder / "run", flags, program)
        launch = TrialLaunch(
            trial, options.num_processes, request, candidate, self.keys[candidate.name], self.journal,
            self.machine, self._hear, 60 * options.trial_minutes, again,
        )  # fmt: skip
        ending = launch.run()
        if ending.how in ("out_of_memory", "timed_out", "killed"):
            what = outcome_text({"outcome": ending.how, "where": ending.where, "phase": ending.phase})
            what = ending.text if ending.how == "killed" else f"{what} ({ending.text})"
            say(f"  {launch.trying:>6}  {what}")
        return ending

    def _wanted(self) -> list[int]:
        """Sizes that no climb is to skip: those that were named, and where other contenders have their limits."""
        return self.sizes if self.options.sizes else [row.largest for row in self.rows() if row.largest]

    def _key(self, candidate: Candidate, code: str) -> str:
        options = self.options
        return key_of(
            code=code, recipe=self.recipe.read_text(), task=options.task, pair=self.pair_of(candidate),
            overrides=candidate.overrides, num_processes=options.num_processes, device=self.limits.device,
            host=self.limits.host, steps=options.steps, machine=self.machine.identity,
        )  # fmt: skip

    def pair_of(self, candidate: Candidate) -> dict[str, Any]:
        """What the contender's YAML and JSON say."""
        pair = {"yaml": yaml.safe_load(candidate.config.read_text()) or {}}
        json_file = (pair["yaml"].get("deepspeed_config") or {}).get("deepspeed_config_file")
        if json_file and Path(json_file).is_file():
            pair["json"] = Path(json_file).read_text()
        return pair

    # ---------------------------------------------------------------------------------------------------------- saying

    def _say_step(self, candidate: Candidate, known: Known, step: Step) -> None:
        predicted = predict(known.points, self.limits.device)
        what = f"from {step.first} up"
        if known.is_bracketed:
            what = f"{step.first} once more, in a fresh process"
        elif known.fails:
            what = f"from {step.first} up, between {known.fits} and {known.fails}"
        expected = f" (the peaks so far predict {predicted})" if predicted and not known.is_bracketed else ""
        say(f"{candidate.name}: {what}{expected}")

    def _hear(self, line: dict[str, Any]) -> None:
        if line["event"] == "fits":
            peak = f"{peak_of(line) / MIB:,.0f}"
            limit = f" of {self.limits.device / MIB:,.0f}" if self.limits.device else ""
            say(f"  {line['size']:>6}  fits: {peak}{limit} MiB, {rounded(line['samples_per_s'])} samples/s")

    def _say_limit(self, candidate: Candidate) -> None:
        row = next(row for row in self.rows() if row.name == candidate.name)
        fails = row.fails
        beyond = f", and {fails['size']} does not" if fails else ", and nothing larger was asked for"
        said = (
            f"holds {row.largest}{beyond}" if row.largest or not fails else f"holds nothing, not even {fails['size']}"
        )
        if fails and fails.get("phase") == "evaluate":
            said += ", for the sake of the evaluation: a smaller per_device_eval_batch_size may help"
        say(f"{candidate.name}: {said} ({row.launches} launches, {duration(row.seconds)})")
