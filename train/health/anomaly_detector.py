"""The fault sentinel: what must not reach the weights is found out before the optimizer moves.

A fault is a loss or a gradient norm that is no finite number, or a spike: a value far above those of the updates
before it. Spikes are judged on a logarithmic scale, since both figures are positive and their noise is relative to
their size: with x the logarithm, m the median of the last WINDOW good updates and s their scaled median absolute
deviation (1.4826 MAD, the standard deviation if the noise were normal; never below FLOOR), it is a spike where
(x - m) / s exceeds the threshold *and* the value is more than twice the largest of the window. The second condition
leaves alone what is rare and yet ordinary: the one hard example of a run that has learned the others by heart.

Where gradients are clipped, a large norm alone moves the weights no further than any other does, and is what clipping
is for: there only the loss can spike.

Source of the score: Iglewicz and Hoaglin 1993, How to Detect and Handle Outliers.
"""

import math
import statistics
from dataclasses import dataclass, field

WINDOW = 256
ENOUGH = 64  # good updates before anything can be called a spike
FLOOR = {"loss": 0.05, "grad_norm": 0.25}  # of s, in nats: noise of 5 % and 25 % is nothing
IN_A_ROW = 10  # faults one after another, after which leaving them out is no remedy
OVERFLOWS = 50


@dataclass
class AnomalyDetector:
    """Judges the figures of one update after another; the same on every rank, since the figures are.

    Args:
        threshold: of the robust z-score of spikes; 0: only NaN and infinity are faults.
        clipped: gradients are clipped.
        scaled: the loss is scaled (fp16), and an infinite gradient is the scaler's business.
        history: logarithms of the good updates' figures, oldest first.
    """

    threshold: float
    clipped: bool
    scaled: bool
    history: dict[str, list[float]] = field(default_factory=dict)
    overflows: int = 0

    def fault(self, figures: dict[str, float]) -> str | None:
        """What is wrong with an update's loss and grad_norm; None if nothing is, and then they join the history."""
        for name, value in figures.items():
            overflow = self.scaled and name == "grad_norm" and math.isfinite(figures["loss"])
            if not math.isfinite(value):
                self.overflows += overflow
                if self.overflows >= OVERFLOWS:
                    return f"{name} is {value:g} in {OVERFLOWS} updates one after another, whatever the loss scale"
                return None if overflow else f"{name} is {value:g}"
        self.overflows = 0
        judged = {name: value for name, value in figures.items() if name == "loss" or not self.clipped}
        spikes = filter(None, (self._spike(name, value) for name, value in judged.items()))
        if self.threshold and (spike := next(spikes, None)):
            return spike
        for name, value in figures.items():
            if value > 0:
                past = self.history.setdefault(name, [])
                past.append(math.log(value))
                del past[:-WINDOW]
        return None

    def _spike(self, name: str, value: float) -> str | None:
        past = self.history.get(name, ())
        if len(past) < ENOUGH or value <= 0:
            return None
        middle = statistics.median(past)
        scale = max(1.4826 * statistics.median(abs(each - middle) for each in past), FLOOR[name])
        score = (math.log(value) - middle) / scale
        if score <= self.threshold or math.log(value) <= max(past) + math.log(2):
            return None
        return (
            f"{name} is {value:.4g}, and its median over the last {len(past)} updates is {math.exp(middle):.4g} "
            f"(robust z-score {score:.0f})"
        )
