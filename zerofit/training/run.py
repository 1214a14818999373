"""The parts of a run that the loop works with, and why it ended."""

from collections.abc import Callable
from dataclasses import dataclass

from zerofit.checkpoint.manager import CheckpointManager
from zerofit.checkpoint.run_state import RunState
from zerofit.health.anomaly import Anomaly
from zerofit.health.shutdown import StopReason
from zerofit.health.slow_ranks import SlowRanks
from zerofit.record.meters import MemoryMeter, ThroughputMeter
from zerofit.record.recorder import RunRecorder
from zerofit.strategy.engine import Engine
from zerofit.training.best_metric import BestMetricTracker
from zerofit.training.step import TrainStep
from zerofit.training.stream import RunLength
from zerofit.training.task import Task


@dataclass(frozen=True)
class Run:
    """The parts of a run that the loop works with; what changes is in `state`."""

    task: Task
    engine: Engine
    length: RunLength
    state: RunState
    step: TrainStep
    checkpoints: CheckpointManager
    recorder: RunRecorder
    best: BestMetricTracker
    throughput: ThroughputMeter
    memory: MemoryMeter
    phase: Callable[[str, int], None]
    slow_ranks: SlowRanks


@dataclass(frozen=True)
class Stop:
    """Why training ended. `reason` is NONE after the last update, and where patience has run out."""

    reason: StopReason = StopReason.NONE
    anomaly: Anomaly | None = None
