"""`zerofit compare --finish`: train each strategy to the end of the recipe at its best batch.

Each run has its own folder, whose name has a hash of its settings. A finished run is not repeated; an interrupted one
resumes from its last checkpoint. Then their times, throughput and held-out figures are compared.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerofit.recipe.errors import UserError
from zerofit.recipe.files import read_yaml
from zerofit.recipe.tasks import TaskRecipe
from zerofit.record.run_folder import RunFolder
from zerofit.record.terminal import decimals, duration, log_lines, rounded, size
from zerofit.tools.compare.candidates import SET_BY_EACH_RUN, Candidate, CompareOptions
from zerofit.tools.compare.comparison import Comparison
from zerofit.tools.compare.trial import hash_values
from zerofit.tools.runs import LaunchedRun, RunningLaunch, failure, mistake
from zerofit.tools.tool_recipe import recipe_values


def make_finish_recipe(options: CompareOptions, cls: type[TaskRecipe]) -> dict[str, Any]:
    """Return the user's recipe without the options that each run sets for itself. A global batch determines the
    accumulation. Raises UserError: the global batch is not a multiple of the processes."""
    size = options.global_batch_size
    processes = options.num_processes
    if size and size % processes:
        raise UserError(
            f"global_batch_size = {size} ({options.source('global_batch_size')}): no multiple of {processes} processes"
        )
    without = {*SET_BY_EACH_RUN, "gradient_accumulation_steps"} if size else {*SET_BY_EACH_RUN}
    return recipe_values(options, cls, without, {})


def choose_micro_batch(best: int, global_batch: int | None, num_processes: int) -> int:
    """Return the micro-batch of a run: `best`, or with a global batch the largest size up to `best` that divides the
    samples per process."""
    if not global_batch:
        return best
    samples_per_process = global_batch // num_processes
    return next(size for size in range(min(best, samples_per_process), 0, -1) if samples_per_process % size == 0)


FINISHED_COLUMNS = (
    "strategy|batch|global batch|updates|training|an epoch|training samples/s|eval batch|an evaluation|"
    "evaluation samples/s|peak|training loss"
).split("|")


@dataclass
class FinishedRun:
    """A run that was trained to its end, read from its folder.

    Args:
        micro_batch: samples per process.
        lines: the lines of metrics.jsonl.
        figures: held-out figures of the exported model.
        recipe: the options of the run, from its recipe.yaml.
        problem: why it failed; empty: it finished.
    """

    name: str
    micro_batch: int
    lines: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @classmethod
    def read(cls, name: str, micro_batch: int, folder: Path, problem: str = "") -> "FinishedRun":
        """Read a run from its folder."""
        held_out = RunFolder(folder).environment().get("held_out")
        held_out = held_out if isinstance(held_out, dict) else {}
        figures = {figure: value for figure, value in held_out.items() if figure.startswith(("eval_", "test_"))}
        recipe = read_yaml(folder / "recipe.yaml")
        return cls(name, micro_batch, RunFolder(folder).metrics.read(), figures, recipe, problem)

    @property
    def global_batch(self) -> int | None:
        return self.recipe.get("global_batch_size")

    @property
    def training_s(self) -> float:
        """The sum of the seconds of all updates, without evaluations and checkpoints."""
        return sum(line["seconds"] for line in self.lines if "seconds" in line)

    @property
    def evaluation(self) -> dict[str, float] | None:
        """The metrics line of the evaluation with the median duration; None: nothing was evaluated."""
        lines = [line for line in self.lines if "evaluation_seconds" in line]
        lines.sort(key=lambda line: line["evaluation_seconds"])
        return lines[(len(lines) - 1) // 2] if lines else None


def finished_table(runs: list[FinishedRun]) -> list[tuple[str, ...]]:
    """Return the column names and a row for each run."""
    names = list(dict.fromkeys(name for run in runs for name in run.figures))
    rows: list[tuple[str, ...]] = [(*FINISHED_COLUMNS, *(name.removeprefix("eval_") for name in names))]
    for run in runs:
        if run.problem or not run.lines:
            rows.append((run.name, str(run.micro_batch), "failed", *["-"] * (len(FINISHED_COLUMNS) - 3 + len(names))))
            continue
        last = run.lines[-1]
        evaluation = run.evaluation
        seconds = run.training_s
        trained = [line for line in run.lines if "seconds" in line]
        cells = [
            run.name,
            str(run.micro_batch),
            str(run.global_batch),
            f"{last['update']:,}",
            _format_seconds(seconds),
            _format_seconds(seconds / last["epoch"]),
            rounded(last["consumed_samples"] / seconds),
            str(run.recipe.get("per_device_eval_batch_size")),
            _format_seconds(evaluation["evaluation_seconds"]) if evaluation else "-",
            rounded(evaluation["evaluation_samples_per_s"]) if evaluation else "-",
            size(max(line["peak_memory_bytes"] for line in trained)),
            decimals(trained[-1]["loss"]),
        ]
        rows.append((*cells, *(decimals(run.figures[name]) if name in run.figures else "-" for name in names)))
    return rows


def _format_seconds(seconds: float) -> str:
    return duration(seconds) if seconds >= 60 else f"{rounded(seconds)} s"


def describe_agreement(runs: list[FinishedRun]) -> str:
    """Return a sentence on whether the runs are comparable and by how much their figures differ; empty: fewer than two
    runs finished."""
    runs = [run for run in runs if not run.problem]
    if len(runs) < 2:
        return ""
    batches = list(dict.fromkeys(run.global_batch for run in runs))
    if len(batches) > 1:
        return f"The global batches differ ({', '.join(map(str, batches))}). Set --global_batch_size to compare them"
    first, *others = runs
    differences = {
        name: max(abs(run.figures.get(name, math.nan) - value) / max(abs(value), 1e-12) for run in others)
        for name, value in first.figures.items()
    }
    if not differences:
        return f"One global batch of {batches[0]} for all"
    worst = max(differences, key=lambda name: differences[name])
    difference = f"at most {differences[worst]:.1e} of {first.name}'s ({worst.removeprefix('eval_')})"
    return (
        f"One global batch of {batches[0]} for all: the same samples in each update. The final held-out figures "
        f"{f'differ by {difference}' if differences[worst] else 'are equal'}"
    )


def train_to_the_end(comparison: Comparison, recipe: Path, candidate: Candidate, best: int) -> FinishedRun:
    """Train a candidate to the end of the recipe, unless it has finished before.

    Args:
        recipe: the file of the runs' recipe.
        best: the fastest batch of the candidate, per process.
    """
    options = comparison.options
    machine = comparison.timer or comparison.machine
    size = choose_micro_batch(best, options.global_batch_size, options.num_processes)
    key = hash_values(
        recipe=recipe.read_text(encoding="utf-8"),
        task=options.task,
        size=size,
        pair=candidate.contents,
        overrides=candidate.overrides,
        num_processes=options.num_processes,
        machine=machine.identity,
    )
    folder = comparison.output / "runs" / f"{candidate.folder_name}-{size}-{key[:8]}"
    if RunFolder(folder).is_finished:
        log_lines(f"{candidate.name}: trained at {size} per process before ({folder})")
        return FinishedRun.read(candidate.name, size, folder)
    flags = (*candidate.flags, "--per_device_train_batch_size", str(size))
    command = LaunchedRun(options.task, candidate.config, recipe, folder, flags).command(options.num_processes)
    log = folder.with_name(f"{folder.name}.log")
    log_lines(f"{candidate.name}: trains at {size} per process; its output is {log}")
    journal_line = comparison.journal.begin(key=key, candidate=candidate.name, size=size)
    variables = machine.variables(options.num_processes)
    with RunningLaunch(command, folder, log, mark=journal_line["mark"], environment=variables) as launch:
        launch.wait(math.inf)
        problem = mistake(launch) or failure(launch, "ended") or "" if launch.exit_code else ""
        comparison.journal.end(journal_line, "failed" if problem else "done", launch.seconds)
    finished = FinishedRun.read(candidate.name, size, folder, problem)
    log_lines(f"{candidate.name}: {problem or f'trained in {duration(finished.training_s)}'}")
    return finished
