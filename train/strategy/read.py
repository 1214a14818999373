"""From the launcher's environment and the pair behind it to the strategy of a run: read, and checked, before data."""

from typing import Any

from train.recipe.base import Recipe
from train.recipe.errors import UserError
from train.strategy.batches import resolve_batches
from train.strategy.deepspeed_config import refuse_another_optimizer, resolve_config
from train.strategy.deepspeed_json import read_config, stated_precision
from train.strategy.gpus import check_devices
from train.strategy.launch import Launch, read_launch
from train.strategy.named import take_named
from train.strategy.strategy import Stated, Strategy


def read_strategy(recipe: Recipe) -> Strategy:
    """Read the launcher's environment and the pair behind it, and see that recipe, YAML and JSON agree.

    Values that the recipe leaves open and the pair states are adopted into the recipe.

    Raises:
        UserError: any contradiction, with both values and both sources; a GPU that torch does not see.
    """
    launch = read_launch(take_named(recipe))
    check_devices()
    stated = [_of_launcher(launch)]
    if not launch.deepspeed:
        recipe.precision, stated = _agreed_precision(recipe, stated)
        return Strategy(
            launch,
            resolve_batches(recipe, launch.world_size),
            recipe.precision,
            None,
            launch.source,
            stated=tuple(stated),
        )
    config, source, notes = read_config(launch)
    recipe.precision, stated = _agreed_precision(recipe, [*stated, _of_json(config, source)])
    resolved, batches = resolve_config(config, source, recipe, launch)
    refuse_another_optimizer(resolved, source, recipe.precision)
    strategy = Strategy(launch, batches, recipe.precision, resolved, source, tuple(notes), tuple(stated))
    strategy = strategy.with_precision(recipe.precision)
    return strategy if recipe.trains else strategy.without_optimizer()


def _of_launcher(launch: Launch) -> Stated:
    if launch.states_precision_by_flag:
        source = "accelerate launch"
        return Stated(launch.precision, source, f"{source} --mixed_precision {launch.precision}", "Use bf16 or no")
    statement = f"{launch.config_file}: mixed_precision = {launch.precision}"
    return Stated(launch.precision, launch.source, statement, 'Write bf16, or "no" for fp32')


def _of_json(config: dict[str, Any], source: str) -> Stated:
    value = stated_precision(config, source)
    return Stated(value, source, f"{source}: {value}.enabled = true", 'Write "auto"')


def _agreed_precision(recipe, statements: list[Stated]) -> tuple[str, list[Stated]]:
    """(the precision, those who state it)."""
    stated = [each for each in statements if each.value]
    source = recipe.source("precision")
    if source:
        stated.append(Stated(recipe.precision, source, f"precision = {recipe.precision} ({source})",
                           "Use bf16 or fp32"))  # fmt: skip
    if len({each.value for each in stated}) > 1:
        sides = " and ".join(f"{each.value} ({each.source})" for each in stated)
        raise UserError(
            f"precision is {sides}: make them agree. The recipe's `precision` is its place, "
            "the others may leave it open"
        )
    return (stated[0].value if stated else "fp32"), stated
