"""What a run needs, from the sizes that `zerofit plan` computes: no weights, no data."""

from dataclasses import dataclass
from typing import Any

from zerofit.estimate.memory_constants import MASTER_BYTES
from zerofit.estimate.planned_model import PlannedModel, read_planned_model
from zerofit.estimate.planned_strategy import plan_strategy
from zerofit.strategy.strategy import Strategy


@dataclass(frozen=True)
class Sizes:
    """In bytes, but for `parameters`.

    Attributes:
        state: weights, gradients and optimizer state of one process where it computes.
        host: of one process, beside the program: what is offloaded; on a CPU, the state too.
    """

    parameters: int
    trained: int
    state: int
    host: int
    checkpoint: int


def model_of(recipe: Any, task: str, on_gpu: bool) -> PlannedModel:
    """The model of a recipe, without weights.

    Raises:
        UserError: its configuration is not at hand, or it cannot get the adapter that the recipe names.
    """
    recipe = recipe.draft()
    recipe.architecture = None  # an option of plan
    return read_planned_model(recipe, task, on_gpu)


def size_up(subject: PlannedModel, strategy: Strategy) -> Sizes:
    """The model under a strategy, on one process."""
    recipe, on_gpu = subject.recipe, subject.on_gpu
    states = plan_strategy(strategy.name, strategy, subject).states(subject, strategy.batches.accumulation > 1)
    state = states.weights + states.optimizer + max(states.gradients, states.step.get("gradients", 0))
    weights = subject.weights
    return Sizes(
        parameters=weights.trained + weights.frozen,
        trained=weights.trained,
        state=state,
        host=sum(states.host.values()) + (0 if on_gpu else state),
        checkpoint=MASTER_BYTES * weights.trained + weights.state_bytes(recipe.optim),
    )
