"""`zerofit compare --finish`: each strategy trained to the end of the recipe at its best batch, by runs of the task.

Each run has its own folder, whose name has a hash of its settings. A finished run is not repeated; an interrupted one
resumes from its last checkpoint.
"""

import math
import uuid
from pathlib import Path
from typing import Any

from zerofit.recipe.errors import UserError
from zerofit.recipe.options import TrainingRecipe
from zerofit.record.run_folder import RunFolder
from zerofit.record.terminal import duration, say
from zerofit.tools.compare.candidates import SET_BY_EACH_RUN, Candidate
from zerofit.tools.compare.finished import Finished, read_finished
from zerofit.tools.compare.results import StrategyRow
from zerofit.tools.compare.trial_journal import key_of
from zerofit.tools.compare.trial_machine import launch_environment
from zerofit.tools.launches import LaunchedRun, failure, launched, mistake
from zerofit.tools.tool_recipe import recipe_values

RECIPE, RUNS = "recipe-finish.yaml", "runs"


def values_to_finish(options, cls: type[TrainingRecipe]) -> dict[str, Any]:
    """The user's recipe without the options that each run sets for itself. A global batch sets the accumulation.

    Raises:
        UserError: the global batch does not divide by the processes.
    """
    size, processes = options.global_batch_size, options.num_processes
    if size and size % processes:
        raise UserError(
            f"global_batch_size = {size} ({options.source('global_batch_size')}): --finish trains with "
            f"num_processes = {processes}, and the one does not divide by the other. Make it a multiple of {processes}"
        )
    return recipe_values(options, cls, SET_BY_EACH_RUN | ({"gradient_accumulation_steps"} if size else set()), {})


def batch_to_train(row: StrategyRow, global_batch: int | None, num_processes: int) -> int:
    """The micro-batch of the run: the best one. With a global batch, the largest one up to it that divides its part of
    a process."""
    best = row.best["size"]
    if not global_batch:
        return best
    of_process = global_batch // num_processes
    return next(size for size in range(min(best, of_process), 0, -1) if of_process % size == 0)


class Finish:
    """All runs of one `zerofit compare --finish`.

    Args:
        comparison: zerofit.tools.compare.comparison.Comparison, which knows the best batches.
        recipe: the file of the runs' recipe.
    """

    def __init__(self, comparison, recipe: Path):
        self.comparison, self.options, self.recipe = comparison, comparison.options, recipe
        self.journal, self.machine = comparison.journal, comparison.machine
        self.folder = comparison.output / RUNS
        self.environment = launch_environment(self.machine, self.options.num_processes)

    def run(self) -> list[Finished]:
        """Train under every strategy that holds a batch."""
        rows = zip(self.comparison.candidates, self.comparison.rows())
        return [self._finish(candidate, row) for candidate, row in rows if row.best]

    def _finish(self, candidate: Candidate, row: StrategyRow) -> Finished:
        size = batch_to_train(row, self.options.global_batch_size, self.options.num_processes)
        key = key_of(
            recipe=self.recipe.read_text(encoding="utf-8"),
            task=self.options.task,
            size=size,
            pair=self.comparison.pair_of(candidate),
            overrides=candidate.overrides,
            num_processes=self.options.num_processes,
            machine=self.machine.identity,
        )
        folder = self.folder / f"{candidate.folder_name}-{size}-{key[:8]}"
        if RunFolder(folder).is_finished:
            say(f"{candidate.name}: trained at {size} per process before ({folder})")
            return read_finished(candidate.name, size, folder)
        flags = (*candidate.flags, "--per_device_train_batch_size", str(size))
        trial = LaunchedRun(self.options.task, candidate.config, self.recipe, folder, flags)
        log = folder.with_name(f"{folder.name}.log")
        say(f"{candidate.name}: trains at {size} per process; its output is {log}")
        problem = self._launch(trial, candidate, key, log)
        finished = read_finished(candidate.name, size, folder, problem)
        took = problem or f"{finished.updates:,} updates in {duration(finished.training_s)}"
        say(f"{candidate.name}: {took}")
        return finished

    def _launch(self, trial: LaunchedRun, candidate: Candidate, key: str, log: Path) -> str:
        """Launch the run and wait for its end. Returns why it failed; empty: it did not."""
        about = {"launch": self.journal.launches + 1, "key": key}
        mark = uuid.uuid4().hex
        self.journal.add("launch", **about, candidate=candidate.name, mark=mark, folder=trial.output.name)
        command = trial.command(self.options.num_processes)
        with launched(command, trial.output, log, mark=mark, environment=self.environment) as launch:
            launch.wait(math.inf)
            seconds = launch.seconds
            problem = mistake(launch) or failure(launch, "ended") or "" if launch.process.returncode else ""
        self.journal.add("end", **about, how="failed" if problem else "done", seconds=round(seconds, 1))
        return problem
