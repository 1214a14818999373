"""The options of a proof, and a user's recipe shortened for its runs: without noise, and what only costs time."""

import re
from dataclasses import dataclass
from typing import Any

from zerofit.model.adapter_folder import with_base_configuration
from zerofit.recipe.batch_options import BatchOptions
from zerofit.recipe.fields import option
from zerofit.recipe.tasks import TaskRecipe
from zerofit.strategy.batches import resolve_batches
from zerofit.tools.tool_recipe import NOT_KEPT, QUIET, LaunchedStrategiesOptions, ToolRecipe, recipe_values

NOISE = re.compile(r"(dropout|pdrop|dropout_prob|dropout_rate|layerdrop|drop_rate|drop_path|jitter_noise)$")
OMITTED = NOT_KEPT | {"num_train_epochs", "gradient_accumulation_steps"}  # max_train_steps, global_batch_size
REPLACED = QUIET | {"logging_steps": 1, "predict_with_generate": False, "record_samples": True}
EVALUATED = 16  # held-out records in the one evaluation at the end, which cannot be turned off
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
        """save_steps of a run that is killed; a recipe's own may be more than all updates of the proof."""
        return (self.save_steps if self.is_flag("save_steps") else None) or max(1, self.updates // 6)

    @property
    def largest_difference(self) -> float:
        """The largest relative difference of figures that agree."""
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


def shorten(recipe: VerifyOptions, cls: type[TaskRecipe]) -> ToolRecipe:
    """Shorten a recipe, whose type is both `cls` and VerifyOptions; noted is what changes the numbers. Raises
    UserError: the global batch does not divide by the processes; the model's configuration cannot be loaded."""
    values = recipe_values(recipe, cls, OMITTED, REPLACED)
    batches = resolve_batches(recipe, recipe.num_processes)
    values["global_batch_size"] = batches.global_batch
    if recipe.kills:
        other = BatchOptions(batches.micro_batch, global_batch_size=batches.global_batch)
        resolve_batches(other, recipe.resumed_processes, total_stays=True)
    values |= {"max_train_steps": recipe.updates, "eval_steps": recipe.updates}
    values["max_eval_samples"] = min(recipe.max_eval_samples or EVALUATED, EVALUATED)
    changes = [f"{recipe.updates} updates of {batches.global_batch} samples"]
    values["precision"] = precision_of(recipe)
    if recipe.precision not in (None, values["precision"]):
        changes.append(f"precision {values['precision']} instead of {recipe.precision} (unless --precision is given)")
    longest = recipe.updates // 3
    if recipe.num_warmup_steps > longest:
        values["num_warmup_steps"] = longest
        changes.append(f"num_warmup_steps {longest} instead of {recipe.num_warmup_steps}")
    return ToolRecipe(values, [*changes, *_silence(recipe, values)])


def precision_of(recipe: VerifyOptions) -> str:
    """The value of the --precision flag, else fp32: a recipe's half precision would hide differences."""
    return recipe.precision if recipe.source("precision") == "--precision" and recipe.precision else "fp32"


def _silence(recipe: VerifyOptions, values: dict[str, Any]) -> list[str]:
    """Turn dropout off: its noise depends on the number of processes."""
    _, config = with_base_configuration(recipe)
    kinds = (int, float)
    noisy = sorted(
        name for name, value in config.to_dict().items() if NOISE.search(name) and type(value) in kinds and value > 0
    )
    if noisy:
        overrides = [recipe.config_overrides, *(f"{name}=0" for name in noisy)]
        values["config_overrides"] = ",".join(text for text in overrides if text)
    if recipe.lora_dropout:
        values["lora_dropout"] = 0.0
        noisy.append("lora_dropout")
    return [f"no dropout ({', '.join(noisy)} = 0)"] if noisy else []
