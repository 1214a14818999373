"""The proof itself: the launches one after another, what they gave, and the report."""

import math
import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

from train.recipe import UserError
from train.record.jsonl import JsonlFile
from train.record.terminal import duration, say, table
from train.tools.launches import Trial, failure, launched, mistake
from train.tools.verify.killing import Killed, alternating, num_processes_text, run_and_kill, spread_moments
from train.tools.verify.record_comparison import FIGURES, Difference, Ledger, compare_metrics, compare_samples

REFERENCE = "reference"


@dataclass
class Outcome:
    """What a run gave, beside the run that it must equal.

    Args:
        num_processes: of its launch, or of each of its launches.
        failure: why there is nothing to compare; None: there is.
        killed: how it was disturbed; None: not at all.
    """

    strategy: str
    num_processes: list[int]
    failure: str | None = None
    difference: Difference | None = None
    ledger: Ledger | None = None
    killed: Killed | None = None

    def is_well(self, tolerance: float) -> bool:
        """Whether it equals the other, after as many kills as there were to be (at least one)."""
        disturbed = self.killed is None or self.killed.kills > 0
        same = self.ledger is not None and self.ledger.is_same and self.difference.within(tolerance)
        return self.failure is None and same and disturbed

    def problems(self, tolerance: float) -> list[str]:
        """What is wrong, in words; empty if nothing is."""
        if self.failure:
            return [self.failure]
        if self.is_well(tolerance):
            return []
        said = list(self.difference.problems)
        if not self.difference.within(tolerance):
            far = [FIGURES[name] for name, value in self.difference.largest.items() if value > tolerance]
            said += [f"it differs by more than {tolerance:g} in {' and '.join(far)}"] if far else []
            odd = [FIGURES[name] for name, value in self.difference.largest.items() if math.isnan(value)]
            said += [f"in some update {' and '.join(odd)} is no number"] if odd else []
        if self.ledger.elsewhere:
            said.append(f"{self.ledger.elsewhere} updates are not made of the samples that they should be made of")
        if self.killed is not None and not self.killed.kills:
            said.append("no kill came in time: give it more --updates")
        return said


class Proof:
    """All launches of one `zerofit verify`.

    Args:
        options: of verify; its tolerance is set.
        configs: {strategy: accelerate YAML}.
        output: the folder of all runs.
        recipe: the shortened recipe's file.
        save_steps: updates between two checkpoints of a run that is killed.
    """

    def __init__(self, options, configs: dict[str, Path], output: Path, recipe: Path, save_steps: int):
        self.options, self.configs, self.output, self.recipe = options, configs, output, recipe
        self.save_flags = ("--save_steps", str(save_steps), "--save_total_limit", "2")
        self.reference: Outcome | None = None
        self.agreement: list[Outcome] = []
        self.resumed: list[Outcome] = []
        self.began = time.monotonic()

    def run(self) -> None:
        """Launch everything. Without a reference there is nothing to compare with, and that is all then.

        Raises:
            UserError: the reference cannot be trained as the recipe says.
        """
        shutil.rmtree(self.logs, ignore_errors=True)
        self.reference = self._undisturbed(REFERENCE, self.options.reference, 1)
        if self.reference.failure:
            return
        for name in self.options.names:
            outcome = self._undisturbed(_folder_name(name), name, self.options.num_processes)
            self.agreement.append(outcome)
            if self.options.kills and not outcome.failure:
                self.resumed.append(self._disturbed(name))

    @property
    def logs(self) -> Path:
        return self.output / "logs"

    def _trial(self, folder: str, strategy: str, flags: tuple[str, ...] = ()) -> Trial:
        trial = Trial(self.options.task, self.configs[strategy], self.recipe, self.output / folder, flags)
        shutil.rmtree(trial.output, ignore_errors=True)  # of an earlier proof
        return trial

    def _undisturbed(self, folder: str, strategy: str, num_processes: int) -> Outcome:
        trial, about = self._trial(folder, strategy), f"{strategy}, {num_processes_text(num_processes)}"
        command = trial.command(num_processes)
        with launched(command, trial.output, self.logs / f"{folder}.log") as launch:
            how = launch.wait(60 * self.options.launch_minutes)
            failed, refused, seconds = failure(launch, how), mistake(launch), launch.seconds
        if failed:
            failed = f"{failed}\n  by itself: {shlex.join(command)}"
            say(f"{about}: failed")
            if folder == REFERENCE and refused:
                raise UserError(f"{about}: {refused}")
            return Outcome(strategy, [num_processes], failed)
        say(f"{about}: {self.options.updates} updates, {seconds:.0f} s")
        return self._compared(Outcome(strategy, [num_processes]), trial.output, self.output / REFERENCE)

    def _disturbed(self, strategy: str) -> Outcome:
        options, folder = self.options, _folder_name(strategy)
        trial = self._trial(f"{folder}-killed", strategy, self.save_flags)
        random = Random(f"{options.kill_seed} {folder}")
        update_s = median(line["seconds"] for line in _metrics(self.output / folder))
        killed = run_and_kill(
            trial, self.logs, spread_moments(options.kills, options.updates, update_s, random),
            alternating(options.num_processes, options.resumed_processes), 60 * options.launch_minutes,
            say=lambda text: say(f"{strategy}, {text}"),
        )  # fmt: skip
        outcome = Outcome(strategy, killed.processes, killed.failure, killed=killed)
        return outcome if killed.failure else self._compared(outcome, trial.output, self.output / folder)

    def _compared(self, outcome: Outcome, ours: Path, other: Path) -> Outcome:
        outcome.difference = compare_metrics(_metrics(ours), _metrics(other), self.options.updates)
        outcome.ledger = compare_samples(_samples(ours), _samples(other))
        return outcome

    @property
    def is_well(self) -> bool:
        """Whether every run was made, and equals what it must equal."""
        wanted = len(self.options.names)
        all_there = len(self.agreement) == wanted and len(self.resumed) == (wanted if self.options.kills else 0)
        return all_there and all(each.is_well(self.options.tolerance) for each in self._all())

    def _all(self) -> list[Outcome]:
        return [self.reference, *self.agreement, *self.resumed]

    def report(self, width: int | None = None) -> str:
        """The tables, what is wrong, and the verdict, for a screen of this width."""
        tolerance, blocks = self.options.tolerance, []
        if self.agreement:
            rows = [_row_of_agreement(each, tolerance) for each in self.agreement]
            blocks.append(f"each against one process ({self.options.reference}): the largest relative differences\n"
                          + table([HEAD_OF_AGREEMENT, *rows], width))  # fmt: skip
        if self.resumed:
            rows = [_row_of_resumes(each, tolerance) for each in self.resumed]
            blocks.append("killed and resumed, each against itself undisturbed\n"
                          + table([HEAD_OF_RESUMES, *rows], width))  # fmt: skip
        for each in self._all():
            disturbed = ", killed and resumed" if each.killed else ""
            said = [f"{each.strategy}{disturbed}: {problem}" for problem in each.problems(tolerance)]
            blocks += ["\n".join(said)] if said else []
        return "\n\n".join([*blocks, self._verdict()])

    def _verdict(self) -> str:
        after = f"{self.options.updates} updates, {duration(time.monotonic() - self.began)}"
        if not self.is_well:
            return f"NOT verified ({after}). The runs and their logs are in {self.output}"
        kills = sum(each.killed.kills for each in self.resumed)
        left = "1 kill has" if kills == 1 else f"{kills} kills have"
        also = f", and {left} left no trace" if kills else "; no run was killed"
        agree = "agrees" if len(self.options.names) == 1 else "agree"
        return f"verified: {', '.join(self.options.names)} {agree} with one process{also} ({after})"

    def clear(self) -> None:
        """Take the runs away; the recipe, the report and the logs stay."""
        for folder in (REFERENCE, *map(_folder_name, self.options.names)):
            for path in (self.output / folder, self.output / f"{folder}-killed"):
                shutil.rmtree(path, ignore_errors=True)


# -------------------------------------------------------------------------------------------------------------- tables


HEAD_OF_AGREEMENT = ("strategy", "processes", *FIGURES.values(), "samples", "verdict")
HEAD_OF_RESUMES = ("strategy", "processes", "kills", "while saving", "resumes", *FIGURES.values(), "repeated",
                   "skipped", "verdict")  # fmt: skip


def _row_of_agreement(outcome: Outcome, tolerance: float) -> tuple[str, ...]:
    about = (outcome.strategy, _processes(outcome))
    if outcome.failure:
        return (*about, *["-"] * (len(FIGURES) + 1), "FAILED")
    samples = "the same" if outcome.ledger.is_same else f"{outcome.ledger.elsewhere} updates differ"
    return (*about, *_figures(outcome), samples, "agrees" if outcome.is_well(tolerance) else "DIFFERS")


def _row_of_resumes(outcome: Outcome, tolerance: float) -> tuple[str, ...]:
    killed = outcome.killed
    about = (outcome.strategy, _processes(outcome), str(killed.kills), str(killed.kills_while_saving))
    about += (str(killed.resumes),)
    if outcome.failure:
        return (*about, *["-"] * (len(FIGURES) + 2), "FAILED")
    ledger = (f"{outcome.ledger.repeated}", f"{outcome.ledger.skipped}")
    return (*about, *_figures(outcome), *ledger, "the same" if outcome.is_well(tolerance) else "DIFFERS")


def _processes(outcome: Outcome) -> str:
    return ",".join(map(str, outcome.num_processes))


def _figures(outcome: Outcome) -> list[str]:
    return [f"{value:.1e}" if value else "0" for value in outcome.difference.largest.values()]


def _folder_name(strategy: str) -> str:
    return Path(strategy).stem


def _metrics(folder: Path) -> list[dict]:
    return [line for line in JsonlFile(folder / "metrics.jsonl").read() if line["update"] > 0]


def _samples(folder: Path) -> list[dict]:
    return JsonlFile(folder / "samples.jsonl").read()
