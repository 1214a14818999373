"""The small interface through which the loop knows a task."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from train.data.collate import Batch
from train.data.pack import SampleSet
from train.recipe.options import TrainingRecipe


@dataclass
class Job:
    """A task, ready to be trained.

    Args:
        loss_sum: (model, batch) -> the loss summed over the batch's targets, a scalar with a gradient.
        evaluate: (engine, job) -> held-out figures; `eval_loss` among them. All ranks call it together.
    """

    recipe: TrainingRecipe
    train_set: SampleSet
    eval_set: SampleSet | None
    collate: Callable[[list], Batch]
    loss_sum: Callable[[Any, Batch], torch.Tensor]
    evaluate: Callable[..., dict[str, float]]
