"""Which evaluation was the best so far, and whether it is time to stop."""

import math
from dataclasses import dataclass, field

from train.recipe.errors import UserError, nearest
from train.recipe.options import EvaluationOptions

LOWER_IS_BETTER = ("loss", "perplexity", "mse")


@dataclass
class BestMetricTracker:
    """Keeps the best held-out figure.

    Args:
        metric: the figure's name without `eval_`.
        patience: evaluations in a row without a better one, after which training stops; None: never.
        threshold: how much better counts as better.
    """

    metric: str
    patience: int | None = None
    threshold: float = 0.0
    update: int | None = None
    value: float = math.nan
    worse_in_a_row: int = 0
    figures: dict[str, float] = field(default_factory=dict)

    def is_best(self, update: int, figures: dict[str, float]) -> bool:
        """Take an evaluation's figures. Returns whether it is the best so far; a NaN never is."""
        value = figures[f"eval_{self.metric}"]
        better = value == value if self.update is None else self._gain(value, self.value) > self.threshold
        if better:
            self.update, self.value, self.figures, self.worse_in_a_row = update, value, figures, 0
        else:
            self.worse_in_a_row += 1
        return better

    def unbeaten_start(self, before: dict[str, float]) -> float | None:
        """The figure of the evaluation before training, where no later one is better; else None."""
        start = before.get(f"eval_{self.metric}")
        return start if start is not None and self._gain(self.value, start) <= 0 else None

    def _gain(self, value: float, than: float) -> float:
        return (than - value) if self.metric.startswith(LOWER_IS_BETTER) else (value - than)

    @property
    def is_exhausted(self) -> bool:
        """Whether patience has run out."""
        return self.patience is not None and self.worse_in_a_row >= self.patience


def make_best_tracker(recipe: EvaluationOptions, figures: tuple[str, ...], is_evaluated: bool) -> BestMetricTracker:
    """The judge that the recipe asks for.

    Args:
        figures: what an evaluation gives; the first is the task's own choice.
        is_evaluated: whether the run has anything to evaluate on.

    Raises:
        UserError: there is no such figure, or nothing to judge by.
    """
    metric = (recipe.metric_for_best_model or figures[0]).removeprefix("eval_")
    if metric not in figures:
        close = nearest(metric, figures)
        raise UserError(
            f"metric_for_best_model = {metric!r}: evaluation gives {', '.join(figures)}"
            + (f". Did you mean {close}?" if close else "")
        )
    for option in ("early_stopping_patience", "load_best_model_at_end", "save_best"):
        if getattr(recipe, option) and not is_evaluated:
            raise UserError(
                f"{option} = {getattr(recipe, option)}: nothing is held out, so there is nothing to judge by. "
                "Name a validation_file, or set validation_split_percentage"
            )
    return BestMetricTracker(metric, recipe.early_stopping_patience, recipe.early_stopping_threshold)
