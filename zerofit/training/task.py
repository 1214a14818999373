"""The small interface through which the loop knows a task."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from zerofit.data.collate import Batch
from zerofit.data.order import Order
from zerofit.data.pack import SampleSet
from zerofit.model.experts import Routing
from zerofit.model.preference import PreferenceLoss
from zerofit.recipe.batch_options import Growth
from zerofit.recipe.tasks import TaskRecipe


@dataclass
class Task:
    """A task, ready to be trained.

    Args:
        loss_sum: (model, batch) -> the loss summed over the batch's targets, a scalar with a gradient.
        train_set: None where nothing is trained.
        evaluate: (engine) -> held-out figures, the same on every rank; `eval_loss` among them. All ranks call
            it together. None where nothing is held out.
        num_held_out: samples that an evaluation reads, on all ranks together.
        figures: the names of the held-out figures, without their `eval_`; the first says which evaluation is the best.
        unit: what the loss is a mean over, for the plot.
        grouping: who shares a batch (`length_grouping` of the recipe).
        longest: how many tokens a row may have, by column: of `input_ids`, and of `labels` where they have a length of
            their own; and of groups the shape of `sizes` (records, texts of a record).
        lengths: of rows that grow in the first updates, in tokens; None: samples are read in full.
        order: of the samples, where they come in one of their own; None: shuffled anew in each epoch.
        predict: (engine) -> the files that the main process has written: the answers to predict_file. All ranks call
            it together.
        routing: of a mixture of experts, what its routers chose.
        preference: of pairs of answers, their loss, which counts what came of them.
        baseline: lines for the log: the held-out figures of answers that take no learning.
        report: lines for the log, from the predictions in the run's folder; only the main process calls it.
    """

    recipe: TaskRecipe
    train_set: SampleSet | None
    collate: Callable[[list[Any]], Batch]
    loss_sum: Callable[[Any, Batch], torch.Tensor]
    evaluate: Callable[[Any], dict[str, float]] | None
    figures: tuple[str, ...] = ("loss", "perplexity")
    unit: str = "token"
    grouping: str = "none"
    longest: dict[str, Any] = field(default_factory=dict)
    lengths: Growth | None = None
    order: Order | None = None
    predict: Callable[[Any], list[str]] | None = None
    baseline: Callable[[], list[str]] | None = None
    report: Callable[[], list[str]] | None = None
    routing: Routing | None = None
    preference: PreferenceLoss | None = None
    num_held_out: int = 0

    @property
    def samples(self) -> SampleSet:
        """The training set, of a task that trains."""
        assert self.train_set is not None
        return self.train_set

    def remarks(self) -> list[str]:
        """Lines for the log below the held-out figures. Only the main process asks for them."""
        return [line for say in (self.baseline, self.report) if say for line in say()]
