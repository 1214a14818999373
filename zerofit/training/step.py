"""One update: forward and backward over its micro-batches, the decision about it, and one step of the optimizer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from zerofit.health.anomaly import Anomaly, AnomalyDetector
from zerofit.health.shutdown import StopReason
from zerofit.health.slow_ranks import RankClock, RankSeconds
from zerofit.model.experts import RoutingFigures
from zerofit.model.preference import PreferenceFigures
from zerofit.record.meters import MemoryMeter, ThroughputMeter
from zerofit.record.metrics import EvaluationTime, UpdateMetrics
from zerofit.strategy.engine import Engine
from zerofit.training.stream import RunLength, Totals, UpdateBatches
from zerofit.training.task import Task

NO_COUNTS = Totals(0, 0, 0)


@dataclass(frozen=True)
class Signals:
    """What a rank has to tell the others with each update, apart from its figures."""

    stop_reason: StopReason = StopReason.NONE
    checkpoint_is_due: bool = False  # by the clock
    checkpoint_failed: bool = False

    @classmethod
    def merge(cls, ranks: list[tuple[float, float, float]]) -> "Signals":
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
    seconds: RankSeconds  # of the update before
    counts: Sequence[float] = ()  # trained tokens, tokens and positions of this rank's next update, if there is one

    @property
    def row(self) -> list[float]:
        return [float(value) for value in (*self[:6], *self.seconds, *self.counts)]

    @classmethod
    def of(cls, row: Sequence[float]) -> "RankReport":
        counts = 6 + len(RankSeconds._fields)
        return cls(row[0], row[1], row[2], row[3], row[4], row[5], RankSeconds(*row[6:counts]), row[counts:])


@dataclass(frozen=True)
class StepResult:
    """What came of one update; the same on every rank, but for `anomaly`, which has this rank's micro-batches.

    Args:
        loss: None where the update was skipped.
        routing: of a mixture of experts.
        preference: of pairs of answers.
        totals: of its global batch.
        next_totals: of the next update's global batch; None where the ranks have not told each other.
        seconds_before: of each rank, in the update before this one.
    """

    update: int
    loss: float | None = None
    grad_norm: float | None = None
    routing: RoutingFigures | None = None
    preference: PreferenceFigures | None = None
    learning_rate: float | None = None
    totals: Totals = NO_COUNTS
    next_totals: Totals | None = None
    peak_memory_bytes: int | None = None
    anomaly: Anomaly | None = None
    signals: Signals = Signals()
    seconds_before: tuple[RankSeconds, ...] = ()

    def metrics(
        self,
        length: RunLength,
        throughput: ThroughputMeter,
        seconds: float,
        held_out: dict[str, float],
        evaluation: EvaluationTime | None,
        rank_seconds: dict[str, float] | None,
    ) -> UpdateMetrics:
        """The line of metrics.jsonl; `held_out` and `evaluation` where one followed this update."""
        update, totals, skipped = self.update, self.totals, self.loss is None
        consumed, before = length.consumed(update), length.consumed(update - 1)
        rates = None if skipped else throughput.of_update(int(totals.tokens), consumed - before, seconds)
        return UpdateMetrics(
            update=update,
            epoch=length.epoch(update),
            consumed_samples=consumed,
            loss=self.loss,
            grad_norm=self.grad_norm,
            learning_rate=self.learning_rate,
            targets=None if skipped else _whole(totals.targets),
            tokens=None if skipped else int(totals.tokens),
            padding=None if skipped else 1.0 - totals.tokens / totals.positions,
            peak_memory_bytes=self.peak_memory_bytes,
            anomaly=self.anomaly.reason if self.anomaly else None,
            skipped=skipped or None,
            seconds=None if skipped else seconds,
            rank_seconds=rank_seconds,
            held_out=held_out,
            **(self.routing._asdict() if self.routing else {}),
            **(self.preference._asdict() if self.preference else {}),
            **(rates._asdict() if rates else {}),
            evaluation_seconds=evaluation.seconds if evaluation else None,
            evaluation_samples_per_s=evaluation.samples_per_s if evaluation else None,
        )


@dataclass(frozen=True)
class TrainStep:
    """Makes updates.

    Args:
        detector: accepts or refuses each update before it is applied.
        signals: what this rank has to tell at this moment.
        phase: is told what is being done, and in which update.
    """

    task: Task
    engine: Engine
    detector: AnomalyDetector
    memory: MemoryMeter
    signals: Callable[[], Signals]
    phase: Callable[[str, int], None]
    clock: RankClock

    def __call__(
        self,
        update: int,
        batches: UpdateBatches,
        totals: Totals | None,
        prefetch: Callable[[], UpdateBatches | None],
    ) -> StepResult:
        """Train on one global batch, if nothing is wrong with it.

        The loss of the update is the sum over all trained tokens of the global batch divided by their number. No rank
        knows that number alone; the engine averages gradients over replicas, hence the factor of their number.
        The ranks exchange all they have to tell each other once, between the gradients and the optimizer's step: the
        counts of the next update, too, so that it can begin while the device is still at work on this one.

        Args:
            totals: of this global batch, where the update before has brought them.
            prefetch: gives the micro-batches of the next update.
        """
        task, engine = self.task, self.engine
        torch.manual_seed(_seed_of(task.recipe.seed, update, engine.layout.dropout_seed_key))  # dropout, and only that
        if totals is None:  # the first update, or the one before was skipped
            totals = Totals(*engine.sum_over_replicas(batches.counts))
        scale = engine.layout.data_size / (totals.targets or 1.0)
        if task.routing:
            task.routing.begin(totals.targets / max(totals.tokens, 1.0))
        if task.preference:
            task.preference.begin()
        losses = engine.run(batches.micro_batches, task.loss_sum, scale, lambda phase: self._enter(phase, update))
        self._enter("data", update)
        following = prefetch()
        self._enter("update", update)
        engine.set_learning_rate(update - 1)
        grad_norm = engine.gradient_norm()
        ranks = self._exchange(float(sum(losses)), grad_norm, following)
        self.clock.read(int(batches.counts[2]))
        replicas = [ranks[rank] for rank in engine.layout.loss_ranks]
        loss = sum(report.loss_sum for report in replicas) / (totals.targets or 1.0)
        decisive = {"loss": loss, "grad_norm": ranks[0].grad_norm}  # rank 0's, so that all decide alike
        routing = None
        if task.routing:
            routing = task.routing.figures(engine.sum_over_replicas(task.routing.sums), totals.tokens)
        preference = None
        if task.preference:
            preference = task.preference.figures(engine.sum_over_replicas(task.preference.sums), totals.targets)
        anomaly = None
        if reason := self.detector.anomaly(decisive):
            engine.discard()
            parts = [float(part) for part in losses]
            anomaly = Anomaly(update, reason, decisive, batches.micro_batches, parts)
        else:
            engine.apply()
            if math.isfinite(decisive["grad_norm"]):  # else fp16 has left the weights where they were
                engine.average()
        return StepResult(
            update,
            **decisive,
            routing=routing,
            preference=preference,
            learning_rate=engine.learning_rate,
            totals=totals,
            next_totals=Totals.sum(report.counts for report in replicas) if following else None,
            peak_memory_bytes=int(max(report.peak_bytes for report in ranks)),
            anomaly=anomaly,
            signals=Signals.merge([report[3:6] for report in ranks]),
            seconds_before=tuple(report.seconds for report in ranks),
        )

    def _enter(self, phase: str, update: int) -> None:
        self.clock.phase(phase)
        self.phase(phase, update)

    def _exchange(self, loss_sum: float, grad_norm: float, following: UpdateBatches | None) -> list[RankReport]:
        """What each rank has to tell, on all of them."""
        counts = following.counts if following else []
        signals = self.signals()
        own = RankReport(
            loss_sum,
            grad_norm,
            self.memory.peak_bytes(),
            signals.stop_reason,
            signals.checkpoint_is_due,
            signals.checkpoint_failed,
            self.clock.latest,
            counts,
        )
        self.memory.reset()
        return [RankReport.of(row) for row in self.engine.per_rank(own.row)]


def _whole(count: float) -> float:
    """For the record: an int where it is one, else without what the order of a sum changes."""
    return int(count) if count.is_integer() else round(count, 6)


def _seed_of(seed: int, update: int, key: tuple[int, ...]) -> int:
    """The seed of an update's dropout: the same in every run and after every resume, another for every key."""
    return int(np.random.SeedSequence([seed, update, *key]).generate_state(1)[0])
