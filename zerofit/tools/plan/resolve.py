"""A strategy pair as a run of so many processes would resolve it, without a launcher and without processes."""

import tempfile
from pathlib import Path

from zerofit.estimate.planned_model import PlannedModel
from zerofit.estimate.planned_strategy import PlannedStrategy, plan_strategy
from zerofit.model.lora import check_expert_targets, check_quantised_sharding, split_targets
from zerofit.recipe.errors import UserError
from zerofit.tools.plan.layouts import Degrees, StrategyPair
from zerofit.tools.rank_environment import strategy_of_a_launch
from zerofit.training.configuration import check_layout, check_task


def resolve(name: str, recipe, model: PlannedModel, world_size: int, gpus_per_node: int) -> PlannedStrategy:
    """The strategy as read_strategy has it in a process of such a launch.

    Raises:
        UserError: no such strategy, a contradiction between recipe, YAML and JSON, no such batch; degrees of
            parallelism that the model or the task does not have.
    """
    recipe = recipe.draft()
    recipe.reset_option("gradient_accumulation_steps" if recipe.global_batch_size else "global_batch_size")
    recipe.reset_option("global_batch_warmup")
    recipe.per_device_train_batch_size = 1
    strategy = strategy_of_a_launch(recipe, name, "--strategies", world_size, min(world_size, gpus_per_node))
    check_task(model.task, strategy)
    check_layout(model.config, strategy)
    if recipe.lora:
        check_quantised_sharding(recipe, strategy)
        targets = [name for text in recipe.lora_target_modules or () for name in text.split(",") if name]
        check_expert_targets(split_targets(model.full, targets)[1], strategy, recipe)
    return plan_strategy(name, strategy, model)


def resolve_with(
    name: str, pair: StrategyPair, degrees: Degrees, recipe, model: PlannedModel, world_size: int, gpus_per_node: int
) -> PlannedStrategy:
    """The same for a pair with other degrees than its own: it is written with them, as `--write` does, and read.

    Raises:
        UserError: as resolve.
    """
    if degrees == pair.degrees:
        return resolve(name, recipe, model, world_size, gpus_per_node)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{pair.source.stem}.yaml"
        pair.with_degrees(degrees).write(file)
        try:
            found = resolve(str(file), recipe, model, world_size, gpus_per_node)
        except UserError as error:
            named = {str(file): str(pair.source), str(file.with_suffix(".json")): str(pair.json_file)}
            raise UserError(_replaced(problem, named) for problem in error.problems) from None
    return PlannedStrategy(name, found.layout, found.precision, found.sharding)


def _replaced(text: str, words: dict[str, str]) -> str:
    for word, other in words.items():
        text = text.replace(word, other)
    return text
