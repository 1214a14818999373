"""The options of tools that read a training recipe: one command line sets the tool's options and the recipe's."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from zerofit.recipe.base import Recipe, option
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import read_yaml, recipe_file
from zerofit.recipe.parse import REMOVED_OPTIONS, flag_value, parse_recipe, wants_help
from zerofit.recipe.tasks import TASKS, TaskRecipe, task_of_recipe
from zerofit.record.terminal import log_to_stderr

if TYPE_CHECKING:
    Joined = TaskRecipe  # which `join_with_recipe` adds to the options of a tool
else:
    Joined = Recipe
T = TypeVar("T", bound="TaskOption")
# Options that a tool's trial run does not get: it saves and tracks nothing, and does not stop early.
KEPT_RUN_OPTIONS = set(
    "output_dir overwrite_output_dir resume max_hours save_strategy save_steps save_total_limit mirror".split()
    + "metric_for_best_model early_stopping_patience load_best_model_at_end".split()
    + "push_to_hub report_to report_name sample_prompt".split()
)
QUIET_RUN_VALUES = {
    "eval_on_start": False,
    "with_tracking": False,
    "sample_tokens": 0,
    "n_val_batch_generations": 0,
}
NAMES_FORM = (".*[^, ].*", "names, e.g. --strategies ddp,zero2")
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass
class TaskOption(Joined):
    """The task"""

    task: str = option(
        None, "The task; by default the name of the recipe's folder.", choices=tuple(TASKS), common=True
    )

    def settle(self) -> None:
        """Take the task of the joined recipe where --task is not set."""
        super().settle()
        self.task = self.task or getattr(super(), "task", self.task)


@dataclass
class StrategiesOptions(TaskOption):
    """Which strategies"""

    strategies: list[str] = option(
        ["ddp", "zero2", "zero3"],
        "Names in accelerate_configs/, or .yaml files: zero2,zero3.",
        common=True,
        form=NAMES_FORM,
    )

    @property
    def names(self) -> list[str]:
        """Return the names of the strategies, without duplicates."""
        return list(dict.fromkeys(name for text in self.strategies for name in text.split(",") if name))


@dataclass
class LaunchedStrategiesOptions(StrategiesOptions):
    """Which strategies are launched"""

    num_processes: int = option(2, "Processes of each strategy.", positive=True, common=True)


@dataclass
class BatchSizesOptions(Recipe):
    """Which micro-batches"""

    batch_sizes: list[str] = option(
        ["auto"],
        "auto: find the largest micro-batch; or the micro-batches to look at: 1,8,40.",
        common=True,
        form=("auto|( *[1-9][0-9]* *,?)+", "auto, or sizes such as 8,16,40"),
    )

    def problems(self) -> list[str]:
        given = " ".join(self.batch_sizes)
        is_mixed = "auto" in self.batch_sizes and given != "auto"
        return super().problems() + ([f"batch_sizes = {given}: say auto alone, or sizes"] if is_mixed else [])

    @property
    def micro_batches(self) -> list[int] | None:
        """Return the given micro-batches, sorted; None: auto."""
        if self.batch_sizes == ["auto"]:
            return None
        return sorted({int(text) for sizes in self.batch_sizes for text in sizes.split(",") if text})


def read_with_recipe(tool: type[T], argv: list[str], prog: str) -> tuple[T, type[TaskRecipe]]:
    """Return (one object with the options of the tool and of its task's recipe, the type of the recipe)."""
    task, joined = join_with_recipe(tool, argv, prog)
    options = parse_recipe(joined, argv, prog=prog, tool=True)
    cls = TASKS[task]
    if options.strategy:
        raise UserError(f"{prog} takes --strategies: --strategies {options.strategy}")
    if not options.trains:
        raise UserError(f"{prog} trains: remove evaluate_only and predict_file")
    for note in options.left_out:
        log_to_stderr(f"note      {note}")
    return options, cls


def join_with_recipe(tool: type[T], argv: list[str], prog: str) -> tuple[str, type[T]]:
    """Return (the task, a type with the options of the tool and of the task's recipe). With `--help` and no task it
    prints the tool's options and exits. Raises UserError: the task is unknown, or the recipe cannot be read."""
    config = flag_value(argv, "config")
    task = flag_value(argv, "task") or (task_of_recipe(recipe_file(config)) if config else None)
    if task not in TASKS:
        if wants_help(argv):
            parse_recipe(tool, argv, prog=prog, tool=True)
        problems = [
            f"--{name} is not an option: {hint}"
            for name, hint in REMOVED_OPTIONS.items()
            if f"--{name}" in argv and not hasattr(tool, name)
        ]
        if config and not problems:
            read_yaml(Path(recipe_file(config)))  # raises if the file is missing or not YAML
        if argv and not argv[0].startswith("--"):
            problems.append(f"{argv[0]!r} is not an option. Name a recipe with --config {argv[0]}")
        raise UserError(problems or f"the task is unknown: set --task to one of {', '.join(TASKS)}")
    return task, dataclasses.make_dataclass(tool.__name__, [], bases=(tool, TASKS[task]))


def recipe_values(
    options: TaskOption, cls: type[TaskRecipe], omit: set[str], replace: Mapping[str, object]
) -> dict[str, Any]:
    """Return {option: value} of all options of the recipe that were set, except those in `omit`. Values of `replace`
    are added for the options that the task has."""
    names = [field.name for field in dataclasses.fields(cls)]
    values = {name: getattr(options, name) for name in names if options.source(name) and name not in omit}
    return values | {name: value for name, value in replace.items() if name in names}


def recipe_text(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
