"""Anomaly detection: an update with an anomaly is refused before the optimizer changes the weights.

An anomaly is a loss or a gradient norm that is not a finite number, or a spike: a value far above those of the updates
before it. Spikes are measured on a logarithmic scale, since both figures are positive and their noise is relative to
their size. Let x be the logarithm, m the median of the last WINDOW accepted updates and s their scaled median absolute
deviation (1.4826 MAD, the standard deviation if the noise were normal; never below MIN_DEVIATION). A value is a spike
if (x - m) / s exceeds the threshold *and* the value is more than twice the largest of the window. The second condition
accepts values that are rare and yet ordinary: the one hard example of a run that has memorized all others.

If gradients are clipped, only the loss can spike: after clipping, a large norm changes the weights no more than any
other norm does.

Source of the score: Iglewicz and Hoaglin 1993, How to Detect and Handle Outliers.
"""

import math
import statistics
from dataclasses import dataclass, field

from zerofit.data.collate import Batch
from zerofit.strategy.engine import Bounds

WINDOW = 256
MIN_HISTORY = 64  # accepted updates before anything can be called a spike
MIN_DEVIATION = {"loss": 0.05, "grad_norm": 0.25}  # the smallest s, in nats: noise of 5 % and 25 % is usual
MAX_IN_A_ROW = 10  # consecutive anomalies, after which the run stops, since skipping does not help
MAX_OVERFLOWS = 50  # consecutive infinite gradients under fp16, after which the last one is an anomaly
ANOMALY_ACTIONS = {  # {value of on_anomaly: what it does, in the log}
    "stop": "The weights are as they were before it",
    "skip": "It is skipped",
    "rewind": "Back to the last checkpoint; this update is skipped",
}


@dataclass
class AnomalyDetector:
    """The detector that accepts or refuses each update; all ranks have the same figures and so decide the same."""

    threshold: float  # a spike's robust z-score is above it; 0: only NaN and infinity are anomalies
    clipped: bool  # gradients are clipped
    scaled: bool  # the loss is scaled (fp16), and the loss scaler handles an infinite gradient
    history: dict[str, list[float]] = field(default_factory=dict)  # logarithms of accepted figures, oldest first
    overflows: int = 0

    def begin(self, history: dict[str, list[float]]) -> None:
        """Use this history from now on, and add accepted figures to it."""
        self.history = history
        self.overflows = 0

    def bounds(self, targets: float) -> Bounds:
        """Return the limits of the next update's loss sum and gradient norm, known before its backward pass, so that a
        device can decide. `targets`: the number of targets in the update."""
        return Bounds(
            loss_sum=self._bound("loss") * targets,
            grad_norm=math.inf if self.clipped else self._bound("grad_norm"),
            may_overflow=self.scaled and self.overflows + 1 < MAX_OVERFLOWS,
        )

    def record(self, figures: dict[str, float], refused: bool) -> str | None:
        """Take the loss and grad_norm of an update into account. Returns why it was refused; None: it was accepted,
        and its figures are added to the history."""
        not_finite = next((name for name, value in figures.items() if not math.isfinite(value)), None)
        if not_finite is None:
            self.overflows = 0
        elif self.scaled and not_finite == "grad_norm":
            self.overflows += 1
            reason = f"grad_norm is {figures[not_finite]:g} in {MAX_OVERFLOWS} consecutive updates"
            return f"{reason}, whatever the loss scale" if refused else None
        if refused and not_finite:
            return f"{not_finite} is {figures[not_finite]:g}"
        if refused:
            name = "loss" if figures["loss"] > self._bound("loss") or self.clipped else "grad_norm"
            value = figures[name]
            median, deviation = self._noise(name)
            return (
                f"{name} is {value:.4g}, and its median over the last {len(self.history[name])} updates is "
                f"{math.exp(median):.4g} (robust z-score {(math.log(value) - median) / deviation:.0f})"
            )
        for name, value in figures.items():
            if value > 0:
                accepted = self.history.setdefault(name, [])
                accepted.append(math.log(value))
                del accepted[:-WINDOW]
        return None

    def _bound(self, name: str) -> float:
        """Return the largest value that is not a spike."""
        accepted = self.history.get(name, ())
        if len(accepted) < MIN_HISTORY or not self.threshold:
            return math.inf
        median, deviation = self._noise(name)
        bound = max(median + self.threshold * deviation, max(accepted) + math.log(2))
        return math.exp(min(bound, 700.0))  # a finite number

    def _noise(self, name: str) -> tuple[float, float]:
        """Return (the median of the logarithms, their scaled median absolute deviation)."""
        accepted = self.history[name]
        median = statistics.median(accepted)
        deviation = statistics.median(abs(logarithm - median) for logarithm in accepted)
        return median, max(1.4826 * deviation, MIN_DEVIATION[name])


@dataclass(frozen=True)
class Anomaly:
    """An update that was refused, as one rank records it."""

    update: int
    reason: str
    figures: dict[str, float]  # of the whole update
    batches: list[Batch]  # the micro-batches of this rank
    losses: list[float]  # the loss sum of each micro-batch
