"""Anomaly detection: what must not reach the weights is found before the optimizer moves them.

An anomaly is a loss or a gradient norm that is not a finite number, or a spike: a value far above those of the updates
before it. Spikes are measured on a logarithmic scale, since both figures are positive and their noise is relative to
their size: with x the logarithm, m the median of the last WINDOW accepted updates and s their scaled median absolute
deviation (1.4826 MAD, the standard deviation if the noise were normal; never below MIN_DEVIATION), it is a spike where
(x - m) / s exceeds the threshold *and* the value is more than twice the largest of the window. The second condition
leaves alone what is rare and yet ordinary: the one hard example of a run that has learned the others by heart.

Where gradients are clipped, a large norm alone moves the weights no further than any other does, and is what clipping
is for: there only the loss can spike.

Source of the score: Iglewicz and Hoaglin 1993, How to Detect and Handle Outliers.
"""

import math
import statistics
from dataclasses import dataclass, field

from zerofit.data.collate import Batch
from zerofit.strategy.engine import Bounds

WINDOW = 256
MIN_HISTORY = 64  # accepted updates before anything can be called a spike
MIN_DEVIATION = {"loss": 0.05, "grad_norm": 0.25}  # of s, in nats: noise of 5 % and 25 % is nothing
MAX_IN_A_ROW = 10  # anomalies one after another, after which skipping them is not a remedy
MAX_OVERFLOWS = 50
ANOMALY_ACTIONS = {  # what on_anomaly does, as the log has it
    "stop": "The weights are as they were before it",
    "skip": "It is skipped",
    "rewind": "Back to the last checkpoint; this update is skipped",
}


@dataclass
class AnomalyDetector:
    """Accepts or refuses one update after another; the same on every rank, since the figures are."""

    threshold: float  # of the robust z-score of spikes; 0: only NaN and infinity are anomalies
    clipped: bool
    scaled: bool  # the loss is scaled (fp16), and an infinite gradient is the scaler's business
    history: dict[str, list[float]] = field(default_factory=dict)  # logarithms of accepted figures, oldest first
    overflows: int = 0

    def begin(self, history: dict[str, list[float]]) -> None:
        """Judge by this history from here on, and add to it."""
        self.history = history
        self.overflows = 0

    def bounds(self, targets: float) -> Bounds:
        """Return the limits of the next update's loss and norm: known before its backward pass, so that a device can
        decide."""
        return Bounds(
            loss_sum=self._bound("loss") * targets,
            grad_norm=math.inf if self.clipped else self._bound("grad_norm"),
            may_overflow=self.scaled and self.overflows + 1 < MAX_OVERFLOWS,
        )

    def record(self, figures: dict[str, float], refused: bool) -> str | None:
        """Take the loss and grad_norm of an update into account. Returns why it was refused; None if it was not, and
        then they join the history."""
        wrong = next((name for name, value in figures.items() if not math.isfinite(value)), None)
        if wrong is None:
            self.overflows = 0
        elif self.scaled and wrong == "grad_norm":
            self.overflows += 1
            again = f"grad_norm is {figures[wrong]:g} in {MAX_OVERFLOWS} updates one after another"
            return f"{again}, whatever the loss scale" if refused else None
        if refused and wrong:
            return f"{wrong} is {figures[wrong]:g}"
        if refused:
            name = "loss" if figures["loss"] > self._bound("loss") or self.clipped else "grad_norm"
            value = figures[name]
            middle, scale = self._noise(name)
            return (
                f"{name} is {value:.4g}, and its median over the last {len(self.history[name])} updates is "
                f"{math.exp(middle):.4g} (robust z-score {(math.log(value) - middle) / scale:.0f})"
            )
        for name, value in figures.items():
            if value > 0:
                past = self.history.setdefault(name, [])
                past.append(math.log(value))
                del past[:-WINDOW]
        return None

    def _bound(self, name: str) -> float:
        """Return the largest value that is not a spike."""
        past = self.history.get(name, ())
        if len(past) < MIN_HISTORY or not self.threshold:
            return math.inf
        middle, scale = self._noise(name)
        return math.exp(min(max(middle + self.threshold * scale, max(past) + math.log(2)), 700.0))  # a finite number

    def _noise(self, name: str) -> tuple[float, float]:
        """Return (the median of the logarithms, their scaled median absolute deviation)."""
        past = self.history[name]
        middle = statistics.median(past)
        return middle, max(1.4826 * statistics.median(abs(each - middle) for each in past), MIN_DEVIATION[name])


@dataclass(frozen=True)
class Anomaly:
    """An update that was refused, as one rank sees it."""

    update: int
    reason: str
    figures: dict[str, float]  # of the whole update
    batches: list[Batch]  # this rank's micro-batches
    losses: list[float]  # and the loss sum of each
