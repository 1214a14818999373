"""The options of `zerofit compare`, its candidates (a strategy with overrides of the recipe), and the trials'
recipe."""

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerofit.recipe.base import option
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import parse_bytes
from zerofit.recipe.parse import parse_recipe
from zerofit.recipe.tasks import TaskRecipe
from zerofit.strategy.launch import find_strategies
from zerofit.tools.plan.plan_options import read_pair
from zerofit.tools.tool_recipe import (
    KEPT_RUN_OPTIONS,
    QUIET_RUN_VALUES,
    BatchSizesOptions,
    LaunchedStrategiesOptions,
    recipe_text,
    recipe_values,
)

OPTIONS_NOT_COMPARED = KEPT_RUN_OPTIONS | set(
    (
        "on_anomaly eval_steps per_device_train_batch_size global_batch_size global_batch_warmup "
        "block_size_warmup tokens_per_batch"
    ).split()
)
SET_BY_EACH_RUN = {  # {option of a run: what to do instead}
    "output_dir": "Name its folder with --output",
    "overwrite_output_dir": "Name another folder with --output",
    "resume": "Remove it: the same command resumes",
    "per_device_train_batch_size": "Name the sizes with --batch_sizes, e.g. --batch_sizes 8,16",
}
VALUES_OF_TRIALS = QUIET_RUN_VALUES | {
    "save_strategy": "no",
    "save_minutes": 0.0,
    "pad_to_max_length": True,
    "record_samples": False,
    "watchdog_minutes": 0.0,
}


@dataclass
class CompareOptions(BatchSizesOptions, LaunchedStrategiesOptions):
    """The largest batch of each strategy; zero2:lora=true, say, is zero2 with an option of the recipe of its own"""

    memory_limit: str | None = option(
        None,
        "Memory of one process' device: 24GiB; by default all it has. Without a GPU: --simulate.",
        common=True,
        form=(parse_bytes, "a size such as 24GiB, 800MiB or 24GB"),
    )
    simulate: str | None = option(
        None,
        "On simulated GPUs of this size: 24GiB, a100-80gb. Updates are timed, on this machine, with --steps.",
        common=True,
    )

    granularity: int = option(
        1, "The largest batch is found as a multiple of this, up to 4096.", positive=True, needs="batch_sizes=auto"
    )
    steps: int = option(5, "Timed updates of each batch size, after one or two that warm up.", minimum=2)
    trial_minutes: float = option(20.0, "A launch that shows nothing new for this long has timed out.", positive=True)
    finish: bool = option(False, "Then train each strategy at its best batch, and compare.", common=True)
    output: str | None = option(None, "Folder of the comparison; by default outputs/compare-RECIPE.")


@dataclass(frozen=True)
class Candidate:
    """A candidate of the comparison: a strategy, with the options of the recipe that it overrides.

    Args:
        name: as the user wrote it, e.g. zero2 or zero2:lora=true.
        config: the strategy's accelerate YAML.
        overrides: {option of the recipe: its value as text}.
    """

    name: str
    config: Path
    overrides: dict[str, str] = field(default_factory=dict)

    @property
    def flags(self) -> list[str]:
        """The overrides as command-line flags."""
        return [word for name, text in self.overrides.items() for word in (f"--{name}", text)]

    @property
    def contents(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The contents of the strategy's YAML and JSON."""
        pair = read_pair(str(self.config))
        return pair.content, pair.config

    @property
    def folder_name(self) -> str:
        """The name with - in place of characters that a folder's name should not have."""
        return re.sub(r"[^\w.=-]+", "-", Path(self.name).name)


def read_candidates(names: list[str]) -> list[Candidate]:
    """Parse `STRATEGY` or `STRATEGY:option=value:option=value`. Raises UserError: an unknown strategy, or an override
    that sets nothing."""
    strategies_and_overrides = {name: re.split(r":(?=[^:=]+(?:=|$|:))", name) for name in names}
    invalid = [
        (name, text)
        for name, (_, *texts) in strategies_and_overrides.items()
        for text in texts
        if not re.match(r"[\w-]+=.", text)
    ]
    if invalid:
        raise UserError(
            [f"strategy {name!r}: {text!r} sets nothing, as zero2:lora=true does" for name, text in invalid]
        )
    configs = find_strategies([strategy for strategy, *_ in strategies_and_overrides.values()])
    candidates = []
    for name, (strategy, *texts) in strategies_and_overrides.items():
        overrides = dict(text.split("=", 1) for text in texts)
        overrides = {option.replace("-", "_"): value for option, value in overrides.items()}
        candidates.append(Candidate(name, configs[strategy], overrides))
    return candidates


def make_recipe(options: CompareOptions, cls: type[TaskRecipe]) -> tuple[dict[str, Any], list[str]]:
    """Return (the values of the user's recipe without the options that a trial does not use, notes on what differs).
    Raises UserError: a flag sets an option that has no effect."""
    unused = SET_BY_EACH_RUN if options.finish else OPTIONS_NOT_COMPARED - {"global_batch_size"}
    useless = [name for name in sorted(unused) if options.source(name) == f"--{name}"]
    if useless:
        raise UserError(
            [f"--{name} has no effect in a comparison. {SET_BY_EACH_RUN.get(name, 'Remove it')}" for name in useless]
        )
    values = recipe_values(options, cls, OPTIONS_NOT_COMPARED, VALUES_OF_TRIALS)
    notes = []
    values["max_eval_samples"] = limit_eval_samples(options, options.per_device_eval_batch_size)
    if options.global_batch_size and not options.gradient_accumulation_steps:
        values["gradient_accumulation_steps"] = 2
        notes.append(f"global_batch_size = {options.global_batch_size} is ignored: batch sizes are compared")
    return values, notes


def limit_eval_samples(options: CompareOptions, batch_size: int) -> int:
    """Return the number of held-out samples that give each process one batch."""
    samples = batch_size * options.num_processes
    return min(options.max_eval_samples or samples, samples)


def check_overrides(candidates: list[Candidate], values: dict[str, Any], cls: type[TaskRecipe]) -> None:
    """Raises UserError, with all problems, if the overrides of a candidate do not make a valid recipe."""
    problems = []
    for candidate in candidates:
        try:
            with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
                file.write(recipe_text(values))
                file.flush()
                parse_recipe(cls, ["--config", file.name, *candidate.flags], tool=True)
        except UserError as error:
            problems += [
                f"{candidate.name}: {problem}" if candidate.overrides else problem for problem in error.problems
            ]
        fixed = sorted(candidate.overrides.keys() & (OPTIONS_NOT_COMPARED | VALUES_OF_TRIALS.keys()))
        problems += [f"{candidate.name}: {name} is set by the comparison itself" for name in fixed]
    if problems:
        raise UserError(list(dict.fromkeys(problems)))
