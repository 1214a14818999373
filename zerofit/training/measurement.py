"""Profiled runs (`--profile`), and measured runs: a few updates on the longest rows instead of training, for
`zerofit compare`.

The environment variable ZEROFIT_MEASURE names a JSON file, {"steps": 5, "memory_limit": 25769803776}: how many updates
are timed, and how many bytes of its device each rank may use (null: all). The run's answer is a line of answers.jsonl
beside that file. Scripts need no code for it: `Run` gives their loop the longest rows repeatedly.
"""

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.profiler import profile

from zerofit.data.collate import Batch
from zerofit.data.pack import Sample
from zerofit.health.out_of_memory import find_exhausted_memory
from zerofit.recipe.errors import EXIT_OUT_OF_MEMORY, UserError
from zerofit.recipe.files import atomic_file
from zerofit.record.metrics import add_line
from zerofit.record.recorder import MemoryMeter
from zerofit.strategy.devices import synchronise
from zerofit.strategy.engine import Bounds, Outcome
from zerofit.training.stream import Totals, Update, counts_of

if TYPE_CHECKING:
    from zerofit.training.run import Run

MAX_PROFILED_OPERATORS = 10  # operators in the log
SNAPSHOT_EVENTS = 100_000  # allocations and releases that torch remembers


class Profiler:
    """The torch profiler over the updates that `--profile` names, on this rank. A run that stops or resumes within
    them records a part. Raises UserError: a file that no run has written is in the way."""

    def __init__(self, run: "Run") -> None:
        self.updates = run.recipe.profiled_updates
        self.log_lines = run.recorder.bar.log_lines
        self.device = run.device.type
        names = ["profile_rank0.json.gz", *(["memory_rank0.pickle"] if self.device == "cuda" else [])]
        for name in names:
            run.folder.claim(name)
        self.files = [run.folder.path / name for name in names]
        self._running: profile | None = None

    def begin(self, update: int) -> None:
        """Start the profiler if this update is the first of the profiled ones."""
        if update in self.updates and self._running is None:
            if len(self.files) > 1:
                torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
            self._running = profile(profile_memory=True)
            self._running.start()

    def end(self, update: int, stops: bool) -> None:
        """Write the profile after the last profiled update. `stops`: this update is the last one of this launch."""
        if self._running is None or not (stops or update >= self.updates[-1]):
            return
        profiler = self._running
        self._running = None
        profiler.stop()
        trace, *snapshots = self.files
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(f"{folder}/{trace.name}")
            for snapshot in snapshots:
                torch.cuda.memory._dump_snapshot(f"{folder}/{snapshot.name}")
                torch.cuda.memory._record_memory_history(enabled=None)
            for file in self.files:
                with atomic_file(file, "wb") as copy:
                    copy.write(Path(folder, file.name).read_bytes())
        self.log_lines(
            f"profile   updates {self.updates[0]} to {update}: {', '.join(file.name for file in self.files)}"
        )
        kind = "cpu" if self.device == "cpu" else "device"
        self.log_lines(
            profiler.key_averages().table(f"self_{kind}_time_total", MAX_PROFILED_OPERATORS, max_name_column_width=40)
        )


MEASURE_VARIABLE = "ZEROFIT_MEASURE"
ANSWERS_FILE = "answers.jsonl"
NUM_WARM_UP_UPDATES = 2  # untimed updates; the first allocates the optimizer's state


class Measurement:
    """A measured run: it repeats the longest rows of the data, times its updates and writes the answer."""

    def __init__(self, request: Path):
        settings = json.loads(request.read_text(encoding="utf-8"))
        self.steps = settings["steps"]
        self.limit = settings["memory_limit"]
        self.answers = request.with_name(ANSWERS_FILE)
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = torch.device("cpu")
        self.done = 0  # updates
        self.seconds: list[float] = []
        self.figures = {"loss": 0.0, "grad_norm": 0.0}  # figures of the latest update

    def limit_memory(self, accelerator: Accelerator) -> None:
        """Limit the device's memory of this rank. All ranks call it together, before there is a model. Raises
        UserError: the device has less."""
        self.device = accelerator.device
        if self.limit is None or self.device.type == "cpu":
            return
        torch.accelerator.get_memory_info()  # which makes this rank's context
        accelerator.wait_for_everyone()
        ranks = -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // torch.accelerator.device_count())
        # Memory outside of the allocator (the driver's context of each process, other programs) counts too: because of
        # it, the device could be full before the limits are reached.
        free, total = torch.accelerator.get_memory_info()
        used = max(0, total - free - ranks * torch.accelerator.memory_reserved())
        if ranks * self.limit + used > total:
            raise UserError(
                f"memory_limit = {self.limit / 2**30:.2f} GiB for each of {ranks} processes: the device has "
                f"{total / 2**30:.2f} GiB, and {used / 2**30:.2f} GiB are in use before there is a model. At most "
                f"{(total - used) // ranks / 2**30:.2f} GiB are left for each"
            )
        torch.get_device_module(self.device).set_per_process_memory_fraction(self.limit / total)

    def updates(self, run: "Run", evaluate: Callable[[], dict[str, float]] | None) -> Iterator[Update]:
        """Yield updates on this rank's longest rows until enough of them were timed. Then evaluate, if there is
        held-out data, and write the answer."""
        if self.rank == 0:
            add_line(self.answers, {"event": "begins"})
        engine = run.engine
        schedule = run.schedule
        assert schedule is not None, "a run that trains has one"
        run.folder.path.mkdir(parents=True, exist_ok=True)
        sizes = run.strategy.batches
        layout = engine.layout
        self.load = [os.getloadavg()[0]]
        rows = sizes.micro_batch
        to_warm_up = NUM_WARM_UP_UPDATES
        totals = Totals(0, 0, 0)
        self.scaled = run.strategy.precision == "fp16"
        engine.phase = lambda phase: run.enter(phase, self.done + 1)
        engine.model.train()
        MemoryMeter(engine.device).reset()
        if simulated := getattr(torch.get_device_module(engine.device), "peak_host_bytes", None):
            simulated(reset=True)
        while len(self.seconds) < self.steps:
            start = rows * sizes.accumulation * (self.done * layout.data_size + layout.data_rank)
            batches = [longest_batch(run, rows, start + rows * place) for place in range(sizes.accumulation)]
            began = time.perf_counter()
            totals = Totals(*engine.sum_over_replicas(counts_of(batches)))
            for counter in run.counters:
                counter.begin(totals.targets, totals.tokens)
            number = min(self.done + 1, run.num_updates)
            engine.set_learning_rate(schedule(number - 1))
            yield Update(number, batches, totals, layout.data_size / (totals.targets or 1.0))
            synchronise(engine.device)
            self.done += 1
            if not math.isfinite(self.figures["grad_norm"]):
                continue  # fp16 is still looking for its loss scale: no step was taken
            if to_warm_up:
                to_warm_up -= 1
            else:
                self.seconds.append(time.perf_counter() - began)
        self._answer(run, totals, evaluate)

    def bounds(self) -> Bounds:
        """Return bounds that refuse only a loss or gradient norm that is not finite."""
        return Bounds(may_overflow=self.scaled)

    def log(self, update: Update, outcome: Outcome) -> None:
        """Keep the figures of an update. Raises UserError: the update was refused."""
        self.figures = {"loss": outcome.loss_sum / (update.totals.targets or 1.0), "grad_norm": outcome.grad_norm}
        if outcome.refused:
            raise UserError(f"loss is {self.figures['loss']:g}, grad_norm {self.figures['grad_norm']:g} in the trial")

    def _answer(self, run: "Run", totals: Totals, evaluate: Callable[[], dict[str, float]] | None) -> None:
        self.load.append(os.getloadavg()[0])
        engine = run.engine
        if evaluate is not None and run.data.num_held_out:  # the evaluation's peak memory counts
            run.enter("evaluate", self.done)
            evaluate()
        peaks = measured_peaks(engine.device)
        ranks = [dict(zip(peaks, map(int, rank))) for rank in engine.per_rank([*peaks.values()])]
        typical = statistics.median(self.seconds)
        samples = run.data.train
        answer = {
            "event": "fits",
            "ranks": ranks,
            "seconds": self.seconds,
            "load": self.load,
            "cores": os.cpu_count(),
            "samples_per_s": run.strategy.batches.global_batch / typical,
            "tokens_per_s": totals.tokens / typical,
            "loss": self.figures["loss"],
            "about": {
                "longest": run.data.longest,
                "mean_sample": samples.stats.mean_length,
                "num_samples": len(samples),
                "accumulation": run.strategy.batches.accumulation,
                "precision": run.strategy.precision,
                "parameters": run.parameters,
            },
        }
        if self.rank == 0:
            add_line(self.answers, answer)

    def explain(self, error: Exception, phase: str) -> int | None:
        """Report an out-of-memory error to answers.jsonl and stderr. Returns the exit code; None: another error."""
        where = find_exhausted_memory(error)
        if where is None:
            return None
        where = where if self.device.type != "cpu" else "host"
        add_line(self.answers, {"event": "out_of_memory", "where": where, "phase": phase, "rank": self.rank})
        print(f"out of memory: rank {self.rank}, {phase}: {error}", file=sys.stderr, flush=True)
        return EXIT_OUT_OF_MEMORY


def measured_peaks(device: torch.device) -> dict[str, int]:
    """Return the peaks of this process in bytes: allocated and reserved on its device (a memory limit counts reserved
    bytes), and on the host. On a simulated device, `host` is the size of its tensors on the host."""
    host = MemoryMeter(torch.device("cpu")).peak_bytes()
    if device.type == "cpu":
        return {"allocated": host, "reserved": host, "host": host}
    simulated = getattr(torch.get_device_module(device), "peak_host_bytes", None)
    return {
        "allocated": torch.accelerator.max_memory_allocated(),
        "reserved": torch.accelerator.max_memory_reserved(),
        "host": simulated() if simulated else host,
    }


def longest_batch(run: "Run", size: int, start: int) -> Batch:
    """Return a batch of the samples `start`, `start` + 1 and so on (cyclic), each stretched to the longest row."""
    samples = run.data.train
    longest = run.data.longest
    indices = [(start + place) % len(samples) for place in range(size)]
    batch: Batch = run.collate([(stretch_sample(samples[index], longest), index) for index in indices])
    return batch


def stretch_sample(sample: Sample, longest: dict[str, Any]) -> Sample:
    """Return a sample whose tokens are repeated up to the longest length. If labels are next tokens, all are targets.

    Args:
        longest: {column: tokens}. Columns of the same length as `input_ids` are stretched with it.
    """
    length = len(sample["input_ids"])
    result = dict(sample)
    for name, values in sample.items():
        if name in longest:
            result[name] = np.resize(values, longest[name])
        elif np.ndim(values) == 1 and len(values) == length:
            result[name] = np.resize(values, longest["input_ids"])
    if "position_ids" in sample and np.array_equal(sample["position_ids"], np.arange(length)):
        result["position_ids"] = np.arange(longest["input_ids"])  # one document stays one
    if "labels" in sample and "labels" not in longest:  # next tokens: prompts and padding are trained as well
        result["labels"] = result["input_ids"].copy()
    if "sizes" in sample:  # lengths of the choices, which share one row
        result["sizes"] = np.full_like(result["sizes"], longest["input_ids"] // result["sizes"].size)
        result["sizes"].flat[-1] += longest["input_ids"] - result["sizes"].sum()
    if "num_tokens" in sample:
        result["num_tokens"] = np.array(longest["input_ids"])
    return result
