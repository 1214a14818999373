"""A trial, as each rank runs it: the task's own run up to the loop, then batch sizes in place of epochs.

accelerate launch -m zerofit.tools.compare.trial TASK REQUEST --config RECIPE     (started by `zerofit compare`)
"""

import contextlib
import importlib
import math
import os
import runpy
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerofit.data.collate import Batch
from zerofit.data.pack import Sample
from zerofit.health.anomaly import AnomalyDetector
from zerofit.health.out_of_memory_errors import is_out_of_memory
from zerofit.health.slow_ranks import RankClock
from zerofit.recipe.errors import EXIT_OUT_OF_MEMORY, UserError, leave
from zerofit.recipe.places import script
from zerofit.record.jsonl import add_line
from zerofit.strategy.devices import synchronise
from zerofit.strategy.strategy import Strategy
from zerofit.tools.compare.memory_limits import DataSegment, TrialMemory, limit_device
from zerofit.tools.compare.search import next_size
from zerofit.tools.compare.trial_files import ANSWERS, FAILURES, TrialRequest
from zerofit.training.evaluation import timed_evaluation
from zerofit.training.prepare import Prepared
from zerofit.training.session import Session
from zerofit.training.step import Signals, TrainStep
from zerofit.training.stream import UpdateBatches
from zerofit.training.task import Task

WARM_UP, WARM_UP_FIRST = 1, 2  # updates before the timed ones; the first size also makes the optimizer's state

# What a run imports after its process group is there: with the model, with its engine, and with its metrics.
OF_ANY_RUN = (
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "zerofit.model.load",
    "zerofit.strategy.prepare",
)
OF_DEEPSPEED = ("deepspeed.module_inject.auto_ep_layer", "torch._inductor.compile_fx")
OF_LORA = ("peft",)
OF_TASK = {"cls": ("sklearn.metrics", "scipy.stats")}


def import_libraries(task: str, lora: bool, deepspeed: bool) -> None:
    """Import now what a run imports later: libraries are the program's memory, and not the model's."""
    of_engine, of_model = OF_DEEPSPEED if deepspeed else (), OF_LORA if lora else ()
    for name in (*OF_ANY_RUN, *of_engine, *of_model, *OF_TASK.get(task, ())):
        importlib.import_module(name)


class Trial:
    """Measures the requested batch sizes in place of training, and ends with the requesting process.

    Args:
        request: the file of the request; answers are written beside it.
    """

    def __init__(self, request: Path):
        self.request, self.folder = TrialRequest.read(request), request.parent
        end_together_with(self.request.pid)
        self.size, self.limit, self.device = self.request.first, None, None
        self.rank = int(os.environ.get("RANK", "0"))

    def samples(self, num_samples: int, global_batch: int) -> int:
        """At least one global batch: a small data set is repeated."""
        self.num_samples = num_samples
        return max(num_samples, global_batch)

    def started(self, accelerator, session: Session) -> None:
        """Limit the memory of this rank from here on.

        Raises:
            UserError: the device has less than the limit, or the process exceeds it before it has a model.
        """
        self.device = accelerator.device
        session.folder.path.mkdir(parents=True, exist_ok=True)
        build_operations(session.strategy)
        import_libraries(session.task, session.recipe.lora, bool(session.strategy.deepspeed))
        on_cpu = self.device.type == "cpu"
        self.segment = DataSegment(watched=on_cpu)
        limit = self.request.memory_limit
        taken = self.segment.now() if on_cpu else torch.accelerator.memory_reserved()
        if limit is not None and taken >= limit:
            message = f"memory_limit: {limit / 2**20:,.0f} MiB, of which an empty process takes {taken / 2**20:,.0f}"
            self._report_failure("too_small", text=message)
            raise UserError(message)
        try:
            self.limit = limit if on_cpu else limit_device(self.device, limit, ranks_of_the_device(accelerator))
        except ValueError as problem:
            raise UserError(f"memory_limit = {limit / 2**30:.2f} GiB: {problem}") from None
        if on_cpu and limit is not None:
            self.segment.limit(limit)
        self._answer(event="started", taken=taken)

    def run(self, prepared: Prepared, task: Task) -> int:
        """Try one batch size after another, until none is left or memory runs out."""
        session, self.prepared, self.task = prepared.session, prepared, task
        self.engine, self.strategy, self.phase = prepared.engine, session.strategy, session.phase
        self.memory = TrialMemory(self.device, self.segment)
        detector = AnomalyDetector(0.0, clipped=True, scaled=self.strategy.precision == "fp16")
        self.step = TrainStep(task, self.engine, detector, self.memory, Signals, self.phase, RankClock.of(self.engine))
        self.done, self.held, request = 0, None, self.request
        self.engine.model.train()
        facts = {
            "longest": task.longest,
            "mean_sample": task.train_set.stats.mean_length,
            "num_samples": self.num_samples,
            "accumulation": self.strategy.batches.accumulation,
            "precision": self.strategy.precision,
            "parameters": prepared.parameters,
        }
        self._answer(event="ready", **facts)
        points, fits, size = list(request.points), request.fits, request.first
        while size is not None:
            self.size = size
            self._answer(event="trying", size=size)
            trial = self.measure(size, fresh=size == request.first)
            self._answer(event="fits", size=size, fresh=size == request.first, **trial)
            points.append((size, max(rank["reserved"] for rank in trial["ranks"])))
            fits = max(fits, size)
            fails = request.fails if request.fails and request.fails > fits else None
            size = (
                None
                if request.only_first
                else next_size(request.sizes, fits, fails, points, self.limit, request.must_try, request.per_sample)
            )
        self._answer(event="done")
        self.engine.close()
        return 0

    def measure(self, size: int, fresh: bool) -> dict[str, Any]:
        """Updates of this size, the last ones timed, and in the first trial of a process an evaluation."""
        self.memory.begin()
        seconds, to_warm_up, load = [], WARM_UP_FIRST if fresh else WARM_UP, os.getloadavg()[0]
        while len(seconds) < self.request.steps:
            batches = self._batches(size)
            began = time.perf_counter()
            result = self._update(size, batches)
            synchronise(self.device)
            if not math.isfinite(result.grad_norm):
                continue  # fp16 is still looking for its loss scale: no step was taken, and there may be no state yet
            if to_warm_up:
                to_warm_up -= 1
            else:
                seconds.append(time.perf_counter() - began)
        trained, evaluation = dict(self.memory.note()), {}
        if self.held is None:
            self.held = self.engine.held_bytes()
            if self.task.evaluate is not None:
                self.phase("evaluate", self.done)
                self.task.evaluate(self.engine)  # warms up
                time_taken = timed_evaluation(self.task, self.engine)[1]
                evaluation = {
                    "evaluation_seconds": time_taken.seconds,
                    "evaluation_samples_per_s": time_taken.samples_per_s,
                    "evaluation_samples": self.task.num_held_out,
                }
        peaks, names = self.memory.note(), list(trained)
        ranks = self.engine.per_rank([*trained.values(), *peaks.values(), *self.held.values()])
        typical = statistics.median(seconds)
        samples = self._rows(size) * self.strategy.batches.accumulation * self.engine.layout.data_size
        return {
            "ranks": [dict(zip(names, map(int, rank))) for rank in ranks],
            "with_evaluation": [dict(zip(names, map(int, rank[len(names) :]))) for rank in ranks],
            "held": [dict(zip(self.held, map(int, rank[2 * len(names) :]))) for rank in ranks],
            "seconds": seconds,
            "load": [load, os.getloadavg()[0]],
            "cores": os.cpu_count(),
            "samples_per_s": samples / typical,
            "tokens_per_s": result.totals.tokens / typical,
            "loss": result.loss,
            **evaluation,
        }

    def _batches(self, size: int) -> list[Batch]:
        """The micro-batches of the next update, made outside the timed part: training has workers for that."""
        accumulation, rank = self.strategy.batches.accumulation, self.engine.layout.data_rank
        rows, longest = self._rows(size), {"input_ids": size} if self.request.by_length else None
        start = rows * accumulation * (self.done * self.engine.layout.data_size + rank)
        return [worst_case_batch(self.task, rows, start + rows * number, longest) for number in range(accumulation)]

    def _rows(self, size: int) -> int:
        """Of a micro-batch."""
        return self.strategy.batches.micro_batch if self.request.by_length else size

    def _update(self, size: int, batches: list[Batch]):
        """One update, as the training loop does it."""
        number = min(self.done, self.prepared.length.num_updates - 1) + 1  # in the learning-rate schedule
        self.done += 1
        result = self.step(number, UpdateBatches(batches), None, lambda: None)
        if result.anomaly is not None:
            raise UserError(f"size {size}: {result.anomaly.reason} in update {self.done} of the trial")
        return result

    # --------------------------------------------------------------------------------------------------------- answers

    def explain(self, error: Exception, phase: str) -> int | None:
        """Report memory that ran out."""
        where = is_out_of_memory(error)
        if where is None:
            return None
        on_device = where == "device" or (self.device is not None and self.device.type == "cpu")
        self._report_failure("out_of_memory", where="device" if on_device else "host", phase=phase)
        print(f"out of memory: rank {self.rank}, {phase}, size {self.size}: {error}", file=sys.stderr, flush=True)
        return EXIT_OUT_OF_MEMORY

    def _answer(self, **line) -> None:
        if self.rank == 0:
            add_line(self.folder / ANSWERS, line)

    def _report_failure(self, event: str, **details) -> None:
        line = {"event": event, "size": self.size, "rank": self.rank, **details}
        add_line(self.folder / FAILURES, line)


def ranks_of_the_device(accelerator) -> int:
    """How many ranks use the device of this one; returns when each of them has its context there."""
    torch.accelerator.get_memory_info()
    accelerator.wait_for_everyone()
    return -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // torch.accelerator.device_count())


def build_operations(strategy: Strategy) -> None:
    """Build DeepSpeed's optimizer for the host now: a compiler does not fit into the limit."""
    zero = (strategy.deepspeed or {}).get("zero_optimization", {})
    if (zero.get("offload_optimizer") or {}).get("device", "none") != "none":
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load()


def end_together_with(pid: int) -> None:
    """End this process as soon as another one is gone, also if that one was killed."""
    import psutil

    def watch() -> None:
        with contextlib.suppress(psutil.Error):
            requester = psutil.Process(pid)
            while requester.is_running() and requester.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.5)
        leave(os.EX_UNAVAILABLE)

    threading.Thread(target=watch, daemon=True, name="requester").start()


def main(argv: list[str]) -> int:
    """Run the task's own program with a trial in place of training."""
    task, request, *flags = argv
    return runpy.run_path(str(script(task)))["main"](flags, Trial(Path(request)))


def worst_case_batch(task: Task, size: int, start: int, longest: dict[str, Any] | None = None) -> Batch:
    """Samples `start`, `start` + 1 and so on (after the last comes the first), stretched to the greatest length.

    Args:
        longest: tokens by column, in place of the task's.
    """
    indices = [(start + place) % len(task.train_set) for place in range(size)]
    return task.collate([(stretched(task.train_set[index], longest or task.longest), index) for index in indices])


def stretched(sample: Sample, longest: dict[str, Any]) -> Sample:
    """A sample with its rows of tokens repeated to the greatest length. Where labels are next tokens, all are trained.

    Args:
        longest: tokens by column, and of groups the shape of `sizes`. Columns of the same length as `input_ids` are
            stretched with it.
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
    if "sizes" in sample:  # of choices, or of the texts of a group, which are in one row
        long["sizes"] = np.full_like(long["sizes"], longest["input_ids"] // long["sizes"].size)
        long["sizes"].flat[-1] += longest["input_ids"] - long["sizes"].sum()
    if "num_tokens" in sample:
        long["num_tokens"] = np.array(longest["input_ids"])
    return long


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
