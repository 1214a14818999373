"""One update: forward and backward over its micro-batches, the decision about it, and one step of the optimizer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from train.health.anomaly import Anomaly, AnomalyDetector
from train.health.shutdown import StopReason
from train.record.meters import MemoryMeter
from train.training.stream import UpdateBatches
from train.training.task import Task

NOTHING = {"loss": math.nan, "grad_norm": math.nan, "targets": 0, "tokens": 0, "padding": 0.0, "tokens_per_s": 0.0}


@dataclass(frozen=True)
class Signals:
    """What a rank has to tell the others with each update, beside its figures."""

    stop_reason: StopReason = StopReason.NONE
    checkpoint_is_due: bool = False  # by the clock
    checkpoint_failed: bool = False

    @classmethod
    def merge(cls, ranks: list[list[float]]) -> "Signals":
        """The signals of all ranks as one, the same on each of them."""
        reasons, due, failed = zip(*ranks)
        return cls(StopReason(int(max(reasons))), bool(max(due)), bool(max(failed)))


class RankReport(NamedTuple):
    """What each rank tells the others with each update."""

    loss_sum: float
    grad_norm: float
    peak_bytes: float
    stop_reason: float
    checkpoint_is_due: float
    checkpoint_failed: float
    counts: Sequence[float] = ()  # trained tokens, tokens and positions of this rank's next update, if there is one

    @property
    def row(self) -> list[float]:
        return [float(value) for value in (*self[:-1], *self.counts)]

    @classmethod
    def of(cls, row: Sequence[float]) -> "RankReport":
        return cls(*row[:6], counts=row[6:])


@dataclass
class StepResult:
    """What came of one update; the same on every rank, but for `anomaly`, which has this rank's micro-batches."""

    update: int
    figures: dict[str, float]  # of metrics.jsonl
    positions: float  # tokens and padding of the global batch
    anomaly: Anomaly | None = None
    signals: Signals = field(default_factory=Signals)


@dataclass
class TrainStep:
    """Makes updates.

    Args:
        detector: accepts or refuses each update before the weights move.
        signals: what this rank has to tell at this moment.
        phase: is told what is being done, and in which update.
    """

    task: Task
    engine: Any
    detector: AnomalyDetector
    memory: MemoryMeter
    signals: Callable[[], Signals]
    phase: Callable[[str, int], None]

    def skip(self, update: int) -> StepResult:
        """The result of an update that is not made: its samples are skipped after an anomaly."""
        figures = {**NOTHING, "learning_rate": self.engine.schedule(update - 1), "fault": "left out"}
        return StepResult(update, figures, positions=0)

    def __call__(
        self, update: int, current: UpdateBatches, prefetch: Callable[[], UpdateBatches | None]
    ) -> StepResult:
        """Train on one global batch, if nothing is wrong with it.

        The loss of the update is the sum over all trained tokens of the global batch divided by their number. No rank
        knows that number alone; the engine averages gradients over replicas, hence the factor of their number.
        Whatever ranks have to tell each other goes round once, between the gradients and the optimizer's step: the
        counts of the next update, too, so that it can begin while the device is still at work on this one.

        Args:
            prefetch: gives the micro-batches of the next update.
        """
        task, engine = self.task, self.engine
        torch.manual_seed(_seed_of(task.recipe.seed, update, engine.layout.seed_place))  # dropout, and only that
        if current.totals is None:  # the first update, or the one before was skipped
            current.totals = engine.sum_over_replicas(current.counts)
        targets, tokens, positions = current.totals
        scale = engine.layout.data_size / max(targets, 1.0)
        if task.routing:
            task.routing.begin(targets / max(tokens, 1.0))
        losses = engine.run(current.batches, task.loss_sum, scale, lambda phase: self.phase(phase, update))
        self.phase("data", update)
        following = prefetch()
        result = StepResult(update, {}, positions)

        def accept_update(grad_norm: float) -> bool:
            total, norm = self._exchange(result, following, float(sum(losses)), grad_norm)
            figures = {"loss": total / max(targets, 1.0), "grad_norm": norm}
            reason = self.detector.anomaly(figures)
            if reason:
                parts = [float(loss) for loss in losses]
                result.anomaly = Anomaly(update, reason, figures, current.batches, parts)
            if task.routing:
                figures |= task.routing.figures(engine.sum_over_replicas(task.routing.sums), tokens)
            result.figures = {**figures, **result.figures}
            return reason is None

        self.phase("update", update)
        engine.update(update - 1, accept_update)
        result.figures |= {
            "learning_rate": engine.learning_rate,
            "targets": int(targets),
            "tokens": int(tokens),
            "padding": 1.0 - tokens / positions,
        }
        return result

    def _exchange(
        self, result: StepResult, following: UpdateBatches | None, loss_sum: float, grad_norm: float
    ) -> tuple[float, float]:
        """Exchange this update's figures with the other ranks.

        Returns: the loss summed over the global batch, and the norm (rank 0's, so that all decide alike).
        """
        own = RankReport(loss_sum, grad_norm, self.memory.peak_bytes(), *astuple(self.signals()))
        own = own._replace(counts=following.counts if following else [])
        self.memory.reset()
        ranks = [RankReport.of(row) for row in self.engine.per_rank(own.row)]
        replicas = [ranks[rank] for rank in self.engine.layout.reporters]
        if following:
            following.totals = [sum(column) for column in zip(*(report.counts for report in replicas))]
        result.signals = Signals.merge([report[3:6] for report in ranks])
        result.figures["peak_memory_bytes"] = int(max(report.peak_bytes for report in ranks))
        return sum(report.loss_sum for report in replicas), ranks[0].grad_norm


def _seed_of(seed: int, update: int, place: tuple[int, ...]) -> int:
    """The seed of an update's dropout: the same in every run and after every resume, another in every place."""
    return int(np.random.SeedSequence([seed, update, *place]).generate_state(1)[0])
