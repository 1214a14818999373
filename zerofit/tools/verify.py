"""`zerofit verify`: show on a shortened recipe that the strategies agree and that a killed run loses nothing.

    zerofit verify --config recipes/clm/stdlib-gpt2.yaml
    zerofit verify --config recipes/cls/sst2-small.yaml --strategies zero2,zero3 --num_processes 4 --kills 8

The reference is a run with one process. Each strategy then runs with several processes and must have the same losses,
gradient norms, learning rates and samples in every update. Then a run of each strategy is killed with SIGKILL and
resumed several times, also with another number of processes, and must end like the undisturbed run. All runs are real
launches.
"""

import math
import re
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from zerofit.model.adapter_folder import with_base_configuration
from zerofit.recipe import UserError
from zerofit.recipe.base import option
from zerofit.recipe.data_options import BatchOptions
from zerofit.recipe.files import counted
from zerofit.recipe.paths import check_paths, name_of_recipe
from zerofit.recipe.tasks import TaskRecipe
from zerofit.record.metrics import JsonlFile
from zerofit.record.run_folder import RunFolder, check_folder_of
from zerofit.record.terminal import duration, log_lines, screen_width, table
from zerofit.strategy.batches import resolve_batches
from zerofit.strategy.launch import find_strategies
from zerofit.tools.runs import TRACEBACK_HEADER, LaunchedRun, RunningLaunch, ending_in_order, failure, mistake
from zerofit.tools.tool_recipe import (
    KEPT_RUN_OPTIONS,
    QUIET_RUN_VALUES,
    LaunchedStrategiesOptions,
    read_with_recipe,
    recipe_text,
    recipe_values,
)

COMPARED_FIGURES = {"loss": "loss", "grad_norm": "gradient norm", "learning_rate": "learning rate"}
Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Difference:
    """The differences between the records of two runs.

    Args:
        largest: the largest relative difference of each figure in any update; NaN where a figure is not a number.
        problems: messages on updates that are missing, unexpected, repeated, or have other samples.
        repeated: number of samples that were trained on more often than in the reference.
        skipped: number of samples that were trained on less often.
    """

    largest: dict[str, float]
    problems: list[str]
    repeated: int
    skipped: int


def compare_records(
    metrics: Lines, samples: Lines, metrics_of_reference: Lines, samples_of_reference: Lines, num_updates: int
) -> Difference:
    """Compare metrics.jsonl and samples.jsonl of updates 1 to `num_updates` with those of a reference. Raises
    ValueError: the reference has no samples, so that every run would agree with it."""
    problems: list[str] = []
    expected = range(1, num_updates + 1)
    for lines, owner in ((metrics, ""), (metrics_of_reference, " of the reference")):
        counts = Counter(line["update"] for line in lines)
        wrong_updates = {
            "missing": [update for update in expected if update not in counts],
            f"beyond {num_updates}": [update for update in counts if update not in expected],
            "more than once": [update for update, number in counts.items() if number > 1],
        }
        problems += [
            f"updates {problem}{owner}: {', '.join(map(str, updates[:5]))}"
            for problem, updates in wrong_updates.items()
            if updates
        ]
    by_update, reference_by_update = (
        {line["update"]: line for line in lines} for lines in (metrics, metrics_of_reference)
    )
    largest = {}
    for figure in COMPARED_FIGURES:
        differences = [
            relative_difference(by_update[update].get(figure), reference_by_update[update].get(figure))
            for update in by_update.keys() & reference_by_update.keys()
        ]
        is_number = differences and not any(map(math.isnan, differences))
        largest[figure] = max(differences) if is_number else math.nan
    trained, expected_samples = (
        Counter(index for line in run for index in line["samples"]) for run in (samples, samples_of_reference)
    )
    if not expected_samples:
        raise ValueError("the reference has no samples")
    in_updates, in_reference = (
        Counter((line["update"], *sorted(line["samples"])) for line in run) for run in (samples, samples_of_reference)
    )
    different = {update for update, *_ in (in_updates - in_reference) | (in_reference - in_updates)}
    if different:
        problems.append(f"{len(different)} updates have other samples than they should have")
    return Difference(largest, problems, (trained - expected_samples).total(), (expected_samples - trained).total())


def relative_difference(value: float | None, expected: float | None) -> float:
    """Return |value - expected| / |expected|; 0 if they are equal, NaN if one of them is not a finite number."""
    if value is None or expected is None or not (math.isfinite(value) and math.isfinite(expected)):
        return math.nan
    if value == expected:
        return 0.0
    return abs(value - expected) / max(abs(expected), 1e-12)


DROPOUT_OPTION = re.compile(r"(dropout|pdrop|dropout_prob|dropout_rate|layerdrop|drop_rate|drop_path|jitter_noise)$")
# The proof sets max_train_steps and global_batch_size instead of the last two.
OPTIONS_NOT_VERIFIED = KEPT_RUN_OPTIONS | {"num_train_epochs", "gradient_accumulation_steps"}
VERIFIED_RUN_VALUES = QUIET_RUN_VALUES | {"logging_steps": 1, "predict_with_generate": False, "record_samples": True}
MAX_EVAL_RECORDS = 16  # held-out records of the evaluation at the end, which cannot be turned off
TOLERANCES = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 5e-2}


@dataclass
class VerifyOptions(LaunchedStrategiesOptions):
    """Strategies agree, and a killed run loses nothing; options of the training recipe change that"""

    updates: int = option(12, "Length of the runs.", minimum=2, common=True)
    kills: int = option(
        3, "How often a run is killed, once it has saved, and resumed; 0: not at all.", minimum=0, common=True
    )
    resumed_processes: int = option(1, "Processes of every third launch of a killed run.", positive=True)
    tolerance: float | None = option(None, "Largest relative difference; else 1e-5, or 5e-2 in half.", positive=True)
    launch_minutes: float = option(60.0, "A launch that has not ended by then has failed.", positive=True)
    output: str | None = option(None, "Folder of the runs; by default outputs/verify-RECIPE.")
    keep: bool = option(False, "Keep the runs also where all is well; those that are not well are kept anyway.")

    @property
    def saved_every(self) -> int:
        """The save_steps of a run that is killed. The recipe's value is not used: it may exceed the updates of the
        proof."""
        return (self.save_steps if self.is_flag("save_steps") else None) or max(1, self.updates // 6)

    @property
    def largest_difference(self) -> float:
        """The largest relative difference up to which figures agree."""
        return self.tolerance or TOLERANCES[precision_of(self)]

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.kills >= self.updates:
            problems.append(f"kills = {self.kills} and updates = {self.updates}: use more updates")
        if self.kills and self.saved_every >= self.updates:
            problems.append(
                f"save_steps = {self.save_steps} and updates = {self.updates}: there would be no checkpoint to resume "
                f"from. Use --save_steps {max(1, self.updates // 6)}, or --kills 0"
            )
        return problems


def shorten(recipe: VerifyOptions, cls: type[TaskRecipe]) -> tuple[dict[str, Any], list[str]]:
    """Return (the values of the shortened recipe, notes on changes that affect the numbers). `recipe` is a `cls`, too.
    Raises UserError: the global batch does not divide by the processes; the model's configuration cannot be loaded."""
    values = recipe_values(recipe, cls, OPTIONS_NOT_VERIFIED, VERIFIED_RUN_VALUES)
    batches = resolve_batches(recipe, recipe.num_processes)
    values["global_batch_size"] = batches.global_batch
    if recipe.kills:
        resumed_batch = BatchOptions(batches.micro_batch, global_batch_size=batches.global_batch)
        resolve_batches(resumed_batch, recipe.resumed_processes, total_stays=True)
    values |= {"max_train_steps": recipe.updates, "eval_steps": recipe.updates}
    values["max_eval_samples"] = min(recipe.max_eval_samples or MAX_EVAL_RECORDS, MAX_EVAL_RECORDS)
    changes = [f"{recipe.updates} updates of {batches.global_batch} samples"]
    values["precision"] = precision_of(recipe)
    if recipe.precision not in (None, values["precision"]):
        changes.append(f"precision {values['precision']} instead of {recipe.precision} (unless --precision is given)")
    max_warmup_steps = recipe.updates // 3
    if recipe.num_warmup_steps > max_warmup_steps:
        values["num_warmup_steps"] = max_warmup_steps
        changes.append(f"num_warmup_steps {max_warmup_steps} instead of {recipe.num_warmup_steps}")
    _, config = with_base_configuration(recipe)
    dropout_options = sorted(  # the noise of dropout depends on the number of processes
        name
        for name, value in config.to_dict().items()
        if DROPOUT_OPTION.search(name) and type(value) in (int, float) and value > 0
    )
    if dropout_options:
        overrides = [recipe.config_overrides, *(f"{name}=0" for name in dropout_options)]
        values["config_overrides"] = ",".join(text for text in overrides if text)
    if recipe.lora_dropout:
        values["lora_dropout"] = 0.0
        dropout_options.append("lora_dropout")
    if dropout_options:
        changes.append(f"no dropout ({', '.join(dropout_options)} = 0)")
    return values, changes


def precision_of(recipe: VerifyOptions) -> str:
    """Return the value of the --precision flag, else fp32: a recipe's half precision would hide differences."""
    return recipe.precision if recipe.source("precision") == "--precision" and recipe.precision else "fp32"


REFERENCE_FOLDER = "reference"  # of the run with one process
REFERENCE_STRATEGY = "single"


@dataclass
class ComparedRun:
    """The result of a run, compared with its reference.

    Args:
        num_processes: the number of processes of each launch.
        failure: why it cannot be compared; None: it can.
        kills: number of kills; None: an undisturbed run.
        kills_resumed: number of kills after which a launch resumed from a checkpoint.
        resumes: number of launches that resumed from a checkpoint; the others started from the beginning.
    """

    strategy: str
    num_processes: list[int]
    failure: str | None = None
    difference: Difference | None = None
    kills: int | None = None
    kills_resumed: int = 0
    resumes: int = 0

    def problems(self, tolerance: float) -> list[str]:
        """Return messages on the problems of a run; empty: it equals its reference and, if it was killed, has
        resumed."""
        if self.failure or self.difference is None:
            return [self.failure or "it was not compared"]
        problems = list(self.difference.problems)
        for name, value in self.difference.largest.items():
            if not value <= tolerance:
                problem = (
                    "is not a number in some update" if math.isnan(value) else f"differs by more than {tolerance:g}"
                )
                problems.append(f"its {COMPARED_FIGURES[name]} {problem}")
        if self.kills is not None and not self.kills_resumed:
            problems.append("no kill was followed by a resume: set more --updates, or smaller --save_steps")
        return problems


def moment_to_kill(index: int, update: int, delay_s: float, start_s: float) -> Callable[[RunningLaunch], bool]:
    """Return a function that tells when to kill a launch; it is called every few milliseconds. It waits for a
    checkpoint,
    without which nothing would be resumed. By `index` the kill comes `delay_s` after `update` was printed, while a
    checkpoint is written (after `update`), or `start_s` after the launch."""
    printed_at_s: list[float] = []

    def is_due(launch: RunningLaunch) -> bool:
        if not (launch.output / "checkpoints" / "latest").is_dir():
            return False
        if index % 4 == 3:
            return launch.seconds >= start_s
        reached = launch.newest_update >= update
        if index % 4 == 1:
            return reached and launch.is_saving
        if reached and not printed_at_s:
            printed_at_s.append(launch.seconds)
        return bool(printed_at_s) and launch.seconds - printed_at_s[0] >= delay_s

    return is_due


class Proof:
    """All launches of one `zerofit verify`.

    Args:
        configs: {strategy: its accelerate YAML}.
        output: the folder of all runs.
        recipe: the file of the shortened recipe.
    """

    def __init__(self, options: VerifyOptions, configs: dict[str, Path], output: Path, recipe: Path):
        self.options = options
        self.configs = configs
        self.output = output
        self.recipe = recipe
        self.logs = output / "logs"
        self.save_flags = ("--save_steps", str(options.saved_every), "--save_total_limit", "2")
        self.reference = ComparedRun(REFERENCE_STRATEGY, [1], "it was not launched")
        self.agreement: list[ComparedRun] = []
        self.resumed: list[ComparedRun] = []
        self.began = time.monotonic()

    def run(self) -> None:
        """Launch all runs; none after the reference if it fails. Raises UserError: the reference refuses the
        recipe."""
        shutil.rmtree(self.logs, ignore_errors=True)
        self.reference = self._run_to_end(REFERENCE_FOLDER, REFERENCE_STRATEGY, 1)
        if self.reference.failure:
            return
        for name in self.options.names:
            outcome = self._run_to_end(Path(name).stem, name, self.options.num_processes)
            self.agreement.append(outcome)
            if self.options.kills and not outcome.failure:
                self.resumed.append(self._run_and_kill(name))

    def _make_launch(self, folder: str, strategy: str, flags: tuple[str, ...] = ()) -> LaunchedRun:
        """Return a launch whose output folder does not exist."""
        run = LaunchedRun(self.options.task, self.configs[strategy], self.recipe, self.output / folder, flags)
        shutil.rmtree(run.output, ignore_errors=True)  # left by an earlier proof
        return run

    def _run_to_end(self, folder: str, strategy: str, num_processes: int) -> ComparedRun:
        run = self._make_launch(folder, strategy)
        about = f"{strategy}, {counted(num_processes, 'process')}"
        command = run.command(num_processes)
        with RunningLaunch(command, run.output, self.logs / f"{folder}.log") as launch:
            how = launch.wait(60 * self.options.launch_minutes)
            failed = failure(launch, how)
            refused = mistake(launch)
            seconds = launch.seconds
        if failed:
            failed = f"{failed}\n  to run it alone: {shlex.join(command)}"
            log_lines(f"{about}: failed")
            if folder == REFERENCE_FOLDER and refused:
                raise UserError(f"{about}: {refused}")
            return ComparedRun(strategy, [num_processes], failed)
        log_lines(f"{about}: {counted(self.options.updates, 'update')}, {seconds:.0f} s")
        return self._compared(ComparedRun(strategy, [num_processes]), run.output, self.output / REFERENCE_FOLDER)

    def _run_and_kill(self, strategy: str) -> ComparedRun:
        """Launch a run, kill it once in each of `kills` equal parts, then let it run to its end. A launch that ends or
        fails before its kill is the last one."""
        options = self.options
        folder = Path(strategy).stem
        run = self._make_launch(f"{folder}-killed", strategy, self.save_flags)
        undisturbed = self.output / folder
        random = Random(folder)
        update_s = median(line["seconds"] for line in _read_metrics(undisturbed))
        start_s = sum(RunFolder(undisturbed).environment()["seconds_to_first_update"].values())
        outcome = ComparedRun(strategy, [], kills=0)
        not_resumed = 0
        updates_per_kill = (options.updates - 1) / options.kills
        moments: list[Callable[[RunningLaunch], bool] | None] = []
        for index in range(options.kills):
            place = random.uniform(1 + updates_per_kill * index, 1 + updates_per_kill * (index + 1))
            update = min(int(place), options.updates - 1)
            delay_s = (place % 1) * update_s
            moments.append(moment_to_kill(index, update, delay_s, random.uniform(0, start_s)))
        for index, moment in enumerate([*moments, None]):
            num_processes = options.resumed_processes if index % 3 == 2 else options.num_processes
            log = self.logs / f"{run.output.name}-{index + 1}.log"
            with RunningLaunch(run.command(num_processes), run.output, log) as launch:
                how = launch.wait(60 * options.launch_minutes, moment)
                size = log.stat().st_size  # later lines may be of ranks whose peers were killed first
                launch.kill()
            outcome.num_processes.append(num_processes)
            resumed = any(line.startswith("resumed ") for line in launch.text.splitlines())
            outcome.resumes += resumed
            outcome.kills_resumed += not_resumed if resumed else 0
            if resumed or launch.newest_update:  # else it was killed again before it could resume
                not_resumed = 0
            about = f"{strategy}, {counted(num_processes, 'process')}{', resumed' if resumed else ''}"
            if how != "until":
                outcome.failure = failure(launch, how)
                log_lines(f"{about}: {'failed' if outcome.failure else 'ended'}")
                break
            outcome.kills = index + 1
            not_resumed += 1
            where = f"after update {launch.newest_update}" if launch.newest_update else "before its first update"
            saving = ", while saving" if launch.is_saving else ""
            log_lines(f"{about}: killed {where}{saving}, {launch.seconds:.1f} s")
            if TRACEBACK_HEADER.encode() in log.read_bytes()[:size]:
                outcome.failure = f"printed a traceback before it was killed. Its output is {log}"
                break
        return outcome if outcome.failure else self._compared(outcome, run.output, undisturbed)

    def _compared(self, outcome: ComparedRun, folder: Path, reference: Path) -> ComparedRun:
        samples = JsonlFile(folder / "samples.jsonl").read()
        expected = JsonlFile(reference / "samples.jsonl").read()
        outcome.difference = compare_records(
            _read_metrics(folder), samples, _read_metrics(reference), expected, self.options.updates
        )
        return outcome

    @property
    def passed(self) -> bool:
        """True if every run was made, and equals its reference."""
        number = len(self.options.names)
        complete = len(self.agreement) == number and len(self.resumed) == (number if self.options.kills else 0)
        outcomes = [self.reference, *self.agreement, *self.resumed]
        tolerance = self.options.largest_difference
        return complete and not any(outcome.problems(tolerance) for outcome in outcomes)

    def report(self, width: int | None = None) -> str:
        """Return the tables, the problems and the verdict as text. `width`: columns of the screen; None: unlimited."""
        tolerance = self.options.largest_difference
        blocks: list[str] = []
        for about, outcomes in (
            (f"each against one process ({REFERENCE_STRATEGY}): the largest relative differences", self.agreement),
            ("killed and resumed, each against its undisturbed run", self.resumed),
        ):
            if outcomes:
                blocks.append(f"{about}\n{table(_make_rows(outcomes, tolerance), width)}")
        for outcome in (self.reference, *self.agreement, *self.resumed):
            disturbed = "" if outcome.kills is None else ", killed and resumed"
            problems = [f"{outcome.strategy}{disturbed}: {problem}" for problem in outcome.problems(tolerance)]
            blocks += ["\n".join(problems)] if problems else []
        after = f"{counted(self.options.updates, 'update')}, {duration(time.monotonic() - self.began)}"
        verdict = f"NOT verified ({after}). The runs and their logs are in {self.output}"
        if self.passed:
            kills = sum(run.kills_resumed for run in self.resumed)
            also = f"{counted(kills, 'kill')} left no trace" if kills else "no run was killed"
            verdict = f"verified against one process: {', '.join(self.options.names)}; {also} ({after})"
        return "\n\n".join([*blocks, verdict])


def _make_rows(outcomes: list[ComparedRun], tolerance: float) -> list[tuple[str, ...]]:
    """Return the column names and a row for each run; either all of the runs were killed, or none."""
    kills = () if outcomes[0].kills is None else ("kills", "resumes")
    sample_columns = ("repeated", "skipped")
    rows = [("strategy", "processes", *kills, *COMPARED_FIGURES.values(), *sample_columns, "verdict")]
    for outcome in outcomes:
        about = [outcome.strategy, ",".join(map(str, outcome.num_processes))]
        about += [str(getattr(outcome, name)) for name in kills]
        if outcome.failure or outcome.difference is None:
            rows.append((*about, *["-"] * len((*COMPARED_FIGURES, *sample_columns)), "FAILED"))
            continue
        figures = [f"{value:.1e}" if value else "0" for value in outcome.difference.largest.values()]
        samples = [str(getattr(outcome.difference, name)) for name in sample_columns]
        rows.append((*about, *figures, *samples, "DIFFERS" if outcome.problems(tolerance) else "agrees"))
    return rows


def _read_metrics(folder: Path) -> Lines:
    """Return the lines of metrics.jsonl that belong to an update; line 0 is the evaluation before training."""
    return [line for line in JsonlFile(folder / "metrics.jsonl").read() if line["update"] > 0]


SHORTENED_RECIPE_FILE = "recipe.yaml"


def main(argv: list[str]) -> int:
    options, cls = read_with_recipe(VerifyOptions, argv, prog="zerofit verify")
    configs = find_strategies([REFERENCE_STRATEGY, *options.names])
    name = name_of_recipe(options.source("config"), options.task)
    output = Path(options.output or Path("outputs") / f"verify-{name}")
    check_folder_of(output, SHORTENED_RECIPE_FILE, "proof")
    check_paths(options, output, "output")
    values, changes = shorten(options, cls)
    log_lines(
        f"recipe    {options.source('config') or 'of flags'}",
        *(f"changed   {change}" for change in changes),
        f"compared  to {options.largest_difference:g}, in {precision_of(options)}",
        f"folder    {output}",
    )
    output.mkdir(parents=True, exist_ok=True)
    (output / SHORTENED_RECIPE_FILE).write_text(recipe_text(values), encoding="utf-8")
    proof = Proof(options, configs, output, output / SHORTENED_RECIPE_FILE)
    with ending_in_order():
        proof.run()
    (output / "report.txt").write_text(proof.report() + "\n", encoding="utf-8")
    log_lines("", proof.report(screen_width()))
    if proof.passed and not options.keep:  # the recipe, the report and the logs stay
        for folder in (REFERENCE_FOLDER, *(Path(name).stem for name in options.names)):
            for path in (output / folder, output / f"{folder}-killed"):
                shutil.rmtree(path, ignore_errors=True)
    return 0 if proof.passed else 1
