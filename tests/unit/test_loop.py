"""What ranks tell each other, and when: the host waits for the device once an update."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from train.data.collate import Batch
from train.recipe import ClmRecipe
from train.run.best import Best
from train.run.job import Job
from train.run.loop import Hooks, fit, make_plan
from train.run.progress import Progress
from train.run.sentinel import Sentinel
from train.run.session import about_evaluations
from train.strategy.batches import Batches

SAMPLES, UPDATES = 20, 5  # two of each micro-batch, two micro-batches an update


class Samples:
    lengths = sort_key = None

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return np.full(1 + index % 3, index, dtype=np.int64)  # samples of 1 to 3 tokens


class Engine:
    """Two ranks that see the same, without processes; it notes what makes the host wait for the device."""

    world_size, is_main, device = 2, True, torch.device("cpu")
    accelerator = SimpleNamespace(process_index=0)

    def __init__(self, spoilt: tuple[int, ...] = ()):
        torch.manual_seed(0)
        self.model, self.spoilt = torch.nn.Linear(1, 1), spoilt
        self.waits, self.moved, self.learning_rate, self.schedule = [], [], 0.1, lambda update: 0.1

    def accumulate(self, last):
        self.waits.append("last" if last else "first")
        return contextlib.nullcontext()

    def backward(self, loss):
        loss.backward()

    def update(self, number, judge):
        norm = float("nan") if number + 1 in self.spoilt else 1.0
        if judge(norm):
            self.moved.append(number + 1)
        self.model.zero_grad()

    def sum_over_ranks(self, values):
        self.waits.append("counts")
        return [2.0 * value for value in values]

    def per_rank(self, values):
        self.waits.append("judgement")
        return [list(values)] * 2


def collate(pairs) -> Batch:
    tokens = sum(len(sample) for sample, _ in pairs)
    inputs = {"input_ids": torch.tensor([[float(index)] for _, index in pairs])}
    return Batch(inputs, tokens - len(pairs), tokens, 3 * len(pairs), [index for _, index in pairs])


def job_of(**options) -> Job:
    recipe = ClmRecipe(num_train_epochs=UPDATES * 8 / SAMPLES, logging_steps=100, dataloader_num_workers=0, **options)
    return Job(recipe, Samples(), collate, lambda model, batch: model(batch.inputs["input_ids"]).sum(), None)


def run(job: Job, engine: Engine, done: Progress | None = None) -> list[dict]:
    lines, done = [], done or Progress()
    nothing = lambda *_: None  # noqa: E731
    saves = SimpleNamespace(has_failed=False, look=lambda: None, news=[])
    hooks = Hooks(lines.append, None, nothing, nothing, nothing, nothing, saves)
    stop = SimpleNamespace(code=lambda: 0, clock=lambda: False)
    meter = SimpleNamespace(of_update=lambda *_: {"tokens_per_s": 1.0}, evaluations=[])
    plan = make_plan(job.recipe, SAMPLES, Batches(2, 2, 2))
    sentinel = Sentinel(0.0, False, False)
    fit(job, engine, plan, meter, Best("loss"), hooks, done, sentinel, stop)
    return lines


def alone(lines: list[dict]) -> list[tuple]:
    return [(line["update"], line["targets"], line["tokens"], line["padding"]) for line in lines]


def test_counts_travel_with_the_judgement_of_the_update_before():
    engine = Engine()
    lines = run(job_of(), engine)
    assert engine.waits == ["counts", *["first", "last", "judgement"] * UPDATES]
    assert engine.moved == [*range(1, UPDATES + 1)]
    assert len({line["tokens"] for line in lines}) > 1, "updates differ in their counts"
    assert sum(line["tokens"] for line in lines) > 0


@pytest.mark.parametrize("done", [1, 3])
def test_the_counts_are_right_where_a_run_goes_on(done):
    whole = run(job_of(), Engine())
    engine = Engine()
    assert alone(run(job_of(), engine, Progress(updates=done))) == alone(whole[done:])
    assert engine.waits.count("counts") == 1


def test_the_counts_are_right_after_updates_that_are_left_out_or_skipped():
    whole, engine = run(job_of(), Engine()), Engine()
    lines = run(job_of(), engine, Progress(left_out=[2, 3]))
    assert alone(lines)[3:] == alone(whole)[3:]
    assert engine.moved == [1, 4, 5]
    assert engine.waits.count("counts") == 2, "nobody told of the fourth"
    engine = Engine(spoilt=(2,))
    assert alone(run(job_of(on_fault="skip"), engine)) == alone(whole)
    assert engine.moved == [1, 3, 4, 5]
    assert engine.waits.count("counts") == 1


def test_each_evaluation_has_its_own_clock():
    """That of the slowest rank; it is no held-out figure, and no part of the update's seconds."""

    class Slow(Engine):
        def per_rank(self, values):
            own = list(values)
            return [own, [4.0]] if len(own) == 1 else super().per_rank(own)

    job = job_of(eval_steps=2)
    job.evaluate, job.num_held_out = lambda engine: {"eval_loss": 1.0}, 100
    done = Progress()
    lines = run(job, Slow(), done)
    evaluated = [line for line in lines if "eval_loss" in line]
    assert [line["update"] for line in evaluated] == [0, 2, 4, 5]
    assert all(line["evaluation_seconds"] == 4.0 for line in evaluated)
    assert all(line["evaluation_samples_per_s"] == 25.0 for line in evaluated)
    assert all("evaluation_seconds" not in line for line in lines if line not in evaluated)
    assert all(line["seconds"] < 4.0 for line in lines if line["update"])
    assert done.before == done.after == {"eval_loss": 1.0}


def test_training_and_evaluation_are_told_apart():
    assert about_evaluations([]) == []
    clocks = [{"evaluation_seconds": seconds, "evaluation_samples_per_s": 90 / seconds} for seconds in (70, 3)]
    assert about_evaluations(clocks) == ["evaluated   2 times in 1:13, the last in 3 s: 30 samples/s"]
    assert about_evaluations(clocks[1:]) == ["evaluated   once in 3 s: 30 samples/s"]
