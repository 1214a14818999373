"""Evaluation: every held-out sample once, whatever the number of processes and the size of the last batch; and the
best evaluation so far.

Logits are never gathered: each rank sends two sums, and a few numbers or a text for each example.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zerofit.checkpoint.writer import BestEvaluation
from zerofit.data.collate import Batch
from zerofit.data.order import FILLER, FixedOrder, make_loader, rank_batches
from zerofit.data.pack import SampleSet
from zerofit.recipe.errors import UserError
from zerofit.recipe.options import EvaluationOptions
from zerofit.strategy.devices import pins_memory
from zerofit.strategy.engine import Engine

LOWER_IS_BETTER = ("loss", "perplexity", "mse", "mae", "wer", "cer", "ter")  # the first word of figures' names


@dataclass(frozen=True)
class BestMetricTracker:
    """The best evaluation so far, and the patience of early stopping."""

    metric: str  # the figure's name without `eval_`
    patience: int | None = None  # evaluations in a row without a better one, after which training stops; None: never
    keeps: bool = False  # checkpoints/best gets the weights of the best evaluation
    loads: bool = False  # model/ gets the weights of the best evaluation, not the last ones
    best: BestEvaluation = field(default_factory=BestEvaluation)

    def record_evaluation(self, update: int, figures: dict[str, float]) -> bool:
        """Record the figures of an evaluation. Returns True if it is the best so far; a NaN never is."""
        value = figures[f"eval_{self.metric}"]
        best = self.best
        best.metric = self.metric
        sign = -1 if self.metric.partition("_")[0] in LOWER_IS_BETTER else 1
        better = value == value if best.update is None else sign * (value - best.value) > 0
        if better:
            best.update = update
            best.value = value
            best.figures = figures
            best.worse_in_a_row = 0
        else:
            best.worse_in_a_row += 1
        return better

    @property
    def is_exhausted(self) -> bool:
        """Return True if patience has run out."""
        return self.patience is not None and self.best.worse_in_a_row >= self.patience


def make_best_tracker(
    recipe: EvaluationOptions, figures: tuple[str, ...], is_evaluated: bool, best: BestEvaluation
) -> BestMetricTracker:
    """Make the tracker that the recipe asks for. Raises UserError: there is no such figure, or nothing to measure.

    Args:
        figures: the names of the figures of an evaluation; the first is the default metric.
    """
    metric = (recipe.metric_for_best_model or figures[0]).removeprefix("eval_")
    if metric == "f1" and "f1" not in figures and "f1_macro" in figures:
        metric = "f1_macro"  # with more than two classes: the mean over classes
    if metric not in figures:
        raise UserError(
            f"metric_for_best_model = {metric!r}: evaluation gives {', '.join(figures)}. Name one of these"
        )
    for option in ("early_stopping_patience", "load_best_model_at_end"):
        if getattr(recipe, option) and not is_evaluated:
            raise UserError(
                f"{option} = {getattr(recipe, option)}: nothing is held out, so no figure tells which is the best. "
                "Name a validation_file, or set validation_split_percentage"
            )
    patience = recipe.early_stopping_patience
    loads = recipe.load_best_model_at_end
    is_asked_for = any((loads, patience, recipe.metric_for_best_model))
    keeps = is_evaluated and (is_asked_for or not {"loss", "perplexity"}.issuperset(figures))
    loads = patience is not None if loads is None else loads
    return BestMetricTracker(metric, patience, keeps, loads and keeps, best)


def eval_batches(
    engine: Engine,
    samples: SampleSet,
    collate: Callable[[list[Any]], Batch],
    batch_size: int,
    start: int = 0,
    *,
    stop: int | None = None,
) -> Iterator[Batch]:
    """Yield this rank's batches of the held-out samples, on its device. The model is in evaluation mode meanwhile.

    All ranks get the same number of batches; the last ones are filled up with rows that do not count.

    Args:
        start, stop: the places of the samples in the order of an evaluation; by default all.
    """
    count = len(samples)
    key = samples.sort_key
    layout = engine.layout
    order = FixedOrder(count, key)
    stop = count if stop is None else stop
    micro_batches = rank_batches(
        order, stop, start, batch_size, 1, num_replicas=layout.data_size, rank=layout.data_rank, sort_key=key
    )
    engine.model.eval()
    for batch in make_loader(samples, micro_batches, collate, 0, pin=pins_memory(engine.device)):
        engine.alive()
        yield batch.to(engine.device)
    engine.model.train()


def held_out_batches(
    engine: Engine, parts: Mapping[str, SampleSet], collate: Callable[[list[Any]], Batch], batch_size: int
) -> dict[str, Iterator[Batch]]:
    """Return {name of a held-out part: its `eval_batches`}."""
    return {name: eval_batches(engine, part, collate, batch_size) for name, part in parts.items()}


@torch.no_grad()
def held_out_loss(
    engine: Engine, batches: Mapping[str, Iterator[Batch]], loss_sum: Callable[[Any, Batch], torch.Tensor]
) -> dict[str, float]:
    """Return eval_loss (nats per token) and eval_perplexity over all batches of all ranks.

    Args:
        batches: {held-out part: its batches}. If there are several parts, the loss of each is a figure as well.
    """
    loss_sums = {}
    for name, part in batches.items():
        loss = torch.zeros((), dtype=torch.float32, device=engine.device)
        targets = 0.0
        for batch, batch_loss in engine.losses(part, loss_sum):
            loss += batch_loss
            targets += batch.num_targets
        loss_sums[name] = loss, targets
    figures = {f"eval_{name}": mean for name, mean in mean_losses(engine, loss_sums).items()}
    mean = figures["eval_loss"]
    return figures | {"eval_perplexity": math.exp(min(mean, 700.0)) if mean == mean else mean}


def mean_losses(engine: Engine, parts: Mapping[str, tuple[torch.Tensor, float]]) -> dict[str, float]:
    """Return {"loss": the mean over all replicas}, and "loss_NAME" for each of several parts. All ranks call it.

    Args:
        parts: {part: (summed loss, number of targets) of this rank}.
    """
    sums = engine.sum_over_replicas([number for loss, targets in parts.values() for number in (loss.item(), targets)])
    of_parts = list(zip(parts, sums[::2], sums[1::2])) if len(parts) > 1 else []
    return {"loss": sum(sums[::2]) / max(sum(sums[1::2]), 1)} | {
        f"loss_{name}": loss / max(targets, 1) for name, loss, targets in of_parts
    }


def gather_by_index(engine: Engine, rows: dict[int, Any]) -> list[Any] | None:
    """Gather the results of all examples from the ranks, in the order of the examples. Returns None but on the main
    process.

    Args:
        rows: {index of an example: its result on this rank}; FILLER is ignored.
    """
    rows.pop(FILLER, None)
    ranks = engine.gather_objects(rows)
    if ranks is None:
        return None
    by_index = {index: row for rank in ranks for index, row in rank.items()}
    assert sorted(by_index) == list(range(len(by_index))), "every example once"
    return [by_index[index] for index in range(len(by_index))]


def compute(name: str, predictions: list[Any], references: list[Any], **options: Any) -> dict[str, float]:
    """Return the figures of a metric of metrics.py, computed by the evaluate library."""
    from zerofit.training.metrics import METRICS  # with libraries that take seconds

    metric: Any = METRICS[name](keep_in_memory=True)
    figures: dict[str, float] = metric.compute(predictions=predictions, references=references, **options)
    return figures
