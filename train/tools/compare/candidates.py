"""What is compared: strategies, each with what it changes in the recipe, and the recipe that their trials have."""

import re
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from train.recipe.errors import UserError
from train.recipe.options import TrainingRecipe
from train.recipe.parse import parse_recipe
from train.strategy.pairs import find_strategies
from train.tools.tool_recipe import NOT_KEPT, QUIET, settled_values

LEFT_OUT = NOT_KEPT | {"on_fault", "eval_steps", "per_device_train_batch_size", "global_batch_size"}
OF_THE_RUN = {  # what a run of --finish has of its own
    "output_dir", "overwrite_output_dir", "resume", "run_name", "per_device_train_batch_size",
}  # fmt: skip
INSTEAD = QUIET | {
    "save_strategy": "no", "save_minutes": 0.0, "pad_to_max_length": True, "max_eval_batches": 1,
    "record_samples": False, "watchdog_minutes": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """One line of the comparison.

    Args:
        name: as the user wrote it, e.g. zero2 or zero2:lora=true.
        config: the strategy's accelerate YAML.
        overrides: options of the recipe that this line sets, as texts.
        in_trials: further flags, of its trials alone.
    """

    name: str
    config: Path
    overrides: dict[str, str] = field(default_factory=dict)
    in_trials: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        return [word for name, text in self.overrides.items() for word in (f"--{name}", text)]

    @property
    def folder_name(self) -> str:
        return re.sub(r"[^\w.=-]+", "-", Path(self.name).name)


def read_contenders(names: list[str]) -> list[Candidate]:
    """`S` or `S:option=value:option=value`, S being a strategy.

    Raises:
        UserError: an unknown strategy (those there are, are named), or an override that is none.
    """
    parts = {name: re.split(r":(?=[^:=]+(?:=|$|:))", name) for name in names}
    wrong = [(name, text) for name, (_, *pairs) in parts.items() for text in pairs if not re.match(r"[\w-]+=.", text)]
    if wrong:
        raise UserError([f"strategy {name!r}: {text!r} sets nothing. Write STRATEGY:option=value, e.g. zero2:lora=true"
                         for name, text in wrong])  # fmt: skip
    configs = find_strategies([strategy for strategy, *_ in parts.values()])
    return [
        Candidate(name, configs[strategy], dict(_pair(text) for text in pairs))
        for name, (strategy, *pairs) in parts.items()
    ]


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.replace("-", "_"), value


@dataclass(frozen=True)
class TrialRecipe:
    """The recipe of all trials: its options, and what of the user's recipe is not as it was."""

    values: dict[str, Any]
    notes: list[str]

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True)


def make_recipe(options, cls: type[TrainingRecipe]) -> TrialRecipe:
    """The user's recipe without what a trial has no use for, from options that hold both.

    Raises:
        UserError: a flag sets what has no effect here.
    """
    without_use = OF_THE_RUN if options.finish else LEFT_OUT - {"global_batch_size"}
    useless = [name for name in sorted(without_use) if options.source(name) == f"--{name}"]
    if useless:
        remedies = {"per_device_train_batch_size": "say --batch_sizes", "output_dir": "say --output"}
        raise UserError([f"--{name} has no effect in a comparison{': ' * (name in remedies)}{remedies.get(name, '')}"
                         for name in useless])  # fmt: skip
    values, notes = settled_values(options, cls, LEFT_OUT, INSTEAD), []
    if "max_eval_batches" not in values:
        values["max_eval_samples"] = _one_batch(options, options.per_device_eval_batch_size)
    if options.global_batch_size and not options.gradient_accumulation_steps:
        values["gradient_accumulation_steps"] = 2
        notes.append(
            f"global_batch_size = {options.global_batch_size} is left out, since batch sizes are compared; updates "
            "accumulate 2 micro-batches, so that gradients are held while the second is computed"
        )
    return TrialRecipe(values, notes)


def _one_batch(options, batch_size: int) -> int:
    """Held-out samples of one batch on each process: of examples and pairs there is no number of batches to set."""
    most = batch_size * options.num_processes
    return min(options.max_eval_samples or most, most)


def evaluating_one_batch(candidates: list[Candidate], recipe: TrialRecipe, options) -> list[Candidate]:
    """The contenders, their trials evaluating one batch of the size that each of them sets for itself."""
    own = "per_device_eval_batch_size"
    return [
        replace(each, in_trials=("--max_eval_samples", str(_one_batch(options, int(each.overrides[own])))))
        if own in each.overrides and "max_eval_batches" not in recipe.values else each
        for each in candidates
    ]  # fmt: skip


def check_overrides(candidates: list[Candidate], recipe: TrialRecipe, cls: type[TrainingRecipe]) -> None:
    """Raises UserError, with all problems, if a contender's recipe is none."""
    problems = []
    for candidate in candidates:
        try:
            with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
                file.write(recipe.to_yaml())
                file.flush()
                parse_recipe(cls, ["--config", file.name, *candidate.flags], tool=True)
        except UserError as error:
            problems += [f"{candidate.name}: {problem}" if candidate.overrides else problem
                         for problem in error.problems]  # fmt: skip
        own = sorted(candidate.overrides.keys() & (LEFT_OUT | INSTEAD.keys()))
        problems += [f"{candidate.name}: {name} is settled by the comparison itself" for name in own]
    if problems:
        raise UserError(list(dict.fromkeys(problems)))
