"""The environment of a rank, without a launcher and without processes: to resolve a strategy as a run would."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from unittest.mock import patch

from zerofit.recipe.options import TrainingRecipe
from zerofit.strategy.read import read_strategy
from zerofit.strategy.strategy import Strategy

LAUNCHER = ("ACCELERATE_", "DEEPSPEED_", "TORCHELASTIC_")  # variables that a launcher above this process has set
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def environment_of_a_rank(
    world_size: int, local_world_size: int, base: Mapping[str, str]
) -> AbstractContextManager[None]:
    """The process' environment is `base`, and what torchrun adds for rank 0, until the context ends."""
    ranks = dict(zip(RANKS, ("0", "0", str(world_size), str(local_world_size))))
    return patch.dict(os.environ, {**base, **ranks}, clear=True)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what a launcher has put into it."""
    return {name: value for name, value in environment.items() if not name.startswith(LAUNCHER)}


def strategy_of_a_launch(
    recipe: TrainingRecipe, name: str, source: str, world_size: int, local_world_size: int
) -> Strategy:
    """The strategy (a name in accelerate_configs/, or a .yaml file; `source`: the flag that names it) as a run of
    `world_size` processes has it. The recipe adopts what it leaves open and the pair states. Raises UserError: no such
    strategy, a contradiction between recipe, YAML and JSON, no such batch."""
    # A GPU that is here and that torch does not see is no matter.
    base = without_launcher(os.environ) | {"ACCELERATE_USE_CPU": "true"}
    with environment_of_a_rank(world_size, local_world_size, base):
        recipe.adopt("strategy", name, source)
        return read_strategy(recipe)
