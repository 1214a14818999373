"""The parts of a run that the loop works with, and why it ended."""

from collections.abc import Callable
from dataclasses import dataclass

from train.checkpoint.manager import CheckpointManager
from train.checkpoint.run_state import RunState
from train.health.anomaly import Anomaly
from train.health.shutdown import StopReason
from train.record.meters import MemoryMeter, ThroughputMeter
from train.record.recorder import RunRecorder
from train.strategy.engine import Engine
from train.training.best_metric import BestMetricTracker
from train.training.length import RunLength
from train.training.step import TrainStep
from train.training.task import Task


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


@dataclass(frozen=True)
class Stop:
    """Why training ended. `reason` is NONE after the last update, and where patience has run out."""

    reason: StopReason = StopReason.NONE
    anomaly: Anomaly | None = None
