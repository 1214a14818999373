"""A user's recipe, shortened for all runs of a proof: without noise, and without what only costs time."""

import re
from typing import Any

from zerofit.model.adapter_folder import on_its_base
from zerofit.recipe.batch_options import BatchOptions
from zerofit.recipe.options import TrainingRecipe
from zerofit.strategy.batches import resolve_batches
from zerofit.tools.tool_recipe import NOT_KEPT, QUIET, ToolRecipe, recipe_values

NOISE = re.compile(r"(dropout|pdrop|dropout_prob|dropout_rate|layerdrop|drop_rate|drop_path|jitter_noise)$")
OMITTED = NOT_KEPT | {"num_train_epochs", "gradient_accumulation_steps"}  # max_train_steps, global_batch_size
REPLACED = QUIET | {"logging_steps": 1, "predict_with_generate": False, "record_samples": True}
EVALUATED = 16  # held-out records in the one evaluation at the end, which cannot be turned off


def shorten(recipe, cls: type[TrainingRecipe]) -> ToolRecipe:
    """Shorten a recipe, whose type is both `cls` and VerifyOptions; noted is what changes the numbers.

    Raises:
        UserError: the global batch does not divide by the processes; the model's configuration cannot be loaded.
    """
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


def precision_of(recipe) -> str:
    """The value of the --precision flag, else fp32: a recipe's half precision would hide differences."""
    return recipe.precision if recipe.source("precision") == "--precision" and recipe.precision else "fp32"


def _silence(recipe, values: dict[str, Any]) -> list[str]:
    """Turn dropout off: its noise depends on the number of processes."""
    _, config = on_its_base(recipe)
    noisy = sorted(name for name, value in config.to_dict().items() if _is_noise(name, value))
    if noisy:
        overrides = [recipe.config_overrides, *(f"{name}=0" for name in noisy)]
        values["config_overrides"] = ",".join(text for text in overrides if text)
    if recipe.lora_dropout:
        values["lora_dropout"] = 0.0
        noisy.append("lora_dropout")
    return [f"no dropout ({', '.join(noisy)} = 0)"] if noisy else []


def _is_noise(name: str, value: Any) -> bool:
    return bool(NOISE.search(name)) and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
