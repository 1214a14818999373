"""The class `Run`: the trainer around the loop of a script of train/.

The script makes the data, the model, the loss, the optimizer and the schedule, and has the loop of updates; `Run`
handles the strategy, the folder, checkpoints, the record, signals and anomalies. All ranks call its methods together.
"""

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR

from zerofit.checkpoint.directory import SaveReason
from zerofit.checkpoint.exporter import HubRepository
from zerofit.checkpoint.mirror import Mirror, open_mirror
from zerofit.checkpoint.writer import RunState
from zerofit.data.collate import Batch, updates_by_tokens
from zerofit.data.lengths import length_warmup
from zerofit.data.pack import TaskData, TextData
from zerofit.health.anomaly import ANOMALY_ACTIONS, MAX_IN_A_ROW, Anomaly, AnomalyDetector
from zerofit.health.out_of_memory import explain_failure
from zerofit.health.shutdown import ShutdownHandler, StopReason
from zerofit.health.slow_ranks import RankClock, SlowRanks
from zerofit.model.adapter_folder import trained_config
from zerofit.model.parameters import count_parameters
from zerofit.model.preflight import safe_precision
from zerofit.model.stages import whole_model
from zerofit.recipe.errors import EXIT, UserError
from zerofit.recipe.files import counted
from zerofit.recipe.options import Schedule
from zerofit.recipe.tasks import TaskRecipe
from zerofit.record.metrics import EvaluationTime, UpdateMetrics
from zerofit.record.recorder import MemoryMeter, ThroughputMeter, without_mfu
from zerofit.record.run_folder import RunFolder
from zerofit.record.terminal import log_lines
from zerofit.strategy.devices import synchronise
from zerofit.strategy.engine import Bounds, Engine, Outcome
from zerofit.strategy.optimizers import check_kept, check_own, keep_group_rates, rates_of
from zerofit.strategy.prepare_engine import prepare_engine
from zerofit.strategy.strategy import Strategy
from zerofit.training.export import answer_held_out, describe_run, export_run, finish_run
from zerofit.training.measurement import MEASURE_VARIABLE, Measurement
from zerofit.training.run_configuration import RunConfiguration, StoredModel, check_model, resolve
from zerofit.training.setup import LONG_PATIENCE, open_process_group, open_record, prepare_activations
from zerofit.training.stream import (
    Progress,
    RankReport,
    Totals,
    Update,
    counts_of,
    dropout_seed,
    number_of,
    run_length,
    update_batches,
)

if TYPE_CHECKING:
    from zerofit.checkpoint.exporter import ModelExporter
    from zerofit.checkpoint.manager import CheckpointManager
    from zerofit.record.recorder import RunRecorder
    from zerofit.training.entry import Start
    from zerofit.training.evaluation import BestMetricTracker
    from zerofit.training.measurement import Profiler

SAVING_PATIENCE = 4.0  # times watchdog_minutes, while a checkpoint is started


class Run:
    """A launch of a script: it trains, or (`recipe.trains` is false) it evaluates a stored model or lets it answer.

    Attributes:
        num_updates: steps of the optimizer in the whole run; 0 without training.
        stop_reason: why training ended; NONE after the last update and after early stopping.
        anomaly: the anomaly that ended training; None: no anomaly did.
    """

    # Made by open_record, when the loop begins:
    best: "BestMetricTracker"
    checkpoints: "CheckpointManager"
    clock: RankClock
    detector: AnomalyDetector
    environment: dict[str, Any]
    exporter: "ModelExporter"
    memory: MemoryMeter
    profiler: "Profiler | None"
    recorder: "RunRecorder"
    slow_ranks: SlowRanks
    throughput: ThroughputMeter

    def __init__(self, config: RunConfiguration, start: "Start", stored: Any, mirror: Mirror | None) -> None:
        self.config = config
        self.stored = stored
        self.mirror = mirror
        self.recipe: TaskRecipe = config.recipe
        self.strategy: Strategy = config.strategy
        self.folder: RunFolder = config.folder
        self.task = config.task
        self.timeline = start.timeline
        self.watchdog = start.watchdog
        self.ranks = start.ranks
        request = os.environ.get(MEASURE_VARIABLE) if self.recipe.trains else None
        self.measurement = Measurement(Path(request)) if request else None  # None: an ordinary run
        self.hub: HubRepository | None = None
        self.shutdown = ShutdownHandler(self.recipe.max_hours, start.timeline.started, start.watchdog.stop_requested)
        self.engine: Any = None  # once it is prepared
        self.row_tokens = self.program_bytes = self.parameters = 0  # for the report on an out-of-memory error
        self.notes = list(config.notes)
        self.lines: list[str] = []
        self.starting = ExitStack()  # contexts that `prepare` closes
        self.adapter: Any = None  # the LoRA adapter that is trained
        self.length: Any = None  # a RunLength, once the data is known
        self.compilation: str | None = None  # the value that torch_compile = auto has chosen, and why
        self.model_configuration: Any = None
        self.data: Any = None  # a TaskData, once the loop begins
        self.warmup: Any = None  # sequence-length warm-up; None: all rows at full length
        self.state = RunState()
        self.stop_reason = StopReason.NONE
        self.anomaly: Anomaly | None = None
        self.schedule: Any = None  # (update, from 0) -> its learning rate; None without training
        self._totals: Totals | None = None  # totals of the current or next global batch; None: unknown, or skipped
        self._following: list[Batch] | None = None  # the micro-batches of the next update, once they are loaded
        self._now = Progress()
        self._has_stepped = False  # True once the optimizer has its state in this launch
        self.seconds: float | None = None  # duration of the loop, once it has ended

    @classmethod
    def open(cls, start: "Start") -> "Run":
        """Resolve the recipe, the strategy and an earlier run to resume, and lock the output folder. Raises UserError:
        any mistake that can be found before data is read."""
        stored = None
        mirror = None
        task = start.task
        start.timeline.mark("imports")
        if not start.recipe.trains:
            stored = StoredModel.open(task, start.recipe)
        elif start.recipe.mirror and not os.environ.get(MEASURE_VARIABLE):
            start.watchdog.phase("mirror", patience=math.inf)
            folder = RunFolder(start.output_folder)
            opened = start.ranks.first_on_rank_0("mirror", lambda: open_mirror(start.recipe, folder))
            mirror, notes = opened or (None, [])
            log_lines(*notes)
        run = cls(resolve(task, start.recipe if stored is None else stored.recipe), start, stored, mirror)
        if run.is_main:
            run.folder.lock()
        repository = run.recipe.push_to_hub
        if repository and run.recipe.trains and run.measurement is None:
            run.watchdog.phase("hub", patience=math.inf)
            run.hub = run.ranks.first_on_rank_0("hub", partial(HubRepository, repository))
        EXIT.explain = run.explain
        run.watchdog.phase("data", patience=math.inf)
        run.timeline.mark("checks")
        return run

    # ----------------------------------------------------------------------------------------- before the first update

    def model_config(self, auto_class: Any) -> Any:
        """Read and check the model's configuration. `auto_class`: the class of transformers that the task builds the
        model with. Raises UserError: no such model; the strategy cannot split it; too few positions; no GPU."""
        config = self.model_configuration = check_model(self.task, self.recipe, self.strategy, auto_class)
        precision, warning = safe_precision(self.strategy, config)  # some models give NaN in fp16
        self.strategy = self.strategy.with_precision(precision)
        if self.recipe.precision:
            self.recipe.precision = precision
        self.strategy.check_precision()
        self.log_at_start(warning)
        if self.stored is not None:
            return self.stored.configuration(config)
        if self.config.adapter is not None:
            config = trained_config(self.config.adapter, config, self.recipe.config_overrides)
        return config

    def start(self, data: TaskData) -> None:
        """Fix the number of updates, and start the ranks' process group: not before, since reading data may take long.
        Raises UserError: there are fewer samples than one global batch takes; machines differ."""
        recipe = self.recipe
        self.timeline.mark("data")
        self.by_tokens = updates_by_tokens(data.train, recipe.row_tokens, recipe.global_batch_size, recipe.seed)
        if recipe.trains:
            num_samples = data.samples_per_epoch
            if self.measurement:
                num_samples = max(num_samples, self.strategy.batches.global_batch)  # small data is repeated
            self.length = run_length(recipe, num_samples, self.strategy.batches, self.by_tokens)
            if warmup := getattr(recipe, "block_size_warmup", None):
                source = recipe.source("block_size_warmup")
                assert isinstance(data, TextData), "an option of causal tasks"
                self.warmup = length_warmup(warmup, source, data.block_size, data.is_chat)
        self.accelerator, notes = open_process_group(self)
        self.notes += notes
        if self.measurement:
            self.measurement.limit_memory(self.accelerator)
        self.timeline.mark("process group")

    @property
    def num_updates(self) -> int:
        return self.length.num_updates if self.length else 0

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def is_main(self) -> bool:
        return self.strategy.layout.is_main

    @property
    def stopped(self) -> bool:
        """True if training stopped before its end (or was only measured), and nothing is exported."""
        return self.stop_reason is not StopReason.NONE or self.measurement is not None

    def log_lines(self, *lines: str) -> None:
        """Print lines, on the main process."""
        log_lines(*lines, main=self.is_main)

    def log_at_start(self, *lines: str | None) -> None:
        """Keep lines for `log_start`; None is ignored."""
        self.lines += [line for line in lines if line]

    def prepare(self, model: Any, optimizer: Any, schedule: Callable[[int], float] | LambdaLR | None) -> Engine:
        """Let the strategy wrap, shard and place the model and its optimizer.

        Args:
            optimizer: from make_optimizer, or any torch optimizer over the model's parameters. Without training it and
                `schedule` are None.
            schedule: (update, counted from 0) -> its learning rate: a Schedule, any function, or a LambdaLR.
        """
        recipe = self.recipe
        strategy = self.strategy
        if isinstance(schedule, LambdaLR):
            schedule = rates_of(schedule)
        if schedule is not None and not callable(schedule):
            raise UserError(f"the schedule is a {type(schedule).__name__}: give a function, (update) -> learning rate")
        check_own(optimizer, strategy)
        if isinstance(optimizer, torch.optim.Optimizer):
            self.notes += filter(None, [keep_group_rates(optimizer, recipe, schedule)])
        self.timeline.mark("model")
        self.watchdog.phase("prepare", patience=LONG_PATIENCE)
        self.notes += self.stored.notes if self.stored else ()
        if not recipe.model_name_or_path:
            self.notes += filter(None, [strategy.sharded_init_reason(self.parameters)])
        if dropped := getattr(model, "dropped_settings", None):
            settings = ", ".join(f"{name} = {value!r}" for name, value in dropped.items())
            self.notes.append(f"generation settings that transformers refuses to save are dropped: {settings}")
        compiles = recipe.compiles
        self.notes += prepare_activations(model, recipe, self.device, falls_back=bool(self.compilation))
        if compiles and not recipe.compiles:
            self.compilation = "auto: false, the model's code names no blocks"
        if recipe.trains:
            self.notes += filter(None, [without_mfu(self.device, strategy.precision)])
        self.parameters, self.trainable = count_parameters(whole_model(model))
        self.engine = prepare_engine(strategy, self.accelerator, model, recipe, optimizer)
        self.schedule = schedule
        self.starting.close()
        if isinstance(schedule, Schedule) and schedule.warning:
            self.log_lines(f"warning: {schedule.warning}")
        self.engine.alive = self.watchdog.alive
        self.counters = [counter for counter in [getattr(model, "routing", None)] if counter is not None]
        if self.counters:
            self.log_at_start(*self.counters[0].describe(strategy.autocasts and not recipe.lora))
        set_seed(recipe.seed, device_specific=True)  # for draws outside updates: each update seeds its own dropout
        self.timeline.mark("preparing the model")
        return self.engine

    def log_start(self, data: TaskData) -> None:
        """Log what is about to happen: the model, the strategy, the data, and what was noted."""
        self.log_lines(*describe_run(self, data))

    # -------------------------------------------------------------------------------------------------------- the loop

    def updates(
        self,
        data: TaskData,
        collate: Callable[[list[Any]], Any],
        *,
        figures: Sequence[str] = ("loss", "perplexity"),
        unit: str = "token",
        counter: Any = None,
        evaluate_first: Callable[[], dict[str, float]] | None = None,
    ) -> Iterator[Update]:
        """Yield the remaining updates, until the last or until there is a reason to stop (`stop_reason`).

        The script computes each update. Meanwhile `bounds` loads the next one and makes this rank's report, which
        `engine.step` exchanges with the loss, and `log` reads. After the yield the record is written.
        The samples of update k are the same under every strategy, whatever the number of processes and micro-batches.
        Raises UserError: there is no such figure as metric_for_best_model; the folder holds another run.

        Args:
            data: what the task has prepared. Samples of your own: a SampleSet (data/pack.py) as its `train`.
            collate: samples -> Batch.
            figures: the names of the held-out figures, without their `eval_`; the first tells which evaluation is the
                best, unless the recipe names another.
            unit: what the loss is a mean over ("token", "example"), for the label of the loss plot's axis.
            counter: a loss that reports figures of its own (PreferenceLoss), instead of the experts' routers.
            evaluate_first: () -> the held-out figures; called before the first update, with `eval_on_start`.
        """
        self.data = data
        self.collate = collate
        self.figures = tuple(figures)
        self.unit = unit
        self.counters = [counter] if counter is not None else self.counters
        if self.measurement:
            yield from self.measurement.updates(self, evaluate_first)
            return
        open_record(self)
        self._began = time.perf_counter()
        self._begin(evaluate_first)
        while self.state.updates < self.num_updates and not self.stopped:
            if self.best.is_exhausted:
                worse = counted(self.state.best.worse_in_a_row, "evaluation")
                text = f"update {self.state.updates}: {worse} without a better {self.best.metric}: the end"
                self.recorder.bar.log_lines(text)
                break
            number = self.state.updates + 1
            self._now = now = Progress()
            yield self._next_update(number)
            if now.is_abandoned:
                if not self.stopped:
                    self._begin(evaluate_first)  # from the checkpoint that the run has gone back to
                continue
            if self.state.updates != number:
                raise UserError(f"the loop has not called run.log(update, outcome) for update {number}")
            self._write()
            if now.checkpoint_failed:
                self.checkpoints.writer.wait()
            self.recorder.bar.log_lines(*self.checkpoints.messages(), *self.slow_ranks.messages())
            if now.stop_reason and not self.length.is_last(number):
                self.stop_reason = now.stop_reason
        self.end_loop()

    def _begin(self, evaluate: Callable[[], dict[str, float]] | None) -> None:
        """Start the loop at the next update; evaluate before the first one, if `eval_on_start` is set."""
        state = self.state
        self.detector.begin(state.anomaly_history)
        self.recorder.bar.begin(state.updates)
        if self.recipe.eval_on_start and not state.updates and evaluate is not None and self.data.num_held_out:
            self.begin_evaluation(0)
            figures = evaluate()
            timing = self.end_evaluation(self.data.num_held_out)
            state.held_out_before = state.held_out = figures
            self.throughput.evaluations.append(timing)
            self.recorder.write(UpdateMetrics.of_evaluation(figures, timing))
        self.engine.model.train()
        self.memory.reset()
        self._stream = update_batches(self)
        self._following = None
        self._totals = None

    def _next_update(self, number: int) -> Update:
        """Return the update with its micro-batches, after setting its learning rate and the seed of its dropout."""
        batches = self._following or next(self._stream)
        self._following = None
        if self.profiler:
            self.profiler.begin(number)
        self._now.began = time.perf_counter()
        self.engine.set_learning_rate(self.schedule(number - 1))
        if number in self.state.skipped_updates:
            self._totals = None
            return Update(number, [])
        if self.recipe.record_samples:
            self.recorder.write_samples(number, [index for batch in batches for index in batch.samples])
        torch.manual_seed(dropout_seed(self.recipe.seed, number, self.engine.layout.dropout_seed_key))
        if self._totals is None:  # the ranks have not exchanged them with the update before
            self._totals = Totals(*self.engine.sum_over_replicas(counts_of(batches)))
        for counter in self.counters:
            counter.begin(self._totals.targets, self._totals.tokens)
        # Engines average gradients over the replicas: with this scale they are those of the mean over all targets.
        scale = self.engine.layout.data_size / (self._totals.targets or 1.0)
        return Update(number, batches, self._totals, scale)

    def end_loop(self) -> None:
        """Write the rest of the record, and wait for the checkpoints. Further calls do nothing."""
        if self.seconds is None:
            self._write()
            self.recorder.bar.close()
            self.enter("save", self.state.updates)
            self.checkpoints.finish(after_anomaly=self.stop_reason is StopReason.ANOMALY)
            self.seconds = time.perf_counter() - self._began

    def bounds(self) -> Bounds:
        """Return the limits of the update's loss and gradient norm (see AnomalyDetector), with this rank's report. It
        also fetches the next update's micro-batches, while the device still computes."""
        if self.measurement:
            return self.measurement.bounds()
        if self._totals is None:  # this update is skipped
            return Bounds()
        self.enter_part("data")
        self._following = self._following or next(self._stream, None)
        self.enter_part("update")
        report = RankReport(
            peak_memory_bytes=float(self.memory.peak_bytes()),
            stop_reason=float(self.shutdown.reason()),
            checkpoint_is_due=float(self.checkpoints.is_due_by_clock()),
            checkpoint_failed=float(self.checkpoints.writer.has_failed),
            seconds=self.clock.latest,
            next_counts=counts_of(self._following) if self._following else (),
        )
        self.memory.reset()
        return replace(self.detector.bounds(self._totals.targets or 1.0), report=report.numbers())

    def log(self, update: Update, outcome: Outcome, own: Mapping[str, float] | None = None) -> None:
        """Record an update for metrics.jsonl, the terminal and trackers. Its line is written when the next update
        begins, or at `save`, so that it can have the figures of an evaluation too. If the update was refused, do what
        `on_anomaly` says: stop, skip it, or rewind to the last checkpoint.

        Args:
            own: {name: figure} that the script adds to the record, the terminal and trackers; those of rank 0 count.
        """
        if self.measurement:
            self.measurement.log(update, outcome)
            return
        number = update.number
        state = self.state
        totals = update.totals
        now = self._now
        figures: dict[str, Any] = {}
        anomaly = None
        if not outcome.skipped:
            figures, anomaly = self._read(update, outcome)
        seconds = time.perf_counter() - now.began
        if self.profiler:
            self.profiler.end(number, bool(now.stop_reason))
        state.anomalies_in_a_row = state.anomalies_in_a_row + 1 if anomaly else 0
        if anomaly is not None:
            action = self.recipe.on_anomaly
            self.recorder.write_anomaly(anomaly, action)
            self.recorder.bar.log_lines(f"anomaly   update {number}: {anomaly.reason}. {ANOMALY_ACTIONS[action]}")
            now.is_abandoned = self.checkpoints.rewind(anomaly)
            if not now.is_abandoned and (action != "skip" or state.anomalies_in_a_row >= MAX_IN_A_ROW):
                self.stop_reason = StopReason.ANOMALY
                self.anomaly = anomaly
                now.is_abandoned = True
        if now.is_abandoned:
            return
        state.updates = number
        state.tokens = state.tokens + totals.tokens
        state.positions = state.positions + totals.positions
        consumed = self.length.consumed(number)
        if not outcome.skipped:
            samples = consumed - self.length.consumed(number - 1)
            rates = self.throughput.rates_of(int(totals.tokens), samples, seconds)
            figures |= {
                **rates,
                "targets": int(totals.targets) if totals.targets.is_integer() else round(totals.targets, 6),
                "tokens": int(totals.tokens),
                "padding": 1.0 - totals.tokens / totals.positions,
                "seconds": seconds,
            }
        now.metrics = UpdateMetrics(
            update=number,
            epoch=self.length.epoch(number),
            consumed_samples=consumed,
            learning_rate=self.engine.learning_rate,
            anomaly=anomaly.reason if anomaly else None,
            skipped=outcome.skipped or None,
            own=own and {name: number_of(name, figure) for name, figure in own.items()},
            **figures,
        )
        self._evaluation_began = time.perf_counter()  # for a script that evaluates when none is due

    def _read(self, update: Update, outcome: Outcome) -> tuple[dict[str, Any], Anomaly | None]:
        """Wait for the device, and read the reports that the ranks exchanged with the loss of an update. Returns (its
        figures, its anomaly or None)."""
        number = update.number
        now = self._now
        targets = update.totals.targets
        if not all(outcome.ranks):
            raise UserError("engine.step got bounds without the ranks' reports: give it run.bounds()")
        reports = [RankReport.of_numbers(numbers) for numbers in outcome.ranks]  # waits for the device
        self.clock.finish_update(int(counts_of(update.micro_batches)[2]))
        now.stop_reason = StopReason(int(max(report.stop_reason for report in reports)))
        now.checkpoint_is_due = any(report.checkpoint_is_due for report in reports)
        now.checkpoint_failed = any(report.checkpoint_failed for report in reports)
        counts = [reports[rank].next_counts for rank in self.engine.layout.loss_ranks]
        self._totals = Totals(*map(sum, zip(*counts))) if self._following else None
        figures: dict[str, Any] = {"loss": outcome.loss_sum / (targets or 1.0), "grad_norm": outcome.grad_norm}
        reason = self.detector.record(figures, outcome.refused)
        figures["peak_memory_bytes"] = int(max(report.peak_memory_bytes for report in reports))
        losses = [float(loss) for loss in outcome.losses] if reason else []  # copied from the device if needed
        anomaly = Anomaly(number, reason, {**figures}, update.micro_batches, losses) if reason else None
        for counter in self.counters:
            sums = self.engine.sum_over_replicas(counter.sums)
            figures |= counter.figures(sums, targets, update.totals.tokens)._asdict()
        figures["rank_seconds"] = self.slow_ranks.add(number, [report.seconds for report in reports])
        if not self._has_stepped and not outcome.refused and math.isfinite(outcome.grad_norm):
            self._has_stepped = True
            gc.collect()
            gc.freeze()  # a collection would scan these objects for 0.3 to 0.5 s, while other ranks wait
            if self.recipe.save_strategy != "no" and self.recipe.optim == "adamw":
                check_kept(self.engine.torch_optimizer)
        return figures, anomaly

    def should_evaluate(self, update: Update) -> bool:
        """Return True if an evaluation is due after this update. If so, its time begins."""
        steps = self.recipe.eval_steps
        strategy = None if steps else "epoch"
        is_due = self.length.is_last(update.number) or self.length.is_due(strategy, steps, update.number)
        if self._now.is_abandoned or self.measurement or not self.data.num_held_out or not is_due:
            return False
        self.begin_evaluation(update.number)
        return True

    def log_held_out(self, update: Update, figures: dict[str, float]) -> None:
        """Record the held-out figures of an evaluation after this update, such as `eval_loss`. Raises UserError: the
        figure that decides which weights are best is missing; run.log was not called before."""
        if self._now.is_abandoned or self.measurement:
            return
        if self._now.metrics is None:
            raise UserError("run.log_held_out belongs between run.log, which begins the update's line, and run.save")
        if f"eval_{self.best.metric}" not in figures:
            names = ", ".join(figures) or "none"
            raise UserError(f"run.log_held_out needs eval_{self.best.metric}, and the figures are: {names}")
        timing = self.end_evaluation(self.data.num_held_out)
        self.state.held_out = figures
        self.throughput.evaluations.append(timing)
        self.recorder.show_held_out(update.number, figures)
        self.memory.reset()
        self._now.held_out = figures
        self._now.is_best = self.best.record_evaluation(update.number, figures) and self.best.keeps
        self._now.metrics = replace(
            self._now.metrics,
            held_out=figures,
            evaluation_seconds=timing.seconds,
            evaluation_samples_per_s=timing.samples_per_s,
        )

    def should_save(self, update: Update) -> bool:
        """Return True if a checkpoint is due after this update: by the recipe, by the clock, since the run is about
        to stop, or because its weights are the best so far."""
        if self._now.is_abandoned or self.measurement:
            return False
        return bool(self._why_save(update.number) or self._now.is_best)

    def save(self, update: Update) -> None:
        """Start a checkpoint, even if none is due; it is written while training continues."""
        if self.state.updates < update.number and not self._now.is_abandoned:
            raise UserError("run.save stands before run.log, which counts the update: save after it")
        reason = self._why_save(update.number) or (None if self._now.is_best else SaveReason.REQUESTED)
        self._write()
        self.enter("save", update.number)
        self.checkpoints.save(reason, self._now.is_best, self._now.held_out)
        self.memory.reset()

    def begin_evaluation(self, update: int) -> None:
        """Start the clock of an evaluation, after the device has finished the update."""
        self.enter("evaluate", update)
        synchronise(self.engine.device)
        self._evaluation_began = time.perf_counter()

    def end_evaluation(self, num_samples: int) -> EvaluationTime:
        """Return the time of the evaluation on the slowest rank, including generation and predictions.jsonl."""
        synchronise(self.engine.device)
        seconds_of_rank = time.perf_counter() - self._evaluation_began
        seconds = max(rank_seconds for (rank_seconds,) in self.engine.per_rank([seconds_of_rank]))
        return EvaluationTime(seconds, num_samples / seconds)

    def _write(self) -> None:
        """Write the line of the latest update, if it is not written yet."""
        if self._now.metrics is not None:
            self.recorder.write(self._now.metrics)
            self.recorder.show(self._now.metrics)
            self._now.metrics = None

    def _why_save(self, update: int) -> SaveReason | None:
        if self.length.is_due(self.recipe.save_strategy, self.recipe.save_steps, update):
            return SaveReason.REQUESTED
        if self.length.is_last(update):  # the last update's weights are exported
            return None
        if self._now.stop_reason:
            return SaveReason.BEFORE_EXIT
        return SaveReason.BY_CLOCK if self._now.checkpoint_is_due else None

    # --------------------------------------------------------------------------------------------- phases and failures

    def enter(self, phase: str, update: int) -> None:
        """Report the phase of the loop to the watchdog."""
        self.watchdog.phase(phase, update or None, patience=SAVING_PATIENCE if phase == "save" else 1.0)

    def enter_part(self, phase: str) -> None:
        """Report to the watchdog and the clock which part of an update begins: forward, backward, data or update."""
        self.clock.phase(phase)
        self.enter(phase, self.state.updates + 1)

    def explain(self, error: Exception) -> int | None:
        """Explain an out-of-memory error or a dead process. Returns the exit code; None: another error."""
        if self.measurement and (code := self.measurement.explain(error, self.watchdog.at[0])) is not None:
            return code
        return explain_failure(error, self)

    # Afterwards (export.py)
    export = export_run
    finish = finish_run
    answer = answer_held_out
