"""The proof: its launches one after another, their results, and the report."""

import math
import shlex
import shutil
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from zerofit.launch.runs import LaunchedRun, RunningLaunch, failure, mistake
from zerofit.recipe import UserError
from zerofit.recipe.parsing import counted
from zerofit.record.jsonl import JsonlFile
from zerofit.record.run_folder import RunFolder
from zerofit.record.terminal import duration, log_lines, table
from zerofit.tools.verify.killing import Killed, run_and_kill, spread_moments
from zerofit.tools.verify.record_comparison import FIGURES, Difference, Ledger, compare_metrics, compare_samples
from zerofit.tools.verify.shorten import VerifyOptions

REFERENCE, ONE_PROCESS = "reference", "single"  # the folder, the strategy


@dataclass
class ComparedRun:
    """The result of a run, compared with the run that it must equal.

    Args:
        num_processes: of each of its launches.
        failure: why it cannot be compared; None: it can.
        killed: how it was killed; None: it was not.
    """

    strategy: str
    num_processes: list[int]
    failure: str | None = None
    difference: Difference | None = None
    ledger: Ledger | None = None
    killed: Killed | None = None

    def problems(self, tolerance: float) -> list[str]:
        """The problems of a run as messages; empty if it equals the other run and, if it was killed, has resumed."""
        if self.failure or self.difference is None or self.ledger is None:
            return [self.failure or "it was not compared"]
        problems, largest = list(self.difference.problems), self.difference.largest
        for name, value in largest.items():
            if not value <= tolerance:
                what = "is not a number in some update" if math.isnan(value) else f"differs by more than {tolerance:g}"
                problems.append(f"its {FIGURES[name]} {what}")
        if not self.ledger.is_same:
            problems.append(f"{self.ledger.elsewhere} updates have other samples than they should have")
        if self.killed is not None and not self.killed.kills_resumed:
            problems.append("no kill was followed by a resume: set more --updates, or smaller --save_steps")
        return problems


class Proof:
    """All launches of one `zerofit verify`.

    Args:
        configs: {strategy: accelerate YAML}.
        output: the folder of all runs.
        recipe: the shortened recipe's file.
    """

    def __init__(self, options: VerifyOptions, configs: dict[str, Path], output: Path, recipe: Path):
        self.options, self.configs, self.output, self.recipe = options, configs, output, recipe
        self.save_flags = ("--save_steps", str(options.saved_every), "--save_total_limit", "2")
        self.reference = ComparedRun(ONE_PROCESS, [1], "it was not launched")
        self.agreement: list[ComparedRun] = []
        self.resumed: list[ComparedRun] = []
        self.began = time.monotonic()

    def run(self) -> None:
        """Launch all runs. If the reference fails, the others are not launched.

        Raises:
            UserError: the reference refuses the recipe.
        """
        shutil.rmtree(self.logs, ignore_errors=True)
        self.reference = self._run_to_end(REFERENCE, ONE_PROCESS, 1)
        if self.reference.failure:
            return
        for name in self.options.names:
            outcome = self._run_to_end(_folder_name(name), name, self.options.num_processes)
            self.agreement.append(outcome)
            if self.options.kills and not outcome.failure:
                self.resumed.append(self._run_and_kill(name))

    @property
    def logs(self) -> Path:
        return self.output / "logs"

    def _trial(self, folder: str, strategy: str, flags: tuple[str, ...] = ()) -> LaunchedRun:
        trial = LaunchedRun(self.options.task, self.configs[strategy], self.recipe, self.output / folder, flags)
        shutil.rmtree(trial.output, ignore_errors=True)  # left by an earlier proof
        return trial

    def _run_to_end(self, folder: str, strategy: str, num_processes: int) -> ComparedRun:
        trial, about = self._trial(folder, strategy), f"{strategy}, {counted(num_processes, 'process')}"
        command = trial.command(num_processes)
        with RunningLaunch(command, trial.output, self.logs / f"{folder}.log") as launch:
            how = launch.wait(60 * self.options.launch_minutes)
            failed, refused, seconds = failure(launch, how), mistake(launch), launch.seconds
        if failed:
            failed = f"{failed}\n  to run it alone: {shlex.join(command)}"
            log_lines(f"{about}: failed")
            if folder == REFERENCE and refused:
                raise UserError(f"{about}: {refused}")
            return ComparedRun(strategy, [num_processes], failed)
        log_lines(f"{about}: {counted(self.options.updates, 'update')}, {seconds:.0f} s")
        return self._compared(ComparedRun(strategy, [num_processes]), trial.output, self.output / REFERENCE)

    def _run_and_kill(self, strategy: str) -> ComparedRun:
        options, folder = self.options, _folder_name(strategy)
        trial = self._trial(f"{folder}-killed", strategy, self.save_flags)
        random = Random(folder)
        update_s = median(line["seconds"] for line in _metrics(self.output / folder))
        start_s = sum(RunFolder(self.output / folder).environment()["seconds_to_first_update"].values())
        killed = run_and_kill(
            trial,
            self.logs,
            spread_moments(options.kills, options.updates, update_s, start_s, random),
            (options.resumed_processes if index % 3 == 2 else options.num_processes for index in count()),
            60 * options.launch_minutes,
            log_lines=lambda text: log_lines(f"{strategy}, {text}"),
        )
        outcome = ComparedRun(strategy, killed.processes, killed.failure, killed=killed)
        return outcome if killed.failure else self._compared(outcome, trial.output, self.output / folder)

    def _compared(self, outcome: ComparedRun, ours: Path, other: Path) -> ComparedRun:
        outcome.difference = compare_metrics(_metrics(ours), _metrics(other), self.options.updates)
        outcome.ledger = compare_samples(_samples(ours), _samples(other))
        return outcome

    @property
    def passed(self) -> bool:
        """True if every run was made, and equals the run that it must equal."""
        number = len(self.options.names)
        complete = len(self.agreement) == number and len(self.resumed) == (number if self.options.kills else 0)
        return complete and not any(outcome.problems(self.options.largest_difference) for outcome in self._all())

    def _all(self) -> list[ComparedRun]:
        return [self.reference, *self.agreement, *self.resumed]

    def report(self, width: int | None = None) -> str:
        """The tables, the problems and the verdict, for a screen of this width."""
        tolerance, blocks = self.options.largest_difference, list[str]()
        for about, outcomes in (
            (f"each against one process ({ONE_PROCESS}): the largest relative differences", self.agreement),
            ("killed and resumed, each against its undisturbed run", self.resumed),
        ):
            if outcomes:
                blocks.append(f"{about}\n{table(_rows(outcomes, tolerance), width)}")
        for outcome in self._all():
            disturbed = ", killed and resumed" if outcome.killed else ""
            problems = [f"{outcome.strategy}{disturbed}: {problem}" for problem in outcome.problems(tolerance)]
            blocks += ["\n".join(problems)] if problems else []
        return "\n\n".join([*blocks, self._verdict()])

    def _verdict(self) -> str:
        after = f"{counted(self.options.updates, 'update')}, {duration(time.monotonic() - self.began)}"
        if not self.passed:
            return f"NOT verified ({after}). The runs and their logs are in {self.output}"
        kills = sum(each.killed.kills_resumed for each in self.resumed if each.killed)
        also = f"{counted(kills, 'kill')} left no trace" if kills else "no run was killed"
        return f"verified against one process: {', '.join(self.options.names)}; {also} ({after})"

    def clear(self) -> None:
        """Remove the runs; the recipe, the report and the logs stay."""
        for folder in (REFERENCE, *map(_folder_name, self.options.names)):
            for path in (self.output / folder, self.output / f"{folder}-killed"):
                shutil.rmtree(path, ignore_errors=True)


LEDGER = ("repeated", "skipped")  # samples
KILLS = ("kills", "resumes")


def _rows(outcomes: list[ComparedRun], tolerance: float) -> list[tuple[str, ...]]:
    """The head and a row for each outcome; all of them were killed, or none."""
    kills = KILLS if outcomes[0].killed else ()
    rows = [("strategy", "processes", *kills, *FIGURES.values(), *LEDGER, "verdict")]
    for outcome in outcomes:
        about, killed = [outcome.strategy, ",".join(map(str, outcome.num_processes))], outcome.killed
        if killed:
            about += [str(killed.kills), str(killed.resumes)]
        if outcome.failure or outcome.difference is None:
            rows.append((*about, *["-"] * len((*FIGURES, *LEDGER)), "FAILED"))
            continue
        figures = [f"{value:.1e}" if value else "0" for value in outcome.difference.largest.values()]
        ledger = [f"{getattr(outcome.ledger, name)}" for name in LEDGER]
        rows.append((*about, *figures, *ledger, "DIFFERS" if outcome.problems(tolerance) else "agrees"))
    return rows


def _folder_name(strategy: str) -> str:
    return Path(strategy).stem


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [line for line in JsonlFile(folder / "metrics.jsonl").read() if line["update"] > 0]


def _samples(folder: Path) -> list[dict[str, Any]]:
    return JsonlFile(folder / "samples.jsonl").read()
