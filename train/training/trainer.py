"""The life of a run around the loop, the same for every task: process group, model, record, export."""

import logging
import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

from train.checkpoint.exporter import ModelExporter
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.resume import fingerprint
from train.checkpoint.run_state import RunState
from train.health.anomaly import AnomalyDetector
from train.health.failure import explain_failure
from train.health.out_of_memory import host_advice, resident_bytes
from train.health.shutdown import ShutdownHandler, StopReason
from train.health.watchdog import Watchdog
from train.recipe.errors import UserError, explain_failures_with
from train.recipe.last_message import print_last
from train.recipe.options import TrainingRecipe
from train.recipe.schedule import make_schedule
from train.record.environment import describe_environment
from train.record.meters import MemoryMeter
from train.record.plot import plot_run
from train.record.recorder import RunRecorder
from train.record.terminal import Bar, say
from train.record.timeline import Timeline
from train.record.trackers import start_trackers
from train.strategy.deepspeed_schedule import with_schedule
from train.strategy.gpus import describe_device
from train.strategy.machines import check_same
from train.strategy.processes import COLLECTIVE_TIMEOUT, start_processes
from train.training.best_metric import make_best_tracker
from train.training.configuration import check_model, resolve
from train.training.length import run_length
from train.training.loop import Run, train
from train.training.machine_checks import check_machines, check_output_folder
from train.training.rank_meeting import MEETING
from train.training.step import Signals, TrainStep
from train.training.summary import about_the_model, compiled, summary, why_stopped
from train.training.task import Task

LONG = 12.0  # times watchdog_minutes: reading, placing or writing a whole model
PATIENCE = {"save": 4.0}  # the same, of the loop's phases


class Trainer:
    """One run of one task. Its methods are called in the order in which they stand here."""

    def __init__(self, task: str, recipe: TrainingRecipe, timeline: Timeline, watchdog: Watchdog):
        """Resolve the configuration, and see that the output folder is free.

        Raises:
            UserError: anything that can be found wrong before data is read.
        """
        self.task_name, self.timeline, self.watchdog = task, timeline, watchdog
        self.adapter, self.checkpoints, self.engine = None, None, None
        self.row_tokens, self.program_bytes, self.parameters = None, 0, 0
        self.config = resolve(task, recipe)
        self.recipe, self.strategy, self.folder = self.config.recipe, self.config.strategy, self.config.folder
        self.notes = list(self.config.notes)
        self.is_main = self.strategy.layout.is_main
        if self.is_main:
            self.folder.lock()
        self.shutdown = ShutdownHandler(recipe.max_hours, timeline.started, watchdog.told)
        explain_failures_with(self._explain)
        self.watchdog.phase("data", patience=math.inf)
        timeline.mark("checks")

    def say(self, *lines: str) -> None:
        say(*lines, main=self.is_main)

    def configuration(self, auto_class):
        """The configuration of the model, which the task needs an `auto_class` of transformers for.

        Raises:
            UserError: there is no such model, the strategy cannot split it, or it has too few positions.
        """
        return check_model(self.task_name, self.recipe, self.strategy, auto_class)

    def use_precision(self, precision: str, warning: str | None) -> str | None:
        """Train in a precision that suits the model better than the one that was asked for. Returns the warning."""
        self.strategy = self.strategy.with_precision(precision)
        return warning

    def plan(self, num_samples: int) -> None:
        """Fix the length of the run and its schedule.

        Raises:
            UserError: there are fewer samples than one global batch takes; DeepSpeed's schedule is not the recipe's.
        """
        sizes = self.strategy.batches
        if num_samples < sizes.global_batch:
            raise UserError(
                f"the training data gives {num_samples} samples, fewer than one global batch of {sizes.global_batch} "
                f"= {sizes.micro_batch} x {sizes.accumulation} x {sizes.replicas} (per_device_train_batch_size x "
                "accumulation x processes). Make the batch smaller, or train on more data (or, of text, on a shorter "
                "block_size)"
            )
        self.length = run_length(self.recipe, num_samples, sizes)
        self.schedule, warnings = make_schedule(self.recipe, self.length.num_updates)
        self.say(*(f"warning: {warning}" for warning in warnings))
        self.strategy, notes = with_schedule(self.strategy, self.recipe, self.schedule)
        self.notes += notes

    def start_processes(self):
        """The Accelerator, its process group running."""
        if not (self.is_main and sys.stderr.isatty()):
            from transformers.utils.logging import disable_progress_bar

            disable_progress_bar()
        # Rows are packed full or come with their mask; transformers cannot know, and asks for one at every run.
        logging.getLogger("transformers.modeling_utils").addFilter(
            lambda line: "attention_mask" not in line.getMessage()
        )
        self.watchdog.phase("rendezvous", patience=math.inf)
        self.notes += MEETING.wait()
        self.watchdog.phase("process group", patience=2.0)
        silence = timedelta(minutes=self.recipe.watchdog_minutes)
        self.accelerator, notes = start_processes(
            self.strategy,
            max(COLLECTIVE_TIMEOUT, 2 * LONG * silence),  # the watchdog is to speak first
            log_with=list(self.config.trackers) or None,
            project_dir=str(self.folder.path),
        )
        self.notes += notes
        self.program_bytes = resident_bytes()
        self.watchdog.phase("load", patience=LONG)
        check_machines(self.config)
        self.timeline.mark("process group")
        return self.accelerator

    def load(self, auto_class, config, ignored_weights: Sequence[str] = ()):
        """The model, see build_model for the arguments. Its size is known before: loading may take all memory."""
        from train.model.load import build_model, size_of_model

        self.parameters = size_of_model(auto_class, config, self.strategy, self.recipe.trust_remote_code)
        self.advise()
        if not self.recipe.model_name_or_path:
            self.notes += filter(None, [self.strategy.drawn_sharded(self.parameters)])
        return build_model(
            auto_class, config, self.recipe, self.strategy, self.recipe.seed, ignored_weights, self.parameters
        )

    def advise(self, copied: int = 0) -> None:
        """Tell the watchdog what would help from here on, should this rank be killed for want of host memory.

        Args:
            copied: bytes of the copies that checkpoints are written from.
        """
        self.watchdog.advise(
            host_advice(self.recipe, self.strategy, self.engine, self.row_tokens, parameters=self.parameters,
                        copied=copied)
        )  # fmt: skip

    def add_adapter(self, model) -> None:
        """Freeze the model and put a LoRA adapter into it, where the recipe asks for one.

        Raises:
            UserError: the modules that it names are not in the model.
        """
        from train.model.lora import add_adapter

        self.adapter = add_adapter(model, self.recipe, self.task_name, self.strategy)

    def prepare(self, model):
        """Shard and place the model under the strategy; the engine that the loop will drive."""
        from accelerate.utils import set_seed
        from transformers.utils.logging import disable_progress_bar

        from train.model.parameters import count_parameters
        from train.model.stages import whole_model
        from train.strategy.prepare import prepare_engine
        from train.training.passes import prepare_passes

        recipe = self.recipe
        disable_progress_bar()  # of "Writing model shards"; weights are loaded by now
        self.watchdog.phase("prepare", patience=LONG)
        self.notes += prepare_passes(model, recipe, self.accelerator.device)
        self.parameters, self.trainable = count_parameters(whole_model(model))
        self.engine = prepare_engine(self.strategy, self.accelerator, model, recipe, self.schedule)
        self.engine.alive = self.watchdog.alive
        set_seed(recipe.seed, device_specific=True)  # dropout: the same in every run, another on every rank
        self.timeline.mark("preparing the model")
        return self.engine

    def announce(self, *lines: str) -> None:
        """Say what is about to happen: the model, the strategy, and what the task has to say."""
        warmup = f", {self.schedule.num_warmup} warm-up" if self.schedule.num_warmup else ""
        recipe, length = self.recipe, self.length
        self.say(
            *about_the_model(recipe, self.parameters, self.trainable, self.adapter),
            f"strategy  {self.strategy.describe}",
            f"device    {describe_device(self.engine.device)}",
            *lines,
            f"run       {length.describe}; learning rate {recipe.learning_rate:g}, {recipe.lr_scheduler_type}{warmup}",
            f"folder    {self.folder.path}",
            *(f"note      {note}" for note in [*self.strategy.notes, *self.notes]),
        )

    def train(self, task: Task, throughput, tokenizer) -> None:
        """Run the loop and keep its record.

        Raises:
            UserError: there is no such figure as metric_for_best_model; the folder holds another run.
        """
        recipe, engine = self.recipe, self.engine
        self.task, self.throughput, self.state = task, throughput, RunState()
        lengths = task.train_set.lengths
        self.row_tokens = len(task.train_set[0]["input_ids"]) if lengths is None else int(lengths.max())
        self.advise()
        self.best = make_best_tracker(recipe, task.figures, task.evaluate is not None, self.state.best)
        self.environment = describe_environment(self.strategy.launch.command, engine.device) if self.is_main else {}
        self.exporter = ModelExporter(engine, self.adapter, tokenizer, self.task_name, recipe, self.environment)
        self.checkpoints = self._resume()
        note = start_trackers(self.accelerator, self.config.trackers, recipe, self.folder, self.task_name, self.state)
        self.say(*([f"note      {note}"] if note else []))
        self.shutdown.install()
        self.checkpoints.start()
        run = self._run(tokenizer)
        frozen, began = engine.frozen_checksum(), time.perf_counter()
        self.result = train(run)
        run.recorder.close()
        self._phase("save", self.state.updates)
        self.checkpoints.finish(after_anomaly=self.result.reason is StopReason.ANOMALY)
        if engine.frozen_checksum() != frozen:
            raise RuntimeError("weights that are frozen have changed during the run")
        self.seconds = time.perf_counter() - began

    def _resume(self) -> CheckpointManager:
        """The run's checkpoints, and its record in the folder, from the update on that it resumes at."""
        launch, engine, task = self.strategy.launch, self.engine, self.task
        data = fingerprint(task.train_set, task.grouping)
        check_same({"training data": data}, "Give all machines the same data and the same packages")
        run = {
            **self.config.resume.identity, "num_processes": launch.world_size,
            "data_parallel": engine.layout.data_size, "options_given_for": self.config.options_given_for,
            "strategy": self.strategy.name,
        }  # fmt: skip
        checkpoints = CheckpointManager(
            self.folder, engine, self.recipe, self.state, self.exporter, run, data, self.best.keeps, self.advise
        )
        checkpoints.resume(self.config.resume)
        if self.is_main:
            checkpoints.drop_replaced()
            notes = self.folder.start(
                self.recipe, self.strategy.batches.global_batch,
                {**engine.effective_strategy(), "options_given_for": self.config.options_given_for}, self.environment,
                self.state.updates, checkpoints.resumed_from,
            )  # fmt: skip
            self.say(*(f"note      {note}" for note in notes))
        check_output_folder(self.config, engine)
        checkpoints.restore_best_checkpoint()
        return checkpoints

    def _run(self, tokenizer) -> Run:
        """The parts that the loop works with, at the update that the state is at."""
        recipe, engine, task, state = self.recipe, self.engine, self.task, self.state
        memory = MemoryMeter(engine.device)
        scaled = self.strategy.precision == "fp16"
        detector = AnomalyDetector(recipe.spike_threshold, recipe.max_grad_norm > 0, scaled)
        writer = self.checkpoints.writer

        def signals() -> Signals:
            return Signals(self.shutdown.reason(), self.checkpoints.is_due_by_clock(), writer.has_failed)

        def preview_sample(index: int) -> str:
            return tokenizer.decode(task.train_set[index]["input_ids"])

        bar = Bar(self.length.num_updates, recipe.logging_steps, self.is_main)
        recorder = RunRecorder(self.folder, engine, self.environment, self.timeline, bar, preview_sample)
        step = TrainStep(task, engine, detector, memory, signals, self._phase)
        return Run(
            task, engine, self.length, state, step, self.checkpoints, recorder, self.best, self.throughput, memory,
            self._phase,
        )  # fmt: skip

    def _phase(self, name: str, update: int) -> None:
        self.watchdog.phase(name, update or None, patience=PATIENCE.get(name, 1.0))

    def _explain(self, error: Exception) -> int | None:
        """Tell of memory that ran out, and of a process that is gone; of any other error nothing is known here."""
        return explain_failure(
            error, self.watchdog.at, MEETING.named, recipe=self.recipe, strategy=self.strategy, engine=self.engine,
            row_tokens=self.row_tokens, program_bytes=self.program_bytes, parameters=self.parameters,
            copied=self.checkpoints.writer.bytes_of_copies if self.checkpoints else 0,
        )  # fmt: skip

    @property
    def stopped(self) -> bool:
        """Whether training stopped before its end, and nothing is exported."""
        return self.result.reason is not StopReason.NONE

    def export(self) -> None:
        """Write the model, draw the curve, and say what came of the run; of one that stopped early, where it is."""
        if self.stopped:
            self.watchdog.phase("leave", patience=math.inf)
            why = why_stopped(
                self.result, self.length.num_updates, self.state, self.checkpoints, self.recipe.on_anomaly
            )
            if self.is_main:
                print_last("\n".join(["", *why]), after_signal=self.result.reason.is_signal, file=sys.stdout)
            return
        self.watchdog.phase("export", patience=LONG)
        loads_best = self.best.loads and self.state.best.update is not None
        weights = () if loads_best else self.exporter.weights()
        if not self.is_main:
            deque(weights, maxlen=0)  # takes part in gathering them
            return
        task, best = self.task, self.checkpoints.directory.best
        with self.folder.writing():
            self.folder.metrics.close()
            for file in best.glob("predictions*.jsonl") if loads_best else ():  # of the model that is exported
                with self.folder.new_file(file.name, "wb") as written:
                    written.write(file.read_bytes())
            with self.folder.new_model() as place:
                if loads_best:
                    shutil.copytree(best / "model", place, dirs_exist_ok=True)
                else:
                    self.exporter.write(weights, self.state.held_out, place)
            with self.folder.new_file("loss.png", "wb") as picture:
                plot_run(self.folder.metrics.read(), picture, self.folder.path.name, task.unit, task.figures[0])
        figures = self.state.best.figures if loads_best else self.state.held_out
        updates = self.state.best.update if loads_best else self.state.updates
        self.environment["held_out"] = {"update": updates, **figures} if figures else {}
        made = self.state.updates - self.checkpoints.resumed_at
        self.say("", *summary(
            self.state, made, self.seconds, self.throughput, self.checkpoints.writer.records, self.best,
            self.adapter is not None, task.remarks() if figures else [],
        ), *([compiled()] if self.recipe.torch_compile else []))  # fmt: skip

    def close(self) -> int:
        """Say where everything lies, and leave the process group. Returns the exit code."""
        code = self.result.reason.exit_code(self.checkpoints.saved_latest)
        if self.is_main:
            self.environment |= {"checkpoints": self.checkpoints.writer.records, "finished": not self.stopped}
            self.environment |= {"exit_code": code}  # accelerate launch makes 1 of any other than 0
            with self.folder.writing():
                self.folder.write_environment(self.environment)
        if not self.stopped:
            self.say(f"run folder  {self.folder.path}  (loss.png, metrics.jsonl, model/)")
        self.engine.close()
        return code
