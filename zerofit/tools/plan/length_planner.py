"""The longest rows that each strategy holds: the plan of one length, made for several."""

from functools import partial

from zerofit.estimate.planned_strategy import PlannedStrategy
from zerofit.estimate.timing import Timing
from zerofit.tools.lengths_option import micro_batch_of
from zerofit.tools.plan.planner import Planner
from zerofit.tools.plan.prediction import LayoutOutcome, Prediction
from zerofit.tools.plan.size_search import search


class LengthPlanner:
    """Searches among lengths of rows, at one micro-batch. Each length is traced: nothing is fitted.

    Args:
        planner: of the recipe, whatever the length of its own rows.
        lengths: tokens of a row, ascending.
    """

    def __init__(self, planner: Planner, lengths: list[int]):
        self.planner, self.lengths, self.micro_batch = planner, lengths, micro_batch_of(planner.recipe)
        self._planners: dict[int, Planner] = {}

    def find(self, outcome: LayoutOutcome) -> None:
        """Add the predictions that the search needed, or why there are none."""
        resolved, sizes = outcome.resolved, [self.micro_batch]
        if not self.planner.possible(sizes, resolved.layout.data_size):
            outcome.refused = self.planner.no_batch(sizes, resolved.layout)
            return
        outcome.predictions = search(self.lengths, partial(self.predict, resolved), self.planner.budget.device)

    def predict(self, resolved: PlannedStrategy, length: int) -> Prediction:
        """One length under one strategy."""
        if length not in self._planners:
            model, timing = self.planner.model.with_length(length), self.planner.timing
            budget = self.planner.budget
            timing = timing and Timing(model, budget.gpus_per_node, timing.speeds, timing.links, None, timing.is_known)
            self._planners[length] = Planner(self.planner.recipe, model, budget, timing)
        return self._planners[length].predict(resolved, self.micro_batch)
