"""The counts of an update travel with the decision about the one before: they are right after a resume and a skip."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import Samples
from loops import bare_run, train

from zerofit.checkpoint.run_state import RunState
from zerofit.data.collate import Batch
from zerofit.recipe import ClmRecipe
from zerofit.strategy.batches import BatchSizes
from zerofit.strategy.engine import Engine as SharedEngine
from zerofit.strategy.layout import ParallelLayout
from zerofit.training.run import Stop
from zerofit.training.stream import run_length

SAMPLES, UPDATES = 20, 5  # two of each micro-batch, two micro-batches an update


class Engine:
    """Two ranks that see the same, without processes; it notes how often counts travel by themselves."""

    layout, is_main, device = ParallelLayout(2, 0), True, torch.device("cpu")
    forward_backward, step = SharedEngine.forward_backward, SharedEngine.step

    def __init__(self, spoilt: tuple[int, ...] = ()):
        torch.manual_seed(0)
        self.model, self.spoilt = torch.nn.Linear(1, 1), spoilt
        self.counted, self.moved, self.learning_rate = 0, [], 0.1
        self.phase = lambda phase: None

    def accumulate(self, last):
        return contextlib.nullcontext()

    def backward(self, loss):
        loss.backward()

    def set_learning_rate(self, rate):
        pass

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
        self.counted += 1
        return [2.0 * value for value in values]

    def per_rank(self, values):
        return [[float(value) for value in values]] * 2


def collate(pairs) -> Batch:
    tokens = sum(len(sample) for sample, _ in pairs)
    inputs = {"input_ids": torch.tensor([[float(index)] for _, index in pairs])}
    return Batch(inputs, tokens - len(pairs), tokens, 3 * len(pairs), [index for _, index in pairs])


def trained(engine: Engine, state: RunState | None = None, **options) -> list[dict]:
    """The lines of the record."""
    samples = Samples(np.full(1 + index % 3, index) for index in range(SAMPLES))  # of 1 to 3 tokens
    recipe = ClmRecipe(num_train_epochs=UPDATES * 8 / SAMPLES, logging_steps=100, dataloader_num_workers=0, **options)
    data = SimpleNamespace(train=samples, order=None, num_held_out=0)
    run = bare_run(recipe, engine, run_length(recipe, SAMPLES, BatchSizes(2, 2, 2)), state=state or RunState())
    type(engine).update = property(lambda self: run.state.updates + 1)
    train(run, data, collate, lambda model, batch: model(batch.inputs["input_ids"]).sum())
    assert run.stop == Stop()
    return [call.args[0].to_line() for call in run.recorder.write.call_args_list]


def alone(lines: list[dict]) -> list[tuple]:
    return [tuple(line.get(name) for name in ("update", "targets", "tokens", "padding")) for line in lines]


@pytest.mark.parametrize("done", [1, 3])
def test_the_counts_are_right_where_a_run_goes_on(done):
    whole = trained(Engine())
    assert len({line["tokens"] for line in whole}) > 1, "updates differ in their counts"
    engine = Engine()
    assert alone(trained(engine, RunState(updates=done))) == alone(whole[done:])
    assert engine.counted == 1


def test_the_counts_are_right_after_updates_that_are_left_out_or_skipped():
    whole, engine = trained(Engine()), Engine()
    lines = trained(engine, RunState(skipped_updates=[2, 3]))
    assert alone(lines)[3:] == alone(whole)[3:]
    assert engine.moved == [1, 4, 5]
    assert engine.counted == 2, "nobody told of the fourth"
    engine = Engine(spoilt=(2,))
    assert alone(trained(engine, on_anomaly="skip")) == alone(whole)
    assert engine.moved == [1, 3, 4, 5]
    assert engine.counted == 1
