"""A measured run: a few updates of the longest rows in place of the training, for `zerofit compare`.

The environment variable ZEROFIT_MEASURE names a JSON file, {"steps": 5, "memory_limit": 25769803776}: how many updates
are timed, and how many bytes of its device each rank may use (null: all). The run's answer is a line of answers.jsonl
beside that file. Everything else about such a run is as its recipe says. A loop uses it like this:

    measurement = measurement_from_environment()                     # None: an ordinary run
    num_samples = measurement.samples(num_samples, global_batch)     # before the length of the run is fixed
    measurement.limit_memory(accelerator)                            # before there is a model
    meter = measurement.memory(engine.device)                        # what the loop resets and reads as its own
    for number, batches in measurement.updates(engine, task):        # in place of the training data
        measurement.add(an update on `batches`: a StepResult)
    measurement.finish(engine, task, facts)                          # an evaluation, and the answer
    code = measurement.explain(error, phase)                         # of an error, wherever it is raised
"""

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from zerofit.data.collate import Batch
from zerofit.data.pack import Sample
from zerofit.health.anomaly import AnomalyDetector
from zerofit.health.out_of_memory_errors import is_out_of_memory
from zerofit.health.slow_ranks import RankClock
from zerofit.recipe.errors import EXIT_OUT_OF_MEMORY, UserError
from zerofit.record.jsonl import add_line
from zerofit.record.meters import MemoryMeter
from zerofit.strategy.devices import synchronise
from zerofit.strategy.engine import Engine
from zerofit.training.evaluation import timed_evaluation
from zerofit.training.step import Signals, StepResult, TrainStep
from zerofit.training.stream import UpdateBatches
from zerofit.training.task import Task

VARIABLE = "ZEROFIT_MEASURE"
ANSWERS = "answers.jsonl"
WARM_UP = 2  # updates before the timed ones; the first also makes the optimizer's state


def measurement_from_environment() -> "Measurement | None":
    """The measurement that this process was started for; None: an ordinary run."""
    file = os.environ.get(VARIABLE)
    return Measurement(Path(file)) if file else None


class PeakMeter(MemoryMeter):
    """A MemoryMeter whose peak is that of the whole run: the loop's resets after each update do nothing."""

    def reset(self) -> None:
        pass


class Measurement:
    """Repeats the longest rows of a run's data, times its updates and writes down what they took.

    Args:
        request: the JSON file.
    """

    def __init__(self, request: Path):
        about = json.loads(request.read_text(encoding="utf-8"))
        self.steps, self.limit, self.answers = about["steps"], about["memory_limit"], request.with_name(ANSWERS)
        self.rank, self.device = int(os.environ.get("RANK", "0")), torch.device("cpu")
        self.results: list[StepResult] = []
        self.seconds: list[float] = []
        self.load = [os.getloadavg()[0]]

    def samples(self, num_samples: int, global_batch: int) -> int:
        """The samples that the run's length is made of: at least one global batch, for small data is repeated."""
        return max(num_samples, global_batch)

    def limit_memory(self, accelerator: Accelerator) -> None:
        """Limit the device's memory of this rank. All ranks call it together, before there is a model.

        Raises:
            UserError: the device has less.
        """
        self.device = accelerator.device
        if self.limit is None or self.device.type == "cpu":
            return
        torch.accelerator.get_memory_info()  # which makes this rank's context
        accelerator.wait_for_everyone()
        ranks = -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // torch.accelerator.device_count())
        limit_device(self.device, self.limit, ranks)

    def memory(self, device: torch.device) -> PeakMeter:
        """The meter of the loop, from now on."""
        MemoryMeter(device).reset()
        return PeakMeter(device)

    def updates(self, engine: Engine, task: Task) -> Iterator[tuple[int, UpdateBatches]]:
        """(number of the update, this rank's micro-batches of the longest rows), until enough of them were timed."""
        if self.rank == 0:
            add_line(self.answers, {"event": "begins"})
        sizes, layout, self.load = engine.strategy.batches, engine.layout, [os.getloadavg()[0]]
        rows, to_warm_up = sizes.micro_batch, WARM_UP
        while len(self.seconds) < self.steps:
            number = len(self.results)
            start = rows * sizes.accumulation * (number * layout.data_size + layout.data_rank)
            batches = [longest_rows(task, rows, start + rows * place) for place in range(sizes.accumulation)]
            began = time.perf_counter()
            yield number + 1, UpdateBatches(batches)
            synchronise(engine.device)
            if not math.isfinite(self.results[-1].grad_norm or 0.0):
                continue  # fp16 is still looking for its loss scale: no step was taken
            if to_warm_up:
                to_warm_up -= 1
            else:
                self.seconds.append(time.perf_counter() - began)

    def add(self, result: StepResult) -> None:
        """Take the result of an update.

        Raises:
            UserError: the update was refused as an anomaly.
        """
        if result.anomaly is not None:
            raise UserError(f"{result.anomaly.reason} in update {result.update} of the trial")
        self.results.append(result)

    def finish(self, engine: Engine, task: Task, facts: dict[str, Any]) -> None:
        """Time an evaluation, where something is held out, and write the answer with these facts of the run."""
        self.load.append(os.getloadavg()[0])
        evaluation = {}
        if task.evaluate is not None:
            task.evaluate(engine)  # warms up
            took = timed_evaluation(task, engine)[1]
            evaluation = {
                "evaluation_seconds": took.seconds,
                "evaluation_samples_per_s": took.samples_per_s,
                "evaluation_samples": task.num_held_out,
            }
        peaks = measured_peaks(engine.device)
        ranks = [dict(zip(peaks, map(int, rank))) for rank in engine.per_rank([*peaks.values()])]
        if self.rank:
            return
        typical, last = statistics.median(self.seconds), self.results[-1]
        answer = {
            "event": "fits",
            "ranks": ranks,
            "seconds": self.seconds,
            "load": self.load,
            "cores": os.cpu_count(),
            "samples_per_s": engine.strategy.batches.global_batch / typical,
            "tokens_per_s": last.totals.tokens / typical,
            "loss": last.loss,
            **evaluation,
            "about": {
                "longest": task.longest,
                "mean_sample": task.samples.stats.mean_length,
                "num_samples": len(task.samples),
                "accumulation": engine.strategy.batches.accumulation,
                "precision": engine.strategy.precision,
                **facts,
            },
        }
        add_line(self.answers, answer)

    def explain(self, error: Exception, phase: str) -> int | None:
        """Report memory that ran out, to who asked and at the terminal. Returns the exit code; None: another error."""
        where = is_out_of_memory(error)
        if where is None:
            return None
        where = where if self.device.type != "cpu" else "host"
        add_line(self.answers, {"event": "out_of_memory", "where": where, "phase": phase, "rank": self.rank})
        print(f"out of memory: rank {self.rank}, {phase}: {error}", file=sys.stderr, flush=True)
        return EXIT_OUT_OF_MEMORY

    def run(self, prepared: Any, task: Task) -> int:
        """All of it, after the run is prepared. Returns the exit code."""
        session, engine = prepared.session, prepared.engine
        session.folder.path.mkdir(parents=True, exist_ok=True)
        detector = AnomalyDetector(0.0, clipped=True, scaled=session.strategy.precision == "fp16")
        memory, clock = self.memory(engine.device), RankClock.of(engine)
        step = TrainStep(task, engine, detector, memory, Signals, session.phase, clock)
        engine.model.train()
        last = prepared.length.num_updates  # of the learning-rate schedule
        for number, batches in self.updates(engine, task):
            self.add(step(min(number, last), batches, None, lambda: None))
        session.phase("evaluate", last)
        self.finish(engine, task, {"parameters": prepared.parameters})
        engine.close()
        return 0


def measured_peaks(device: torch.device) -> dict[str, int]:
    """Peaks of this process in bytes: allocated and reserved of its device (reserved is what a limit counts), and of
    the host. On a simulated device, `host` is what its tensors on the host would take."""
    host = MemoryMeter(torch.device("cpu")).peak_bytes()
    if device.type == "cpu":
        return {"allocated": host, "reserved": host, "host": host}
    simulated = getattr(torch.get_device_module(device), "peak_host_bytes", None)
    return {
        "allocated": torch.accelerator.max_memory_allocated(),
        "reserved": torch.accelerator.max_memory_reserved(),
        "host": simulated() if simulated else host,
    }


def limit_device(device: torch.device, limit: int, ranks: int) -> None:
    """Limit this rank to `limit` bytes of its device's allocator.

    Memory outside of the allocator (the driver's context of each process, other programs) is measured here: with it,
    the device could be full before the limits are reached.

    Args:
        ranks: processes on this device, each with this limit. All of them have their contexts by now.

    Raises:
        UserError: the device has less, or its allocator cannot be limited; the message says which.
    """
    free, total = torch.accelerator.get_memory_info()
    taken = max(0, total - free - ranks * torch.accelerator.memory_reserved())
    named = f"memory_limit = {limit / 2**30:.2f} GiB"
    if ranks * limit + taken > total:
        shared = f"{ranks} processes use it, " if ranks > 1 else ""
        raise UserError(
            f"{named}: the device has {total / 2**30:.2f} GiB; {shared}and {taken / 2**30:.2f} GiB are in use before "
            f"there is a model. At most {(total - taken) // ranks / 2**30:.2f} GiB are left for each"
        )
    restrict = getattr(torch.get_device_module(device), "set_per_process_memory_fraction", None)
    if restrict is None:
        raise UserError(f"{named}: torch cannot limit the memory of a {device.type} device")
    restrict(limit / total)


def longest_rows(task: Task, size: int, start: int) -> Batch:
    """A batch of the samples `start`, `start` + 1 and so on (after the last comes the first), each stretched."""
    samples = task.samples
    indices = [(start + place) % len(samples) for place in range(size)]
    return task.collate([(stretched(samples[index], task.longest), index) for index in indices])


def stretched(sample: Sample, longest: dict[str, Any]) -> Sample:
    """A sample with its rows of tokens repeated to the greatest length. Where labels are next tokens, all are trained.

    Args:
        longest: tokens by column. Columns of the same length as `input_ids` are stretched with it.
    """
    length = len(sample["input_ids"])
    long = dict(sample)
    for name, values in sample.items():
        if name in longest:
            long[name] = np.resize(values, longest[name])
        elif np.ndim(values) == 1 and len(values) == length:
            long[name] = np.resize(values, longest["input_ids"])
    if "position_ids" in sample and np.array_equal(sample["position_ids"], np.arange(length)):
        long["position_ids"] = np.arange(longest["input_ids"])  # one document stays one
    if "labels" in sample and "labels" not in longest:  # next tokens: prompts and padding are trained as well
        long["labels"] = long["input_ids"].copy()
    if "sizes" in sample:  # of choices, which are in one row
        long["sizes"] = np.full_like(long["sizes"], longest["input_ids"] // long["sizes"].size)
        long["sizes"].flat[-1] += longest["input_ids"] - long["sizes"].sum()
    if "num_tokens" in sample:
        long["num_tokens"] = np.array(longest["input_ids"])
    return long
