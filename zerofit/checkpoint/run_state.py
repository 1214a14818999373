"""The state of a run beside its weights and its optimizer: one object, saved and restored whole."""

import math
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class BestEvaluation:
    """The best evaluation so far."""

    update: int | None = None  # None: there was none
    metric: str = ""  # the figure's name without `eval_`; empty: nothing was evaluated
    value: float = math.nan
    worse_in_a_row: int = 0  # evaluations since
    figures: dict[str, float] = field(default_factory=dict)


@dataclass
class RunState:
    """The progress of a run. `consumed samples` is no field: it follows from `updates`."""

    updates: int = 0
    tokens: float = 0.0  # seen so far
    positions: float = 0.0  # tokens and padding
    held_out_before: dict[str, float] = field(default_factory=dict)  # figures before the first update
    held_out: dict[str, float] = field(default_factory=dict)  # of the latest evaluation
    skipped_updates: list[int] = field(default_factory=list)  # not trained on, after on_anomaly = rewind
    anomalies_in_a_row: int = 0
    tracker_ids: dict[str, str] = field(default_factory=dict)  # the run's id at each tracker
    anomaly_history: dict[str, list[float]] = field(default_factory=dict)  # of the anomaly detector
    best: BestEvaluation = field(default_factory=BestEvaluation)

    def restore(self, saved: dict[str, Any]) -> None:
        """Take the values of state/progress.json, in place: whoever holds this object sees them. A field that the
        version which wrote the file did not have begins as in a new run."""
        new, saved_best = RunState(), saved.get("best", {})
        for each in fields(self):
            if each.name != "best":
                setattr(self, each.name, saved.get(each.name, getattr(new, each.name)))
        for each in fields(self.best):
            setattr(self.best, each.name, saved_best.get(each.name, getattr(new.best, each.name)))
