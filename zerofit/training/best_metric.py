"""Keeps the best evaluation so far, and tells when it is time to stop."""

from dataclasses import dataclass, field

from zerofit.checkpoint.run_state import BestEvaluation
from zerofit.recipe.errors import UserError, nearest
from zerofit.recipe.options import EvaluationOptions

LOWER_IS_BETTER = ("loss", "perplexity", "mse", "mae", "wer", "cer", "ter")  # the first word of figures' names


@dataclass(frozen=True)
class BestMetricTracker:
    """Keeps the best evaluation."""

    metric: str  # the figure's name without `eval_`
    patience: int | None = None  # evaluations in a row without a better one, after which training stops; None: never
    keeps: bool = False
    loads: bool = False  # model/ is to hold them, not the last
    best: BestEvaluation = field(default_factory=BestEvaluation)

    def record_evaluation(self, update: int, figures: dict[str, float]) -> bool:
        """Take an evaluation's figures into account. Returns whether it is the best so far; a NaN never is."""
        value, best = figures[f"eval_{self.metric}"], self.best
        best.metric = self.metric
        sign = -1 if self.metric.partition("_")[0] in LOWER_IS_BETTER else 1
        better = value == value if best.update is None else sign * (value - best.value) > 0
        if better:
            best.update, best.value, best.figures, best.worse_in_a_row = update, value, figures, 0
        else:
            best.worse_in_a_row += 1
        return better

    @property
    def is_exhausted(self) -> bool:
        """True if patience has run out."""
        return self.patience is not None and self.best.worse_in_a_row >= self.patience


def make_best_tracker(
    recipe: EvaluationOptions, figures: tuple[str, ...], is_evaluated: bool, best: BestEvaluation
) -> BestMetricTracker:
    """The tracker that the recipe asks for. Raises UserError: there is no such figure, or nothing to measure.

    Args:
        figures: what an evaluation gives; the first is the task's own choice.
    """
    metric = (recipe.metric_for_best_model or figures[0]).removeprefix("eval_")
    if metric == "f1" and "f1" not in figures and "f1_macro" in figures:
        metric = "f1_macro"  # of more than two classes: the mean of all
    if metric not in figures:
        close = nearest(metric, figures)
        raise UserError(
            f"metric_for_best_model = {metric!r}: evaluation gives {', '.join(figures)}"
            + (f". Did you mean {close}?" if close else "")
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
