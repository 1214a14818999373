"""What ranks tell each other, and when: the host waits for the device once an update."""

import contextlib
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from helpers import Samples

from zerofit.checkpoint.run_state import RunState
from zerofit.data.collate import Batch
from zerofit.health.anomaly import AnomalyDetector
from zerofit.health.shutdown import StopReason
from zerofit.health.slow_ranks import RankClock, SlowRanks
from zerofit.recipe import ClmRecipe
from zerofit.record.meters import Rates
from zerofit.strategy.batches import BatchSizes
from zerofit.strategy.engine import Engine as SharedEngine
from zerofit.strategy.layout import ParallelLayout
from zerofit.training.best_metric import BestMetricTracker
from zerofit.training.loop import reason_to_stop, train
from zerofit.training.run import Run, Stop
from zerofit.training.step import Signals, TrainStep
from zerofit.training.stream import run_length
from zerofit.training.task import Task

SAMPLES, UPDATES = 20, 5  # two of each micro-batch, two micro-batches an update


class Engine:
    """Two ranks that see the same, without processes; it notes what makes the host wait for the device."""

    layout, is_main, device = ParallelLayout(2, 0), True, torch.device("cpu")
    run = SharedEngine.run

    def __init__(self, spoilt: tuple[int, ...] = ()):
        torch.manual_seed(0)
        self.model, self.spoilt = torch.nn.Linear(1, 1), spoilt
        self.waits, self.moved, self.learning_rate, self.schedule = [], [], 0.1, lambda update: 0.1

    def accumulate(self, last):
        self.waits.append("last" if last else "first")
        return contextlib.nullcontext()

    def backward(self, loss):
        loss.backward()

    def set_learning_rate(self, index):
        self.update = index + 1

    def gradient_norm(self):
        return float("nan") if self.update in self.spoilt else 1.0

    def apply(self):
        self.moved.append(self.update)
        self.model.zero_grad()

    def average(self):
        pass

    def discard(self):
        self.model.zero_grad()

    def sum_over_replicas(self, values):
        self.waits.append("counts")
        return [2.0 * value for value in values]

    def per_rank(self, values):
        self.waits.append("exchange")
        return [list(values)] * 2


def collate(pairs) -> Batch:
    tokens = sum(len(sample) for sample, _ in pairs)
    inputs = {"input_ids": torch.tensor([[float(index)] for _, index in pairs])}
    return Batch(inputs, tokens - len(pairs), tokens, 3 * len(pairs), [index for _, index in pairs])


def task_of(**options) -> Task:
    samples = Samples(np.full(1 + index % 3, index) for index in range(SAMPLES))  # of 1 to 3 tokens
    recipe = ClmRecipe(num_train_epochs=UPDATES * 8 / SAMPLES, logging_steps=100, dataloader_num_workers=0, **options)
    return Task(recipe, samples, collate, lambda model, batch: model(batch.inputs["input_ids"]).sum(), None)


def run(task: Task, engine: Engine, state: RunState | None = None) -> list[dict]:
    state, recorder = state or RunState(), MagicMock()
    checkpoints = SimpleNamespace(messages=list, save=lambda *_: None, last_failed=False, rewind=lambda anomaly: False)
    throughput = SimpleNamespace(of_update=lambda *_: Rates(1.0, 1.0, 1.0, None), evaluations=[])
    memory = SimpleNamespace(peak_bytes=lambda: 1, reset=lambda: None)
    step = TrainStep(task, engine, AnomalyDetector(0.0, False, False), memory, Signals, lambda name, update: None,
                     RankClock(engine.device, alone=True))  # fmt: skip
    best, length = BestMetricTracker("loss"), run_length(task.recipe, SAMPLES, BatchSizes(2, 2, 2))
    parts = Run(task, engine, length, state, step, checkpoints, recorder, best, throughput, memory, step.phase,
                SlowRanks(engine.layout, 10, str, "forward"))  # fmt: skip
    assert train(parts) == Stop()
    return [call.args[0].to_line() for call in recorder.write.call_args_list]


def alone(lines: list[dict]) -> list[tuple]:
    return [tuple(line.get(name) for name in ("update", "targets", "tokens", "padding")) for line in lines]


def test_counts_travel_with_the_decision_about_the_update_before():
    engine = Engine()
    lines = run(task_of(), engine)
    assert engine.waits == ["counts", *["first", "last", "exchange"] * UPDATES]
    assert engine.moved == [*range(1, UPDATES + 1)]
    assert len({line["tokens"] for line in lines}) > 1, "updates differ in their counts"
    assert sum(line["tokens"] for line in lines) > 0


@pytest.mark.parametrize("done", [1, 3])
def test_the_counts_are_right_where_a_run_goes_on(done):
    whole = run(task_of(), Engine())
    engine = Engine()
    assert alone(run(task_of(), engine, RunState(updates=done))) == alone(whole[done:])
    assert engine.waits.count("counts") == 1


def test_the_counts_are_right_after_updates_that_are_left_out_or_skipped():
    whole, engine = run(task_of(), Engine()), Engine()
    lines = run(task_of(), engine, RunState(skipped_updates=[2, 3]))
    assert alone(lines)[3:] == alone(whole)[3:]
    assert engine.moved == [1, 4, 5]
    assert engine.waits.count("counts") == 2, "nobody told of the fourth"
    engine = Engine(spoilt=(2,))
    assert alone(run(task_of(on_anomaly="skip"), engine)) == alone(whole)
    assert engine.moved == [1, 3, 4, 5]
    assert engine.waits.count("counts") == 1


def test_a_save_that_failed_stops_where_it_was_asked_for():
    """Also one that failed while training paused for it."""
    quiet = SimpleNamespace(checkpoint_failed=False, stop_reason=StopReason.NONE)

    def reason(action: str, failed: bool, is_last: bool = False) -> StopReason:
        run = SimpleNamespace(
            checkpoints=SimpleNamespace(last_failed=failed),
            best=SimpleNamespace(is_exhausted=False),
            length=SimpleNamespace(is_last=lambda update: is_last),
            task=SimpleNamespace(recipe=SimpleNamespace(on_save_failure=action)),
        )
        return reason_to_stop(run, SimpleNamespace(signals=quiet, update=3))

    assert reason("stop", failed=True) is StopReason.CHECKPOINT_FAILED
    assert reason("stop", failed=False) is reason("continue", failed=True) is StopReason.NONE
    assert reason("stop", failed=True, is_last=True) is StopReason.NONE
