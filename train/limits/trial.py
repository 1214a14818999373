"""A trial, seen from its ranks: the task's own run up to the loop, and there batch sizes in place of epochs."""

import math
import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from train.data.collate import Batch
from train.limits.caps import DataSegment, TrialMemory, cap_device
from train.limits.orders import ANSWERS, LAST_WORDS, Orders, add_line
from train.limits.search import next_size
from train.limits.worst import WorstCase
from train.recipe.errors import UserError, leave
from train.run.evaluate import timed_evaluation
from train.run.loop import Share, one_update
from train.run.memory_report import EXIT_OUT_OF_MEMORY, is_out_of_memory
from train.run.sentinel import Sentinel
from train.run.session import Session
from train.strategy.devices import synchronise

WARM_UP, WARM_UP_FIRST = 1, 2  # updates before those that are timed; of the first size the optimizer's state is made
MEASURED = 7  # why such a run stops before it has trained (Session.stopped)


class TrialSession(Session):
    """A run that measures what its orders say, leaves no model behind, and ends with the process that gave them."""

    def __init__(self, task, recipe, timeline):
        self.orders = Orders.read(Path(recipe.trial))
        end_with(self.orders.pid, self.orders.started)
        self.trial_folder = Path(recipe.trial).parent
        self.size, self.limit, self.device = self.orders.first, None, None
        super().__init__(task, recipe, timeline)
        self.strategy.shares_devices = True
        self.folder.path.mkdir(parents=True, exist_ok=True)

    def plan(self, num_samples):
        self.num_samples = num_samples
        super().plan(max(num_samples, self.strategy.batches.global_batch))  # too few are used again

    def start_processes(self):
        """The Accelerator, and from here on the memory that a rank may have.

        Raises:
            UserError: the limit is more than there is, or less than the process has taken before there is a model.
        """
        accelerator = super().start_processes()
        self.device = accelerator.device
        self._build_operations()
        self.segment, on_cpu = DataSegment(), self.device.type == "cpu"
        wanted, of_host = self.orders.memory_limit, self.orders.host_memory_limit
        if on_cpu:
            wanted = of_host = min((limit for limit in (wanted, of_host) if limit is not None), default=None)
        taken = self.segment.now() if on_cpu else torch.accelerator.memory_reserved()
        self._check_room("memory_limit", wanted, taken)
        if not on_cpu:
            self._check_room("host_memory_limit", of_host, self.segment.now())
        try:
            self.limit = wanted if on_cpu else cap_device(self.device, wanted, self._ranks_of_the_device())
        except ValueError as problem:
            raise UserError(f"memory_limit = {wanted / 2**30:.2f} GiB: {problem}") from None
        if of_host is not None:
            self.segment.limit(of_host)
        self._answer(event="started", taken=taken)
        return accelerator

    def _ranks_of_the_device(self) -> int:
        """How many ranks share it, as soon as each of them has its context there."""
        torch.accelerator.get_memory_info()
        self.accelerator.wait_for_everyone()
        return -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // torch.accelerator.device_count())

    def _check_room(self, option: str, limit: int | None, taken: int) -> None:
        """Raises UserError if the process has taken as much already as it may have."""
        if limit is not None and taken >= limit:
            said = (
                f"{option}: a process takes {taken / 2**20:,.0f} MiB before there is a model or a batch, and may have "
                f"{limit / 2**20:,.0f} MiB. Give it more than that and the model's size"
            )
            self._last_words("too_small", text=said)
            raise UserError(said)

    def _build_operations(self) -> None:
        """Have DeepSpeed's optimizer for the host built now: a compiler would not live within the cap."""
        zero = (self.strategy.deepspeed or {}).get("zero_optimization", {})
        if (zero.get("offload_optimizer") or {}).get("device", "none") != "none":
            from deepspeed.ops.op_builder import CPUAdamBuilder

            CPUAdamBuilder().load()

    def train(self, job, meter, tokenizer):
        """Try one batch size after the other, until there is none left to try (or memory runs out)."""
        self.job, self.worst = job, WorstCase(job)
        self.memory = TrialMemory(self.device, self.segment)
        self.sentinel = Sentinel(0.0, clipped=True, scaled=self.strategy.precision == "fp16")
        self.done, self.held, orders = 0, None, self.orders
        self.engine.model.train()
        facts = {
            "longest": job.longest, "mean_sample": job.train_set.contents.mean_length,
            "num_samples": self.num_samples, "accumulation": self.strategy.batches.accumulation,
            "precision": self.strategy.precision, "parameters": self.parameters,
        }  # fmt: skip
        self._answer(event="ready", **facts)
        points, fits, size = list(orders.points), orders.fits, orders.first
        while size is not None:
            self.size = size
            self._answer(event="trying", size=size)
            trial = self.measure(size, fresh=size == orders.first)
            self._answer(event="fits", size=size, fresh=size == orders.first, **trial)
            points.append((size, max(rank["reserved"] for rank in trial["ranks"])))
            fits = max(fits, size)
            fails = orders.fails if orders.fails and orders.fails > fits else None
            size = None if orders.alone else next_size(orders.sizes, fits, fails, points, self.limit, orders.visit)
        self._answer(event="done")
        self.stopped = MEASURED
        return {}

    def measure(self, size: int, fresh: bool) -> dict[str, Any]:
        """Updates of this batch size, the last of them timed, and once in a process an evaluation."""
        self.memory.begin()
        seconds, to_warm_up = [], WARM_UP_FIRST if fresh else WARM_UP
        while len(seconds) < self.orders.steps:
            batches = self._batches(size)
            began = time.perf_counter()
            outcome = self._update(size, batches)
            synchronise(self.device)
            if not math.isfinite(outcome.figures["grad_norm"]):
                continue  # fp16 looks for its loss scale: no step was taken, and perhaps there is no state yet
            if to_warm_up:
                to_warm_up -= 1
            else:
                seconds.append(time.perf_counter() - began)
        trained, evaluation = dict(self.memory.note()), {}
        if self.held is None:
            self.held = self.engine.held_bytes()
            if self.job.evaluate is not None:
                self._phase("evaluate", self.done)
                self.job.evaluate(self.engine)  # warms up
                evaluation = timed_evaluation(self.job, self.engine)[1]
                evaluation["evaluation_samples"] = self.job.num_held_out
        peaks, names = self.memory.note(), list(trained)
        ranks = self.engine.per_rank([*trained.values(), *peaks.values(), *self.held.values()])
        figures, typical = outcome.figures, statistics.median(seconds)
        samples = size * self.strategy.batches.accumulation * self.engine.world_size
        return {
            "ranks": [dict(zip(names, map(int, rank))) for rank in ranks],
            "with_evaluation": [dict(zip(names, map(int, rank[len(names) :]))) for rank in ranks],
            "held": [dict(zip(self.held, map(int, rank[2 * len(names) :]))) for rank in ranks],
            "seconds": seconds, "samples_per_s": samples / typical, "tokens_per_s": figures["tokens"] / typical,
            "loss": figures["loss"], **evaluation,
        }  # fmt: skip

    def _batches(self, size: int) -> list[Batch]:
        """The micro-batches of the next update, which is not timed with them: training has workers for that."""
        accumulation, rank = self.strategy.batches.accumulation, self.engine.accelerator.process_index
        start = size * accumulation * (self.done * self.engine.world_size + rank)
        return [self.worst.batch(size, start + size * number) for number in range(accumulation)]

    def _update(self, size: int, batches: list[Batch]):
        """One update of the loop's own."""
        number = min(self.done, self.length.num_updates - 1) + 1  # of the schedule
        self.done += 1
        hooks = SimpleNamespace(phase=self._phase, saves=SimpleNamespace(has_failed=False))
        judges = self.memory, self.sentinel, self.stop
        outcome = one_update(self.job, self.engine, Share(batches), number, *judges, hooks, iter(()))
        if outcome.fault is not None:
            raise UserError(f"batch size {size}: {outcome.fault.reason} in update {self.done} of the trial")
        return outcome

    def export(self, results):
        """Nothing is left behind."""

    def close(self):
        self.engine.close()
        return 0

    # ------------------------------------------------------------------------------------------------------- answering

    def _explain(self, error):
        where = is_out_of_memory(error)
        if where is None:
            return super()._explain(error)
        phase, _ = self.witness.at
        on_device = where == "device" or (self.device is not None and self.device.type == "cpu")
        self._last_words("out_of_memory", where="device" if on_device else "host", phase=phase)
        print(f"out of memory: rank {self.strategy.launch.rank}, {phase}, batch size {self.size}: {error}",
              file=sys.stderr, flush=True)  # fmt: skip
        return EXIT_OUT_OF_MEMORY

    def _answer(self, **line) -> None:
        if self.main:
            add_line(self.trial_folder / ANSWERS, line)

    def _last_words(self, event: str, **words) -> None:
        line = {"event": event, "size": self.size, "rank": self.strategy.launch.rank, **words}
        add_line(self.trial_folder / LAST_WORDS, line)


@dataclass(frozen=True)
class _Process:
    """A process, told from later ones of the same number."""

    pid: int
    started: float

    def is_alive(self) -> bool:
        import psutil

        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.started) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def end_with(pid: int, started: float) -> None:
    """End this process as soon as another one is gone, even if that was killed."""
    other = _Process(pid, started)

    def watch() -> None:
        while other.is_alive():
            time.sleep(0.5)
        leave(os.EX_UNAVAILABLE)

    threading.Thread(target=watch, daemon=True, name="orders").start()
