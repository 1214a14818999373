"""The life of a run around the loop, the same for every task: checks on paper, process group, record, export."""

import logging
import math
import os
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from train.recipe.errors import UserError, before_leaving, explain_failures_with, first_line
from train.recipe.files import appears, is_there
from train.recipe.options import TrainingRecipe
from train.recipe.paths import check_paths
from train.recipe.repeat import repeat_after_launcher
from train.run.folder import RunFolder, describe_environment
from train.run.progress import duration, rounded, say
from train.run.schedule import make_schedule
from train.run.stopping import FAULT, SIGNALS, Stop, exit_code
from train.run.timeline import Timeline
from train.run.witness import Witness, died_elsewhere
from train.strategy.gpus import describe_device
from train.strategy.machines import SHARED_REMEDY, check_same
from train.strategy.strategy import COLLECTIVE_TIMEOUT, Strategy, read_strategy

EXIT_OTHER_DIED = 1  # whoever died first has the cause
LONG = 12.0  # times watchdog_minutes: reading, placing or writing a whole model


def open_session(task: str, recipe: TrainingRecipe, timeline: Timeline) -> "Session":
    """The session of a run, or of a trial or a launch without training where the recipe says that it is one.

    Raises:
        UserError: anything that can be found wrong before data is read. What is missing on the disk is told at once,
            before torch is imported.
    """
    check_paths(recipe, output_folder(task, recipe))
    if recipe.trial:
        from train.limits.trial import TrialSession

        return TrialSession(task, recipe, timeline)
    if not recipe.trains:
        from train.run.answering import AnsweringSession

        return AnsweringSession(task, recipe, timeline)
    return Session(task, recipe, timeline)


def output_folder(task: str, recipe: TrainingRecipe) -> Path:
    """The run's folder; where nobody names one it is called after the recipe's file, or the task."""
    source = recipe.source("config")
    return Path(recipe.output_dir or Path("outputs") / (Path(source).stem if source else task))


class Session:
    """One run of one task. Its methods are called in the order in which they stand here."""

    def __init__(self, task: str, recipe: TrainingRecipe, timeline: Timeline):
        """Settle recipe and strategy against each other, and see that the output folder is free.

        Raises:
            UserError: anything that can be found wrong before data is read.
        """
        self.task, self.recipe, self.timeline = task, recipe, timeline
        self.witness = Witness(int(os.environ.get("RANK", "0")), 60 * recipe.watchdog_minutes or None)
        self.witness.start()
        before_leaving(self.witness.leave)
        from train.run.resuming import Origin

        self.folder = RunFolder(output_folder(task, recipe))
        self.origin = Origin(recipe, self.folder, int(os.environ.get("WORLD_SIZE", "1")))
        self.strategy: Strategy = read_strategy(recipe)
        if task != "seq2seq":  # that one takes bf16 in place of fp16 for some models
            self.strategy.check_precision()
        self.strategy.notes += self.origin.settle(self.strategy.batches.global_batch)
        self.main = self.strategy.launch.rank == 0
        if self.main:
            self.folder.lock()
            self.folder.forget_the_end()
        self.adapter, self.keeper = None, None
        minutes = 0.0 if recipe.save_strategy == "no" or recipe.save_only_model else recipe.save_minutes
        self.stop = Stop(recipe.max_hours, minutes, timeline.started, self.witness.told)
        if recipe.quantised:
            from train.model.lora import check_quantisation

            check_quantisation(recipe, self.strategy)
        from train.run.trackers import wanted_trackers

        self.trackers = wanted_trackers(recipe)
        self.engine, self.row_tokens, self.program_bytes, self.parameters = None, None, 0, 0
        self.stopped = 0
        explain_failures_with(self._explain)
        self.witness.phase("data", patience=math.inf)
        timeline.mark("checks")

    def say(self, *lines: str) -> None:
        say(*lines, main=self.main)

    def configuration(self, auto_class):
        """The configuration of the model, which the task needs an `auto_class` of transformers for."""
        from train.model.configuration import load_configuration

        return load_configuration(self.recipe, auto_class)

    def plan(self, num_samples: int) -> None:
        """Fix the length of the run and its schedule.

        Raises:
            UserError: there are fewer samples than one global batch takes; DeepSpeed's schedule is not the recipe's.
        """
        from train.run.loop import make_plan
        from train.strategy.deepspeed_json import resolve_scheduler

        size = self.strategy.batches.global_batch
        if num_samples < size:
            raise UserError(
                f"the training data gives {num_samples} samples, fewer than one global batch of {size} = "
                f"{self.strategy.batches.micro_batch} x {self.strategy.batches.accumulation} x "
                f"{self.strategy.batches.world_size} (per_device_train_batch_size x accumulation x processes). "
                "Make the batch smaller, or train on more data (or, of text, on a shorter block_size)"
            )
        self.length = make_plan(self.recipe, num_samples, self.strategy.batches)
        deepspeed, source = self.strategy.deepspeed, self.strategy.source
        if deepspeed is not None:
            from train.run.schedule import warmup_updates

            updates = self.length.num_updates
            warmup = warmup_updates(self.recipe, updates)
            self.strategy.notes += resolve_scheduler(deepspeed, source, self.recipe, updates, warmup)
        self.schedule, warnings = make_schedule(self.recipe, self.length.num_updates)
        for warning in warnings:
            self.say(f"warning: {warning}")
        if deepspeed is not None and "scheduler" in deepspeed:
            from train.strategy.engine import check_deepspeed_schedule

            check_deepspeed_schedule(deepspeed, source, self.schedule)

    def start_processes(self):
        """The Accelerator, its process group running."""
        if not (self.main and sys.stderr.isatty()):
            from transformers.utils.logging import disable_progress_bar

            disable_progress_bar()
        # Rows are packed full or come with their mask; transformers cannot know, and asks for one at every run.
        logging.getLogger("transformers.modeling_utils").addFilter(
            lambda line: "attention_mask" not in line.getMessage()
        )
        self.witness.phase("load", patience=LONG)
        silence = timedelta(minutes=self.recipe.watchdog_minutes)
        self.accelerator = self.strategy.accelerator(
            max(COLLECTIVE_TIMEOUT, 2 * LONG * silence),  # the witness is to speak first
            log_with=self.trackers or None,
            project_dir=str(self.folder.path),
        )
        if self.recipe.dataloader_num_workers is None:
            self.recipe.dataloader_num_workers = 0 if self.accelerator.device.type == "cpu" else 2
        from train.run.memory_report import resident_bytes

        self.program_bytes = resident_bytes()
        self._check_machines()
        self.timeline.mark("process group")
        return self.accelerator

    def _check_machines(self) -> None:
        """See that all ranks train the same run on the same files.

        Raises:
            UserError: one does not; it names the machine.
        """
        from train.data.sources import files_and_sizes
        from train.run.folder import identity

        recipe = self.recipe
        options = identity(recipe, self.strategy.batches.global_batch)
        check_same({f"option {name}": value for name, value in options.items()},
                   "Start all machines with the same recipe and options")  # fmt: skip
        check_same({f"{name} (files and their bytes)": files for name, files in files_and_sizes(recipe).items()},
                   "Copy the data to all machines, or put it where all of them see it")  # fmt: skip
        check_same({f"run to resume in output_dir = {str(self.folder.path)!r}": self.origin.wanted},
                   SHARED_REMEDY)  # fmt: skip

    def _check_output_folder(self) -> None:
        """See that all ranks see the folder into which each of them writes its part of a checkpoint."""
        if self.recipe.save_strategy == "no":
            return
        written = self.folder.path / "recipe.yaml"
        text = self.engine.from_main(written.read_text() if self.main else None)
        seen = appears(lambda: is_there(written) and written.read_text() == text)
        view = f"view of output_dir = {str(self.folder.path)!r}"
        check_same({view: "the run" if seen else "no such run"}, f"{SHARED_REMEDY}, or --save_strategy no")

    def load(self, auto_class, config, left_out: Sequence[str] = ()):
        """The model, see build_model for the arguments. Its size is known before: loading may take all memory."""
        from train.model.load import build_model, size_of_model

        self.parameters = size_of_model(auto_class, config, self.strategy, self.recipe.trust_remote_code)
        self.advise()
        return build_model(auto_class, config, self.recipe, self.strategy, self.recipe.seed, left_out, self.parameters)

    def advise(self, copied: int = 0) -> None:
        """Tell the witness what would help from here on, should this rank be killed for want of host memory.

        Args:
            copied: bytes of the copies that checkpoints are written from.
        """
        from train.run.memory_report import host_advice

        self.witness.advise(
            host_advice(self.recipe, self.strategy, self.engine, self.row_tokens, parameters=self.parameters,
                        copied=copied)
        )  # fmt: skip

    def add_adapter(self, model) -> None:
        """Freeze the model and put a LoRA adapter into it, where the recipe asks for one.

        Raises:
            UserError: the modules that it names are not in the model.
        """
        from train.model.lora import add_adapter

        self.adapter = add_adapter(model, self.recipe, self.task, self.strategy)

    def prepare(self, model):
        """Shard and place the model under the strategy; the engine that the loop will drive."""
        from accelerate.utils import set_seed
        from transformers.utils.logging import disable_progress_bar

        from train.model.parameters import count_parameters
        from train.model.settle import recompute_activations
        from train.strategy.engine import prepare_engine

        recipe = self.recipe
        disable_progress_bar()  # of "Writing model shards"; weights are loaded by now
        self.witness.phase("prepare", patience=LONG)
        if recipe.gradient_checkpointing:
            recompute_activations(model)
        if recipe.torch_compile:
            model.compile()
        self.parameters, self.trainable = count_parameters(model)
        self.engine = prepare_engine(self.strategy, self.accelerator, model, recipe, self.schedule)
        self.engine.alive = self.witness.alive
        set_seed(recipe.seed, device_specific=True)  # dropout: the same in every run, another on every rank
        self.timeline.mark("preparing the model")
        return self.engine

    def announce(self, *lines: str) -> None:
        """Say what is about to happen: the model, the strategy, and what the task has to say."""
        recipe, length = self.recipe, self.length
        origin = recipe.model_name_or_path or f"{recipe.config_name or recipe.model_type} from scratch"
        all_of_them = self.trainable == self.parameters
        share = "all" if all_of_them else f"{self.trainable:,} ({self.trainable / self.parameters:.2%})"
        warmup = f", {self.schedule.num_warmup} warm-up" if self.schedule.num_warmup else ""
        self.say(
            f"model     {origin}: {self.parameters:,} parameters, {share} trained",
            *self._about_the_adapter(),
            f"strategy  {self.strategy.describe}",
            f"device    {describe_device(self.engine.device)}",
            *lines,
            f"run       {length.num_updates:,} updates, {rounded(length.total_samples / length.num_samples)} epochs; "
            f"learning rate {recipe.learning_rate:g}, {recipe.lr_scheduler_type}{warmup}",
            f"folder    {self.folder.path}",
            *(f"note      {note}" for note in self.strategy.notes),
        )

    def _about_the_adapter(self) -> list[str]:
        if not self.adapter:
            return []
        random = (
            ["warning   the frozen weights are random (no model_name_or_path), and the adapter's folder will not have "
             "them: good for measuring only"]
            if not self.recipe.model_name_or_path
            else []
        )  # fmt: skip
        return [f"adapter   {self.adapter.note}", *random]

    def train(self, job, meter, tokenizer) -> dict[str, Any]:
        """Run the loop and keep its record. Returns the loop's results and the seconds it took.

        Raises:
            UserError: there is no such figure as metric_for_best_model.
        """
        from train.run.best import make_best
        from train.run.keeper import Keeper
        from train.run.loop import Hooks, fit
        from train.run.sentinel import Sentinel
        from train.run.trackers import start_trackers

        self.job, self.meter, self.tokenizer = job, meter, tokenizer
        recipe, engine = self.recipe, self.engine
        lengths = job.train_set.lengths
        self.row_tokens = len(job.train_set[0]["input_ids"]) if lengths is None else int(lengths.max())
        self.advise()
        self.best = make_best(recipe, job.figures, job.evaluate is not None)
        self.keeper = keeper = Keeper(self, job, tokenizer, self.best)
        check_same({"training data": keeper.data}, "Give all machines the same data and the same packages")
        keeper.resume()
        if self.main:
            self.environment = describe_environment(self.strategy.launch.command, engine.device)
            effective = engine.effective_strategy()
            size = self.strategy.batches.global_batch
            updates, goes_on_from = keeper.done.updates, keeper.goes_on_from
            self.folder.start(recipe, size, effective, self.environment, updates, goes_on_from)
        self._check_output_folder()
        keeper.bring_the_best()
        note = start_trackers(self.accelerator, self.trackers, recipe, self.folder.path, self.task, keeper.done)
        if note:
            self.say(f"note      {note}")
        self.stop.listen()
        keeper.start()
        record = self._record if recipe.record_samples else None
        hooks = Hooks(self._write, record, self._started, keeper.keep, keeper.fault, self._phase, keeper.saver)
        frozen, began = engine.frozen_checksum(), time.perf_counter()
        while True:
            done, scaled = keeper.done, self.strategy.precision == "fp16"
            sentinel = Sentinel(recipe.spike_threshold, recipe.max_grad_norm > 0, scaled, done.history)
            results = fit(job, engine, self.length, meter, self.best, hooks, done, sentinel, self.stop)
            if results["stopped"] != FAULT or not keeper.rewind():
                break
        self._phase("save", results["updates"])
        keeper.finish(results["stopped"])
        if engine.frozen_checksum() != frozen:
            raise RuntimeError("weights that are frozen have changed during the run")
        self.stopped = results["stopped"]
        return {**results, "seconds": time.perf_counter() - began}

    def _phase(self, name: str, update: int) -> None:
        self.witness.phase(name, update or None, patience=4.0 if name == "save" else 1.0)

    def _explain(self, error: Exception) -> int | None:
        """Tell of memory that ran out, and of a process that is gone; of any other error nothing is known here."""
        from train.run.memory_report import EXIT_OUT_OF_MEMORY, explain, is_out_of_memory

        phase, update = self.witness.at
        rank = self.strategy.launch.rank
        if is_out_of_memory(error):
            if phase == "forward" and any("cross_entropy" in name for name in functions_of(error)):
                phase = "loss"
            said = explain(
                error, phase=phase, update=update, recipe=self.recipe, strategy=self.strategy, engine=self.engine,
                row_tokens=self.row_tokens, program_bytes=self.program_bytes, parameters=self.parameters,
                copied=self.keeper.saver.bytes_of_copies if self.keeper else 0,
            )  # fmt: skip
            print(f"\n{said}", file=sys.stderr, flush=True)
            repeat_after_launcher(said)
            return EXIT_OUT_OF_MEMORY
        if died_elsewhere(error):
            at = f" of update {update}" if update else ""
            said = f"another process is gone ({first_line(error).split('. ')[0]})"
            print(f"\nrank {rank} leaves in phase {phase}{at}: {said}", file=sys.stderr, flush=True)
            return EXIT_OTHER_DIED
        return None

    def _write(self, line: dict[str, Any]) -> None:
        if self.trackers:
            self.accelerator.log({k: v for k, v in line.items() if k != "update"}, step=line["update"])
        if self.main:
            self.folder.metrics.add(line)

    def _record(self, update: int, ranks: list[list[int]] | None) -> None:
        if ranks is not None:
            self.folder.samples.add({"update": update, "samples": sorted(index for rank in ranks for index in rank)})

    def _started(self) -> None:
        self.timeline.mark("first update")
        if self.main:
            self.environment["seconds_to_first_update"] = self.timeline.seconds
            self.environment["bytes_held_by_rank_0"] = self.engine.held_bytes()
            self.folder.write_environment(self.environment)

    def weights(self) -> dict[str, Any] | None:
        """What is exported, whole, on the main process: all weights, or those of the adapter."""
        return self.engine.trained_state() if self.adapter else self.engine.state_dict()

    def write_model(self, state, results: dict[str, Any], folder: Path, tokenizer) -> None:
        from train.model.export import export_model
        from train.run.card import model_card

        write = self.adapter.save if self.adapter else export_model
        model_class, is_adapter = type(self.engine.module).__name__, self.adapter is not None
        card = model_card(self.task, self.recipe, results, self.environment, is_adapter, model_class)
        write(self.engine.module, state, tokenizer, folder, card)

    def export(self, results: dict[str, Any]) -> None:
        """Write the model, draw the curve, and say what came of the run; of one left early, where it stands."""
        from train.run.plot import plot_run

        if self.stopped:
            self.witness.phase("leave", patience=math.inf)
            why = self.keeper.why_stopped(self.stopped, self.length.num_updates)
            self.say("", *why)
            repeat_after_launcher("\n".join(why), after_signal=self.stopped in SIGNALS.values())
            return

        self.witness.phase("export", patience=LONG)
        load_best = self.keeper.loads_best
        state = None if load_best else self.weights()
        if self.main:
            self.folder.metrics.close()
            if load_best:
                shutil.copytree(self.keeper.checkpoints.best / "model", self.folder.model)
                for file in self.keeper.checkpoints.best.glob("predictions*.jsonl"):
                    shutil.copy(file, self.folder.path / file.name)  # the predictions of model/
            else:
                self.write_model(state, results, self.folder.model, self.tokenizer)
            picture = self.folder.path / "loss.png"
            self.environment["held_out"] = self._held_out(results, load_best)
            plot_run(self.folder.metrics.read(), picture, self.folder.path.name, self.job.unit, self.job.figures[0])
            self.say("", *self._summary(results, load_best))

    def _held_out(self, results: dict[str, Any], load_best: bool) -> dict[str, float]:
        """The figures of the weights in model/, and of which update they are; empty where nothing is held out."""
        figures, update = (
            (self.best.figures, self.best.update) if load_best else (results["after"], results["updates"])
        )
        return {"update": update, **figures} if figures else {}

    def close(self) -> int:
        """Say where everything lies, and leave the process group. Returns the exit code."""
        code = exit_code(self.stopped)
        if self.main:
            self.environment["checkpoints"] = self.keeper.saver.records
            self.environment["exit_code"] = code  # accelerate launch makes 1 of any other than 0
            self.folder.write_environment(self.environment)
        if not self.stopped:
            self.say(f"run folder  {self.folder.path}  (loss.png, metrics.jsonl, model/)")
        self.engine.close()
        return code

    def _summary(self, results: dict[str, Any], load_best: bool) -> list[str]:
        before, after = results["before"], self.best.figures if load_best else results["after"]
        tokens_per_s = self.meter.typical()
        flops_per_s = tokens_per_s * self.meter.flops_per_token
        mfu = f", MFU {flops_per_s / self.meter.peak:.1%}" if self.meter.peak else ""
        padding = f", {results['padding']:.1%} of all positions padding" if results["padding"] else ""
        made = results["updates"] - self.keeper.resumed_at
        of_them = f" ({made:,} of them now)" if made != results["updates"] else ""
        speed = f"median {tokens_per_s:,.0f} tokens/s, {rounded(flops_per_s / 1e12)} TFLOP/s{mfu}{padding}"
        trained = results["seconds"] - sum(each["evaluation_seconds"] for each in self.meter.evaluations)
        lines = [f"trained     {results['updates']:,} updates{of_them} in {duration(trained)}, {speed}"]
        if not made:
            lines = [
                f"trained     {results['updates']:,} updates, all of them before: there was nothing left to train"
            ]
        lines += about_evaluations(self.meter.evaluations)
        saves = self.keeper.saver.records
        if saves:
            size, stood = (statistics.mean(save[name] for save in saves) for name in ("bytes", "stood_still"))
            number = f"{len(saves)} checkpoints" if len(saves) > 1 else "1 checkpoint"
            lines.append(
                f"saved       {number}, {size / 1e6:,.1f} MB each; training stood still {stood:.2f} s for each"
            )
        if self.adapter:
            lines.append("frozen      weights are what they were, bit for bit")
        for name, value in after.items():
            was = f"{before[name]:.4f} -> " if name in before else ""
            lines.append(f"held out    {name.removeprefix('eval_')} {was}{value:.4f}")
        lines += self.job.baseline() if self.job.baseline else []
        if self.keeper.keeps_best and self.best.update is not None:
            where = "checkpoints/best, and model/ is that one" if load_best else "checkpoints/best; model/ is the last"
            start = self.best.unbeaten_start(before)
            tie = f", no better than before training ({start:.4f})" if start is not None else ""
            lines.append(
                f"best        {self.best.metric} {self.best.value:.4f} at update {self.best.update:,}{tie} ({where})"
            )
        return lines


def about_evaluations(evaluations: list[dict[str, float]]) -> list[str]:
    """For the log: the time that evaluations took, which is no time of training."""
    if not evaluations:
        return []
    total, last = sum(each["evaluation_seconds"] for each in evaluations), evaluations[-1]
    times = f"{len(evaluations)} times in {duration(total)}, the last" if len(evaluations) > 1 else "once"
    rate = rounded(last["evaluation_samples_per_s"])
    return [f"evaluated   {times} in {rounded(last['evaluation_seconds'])} s: {rate} samples/s"]


def functions_of(error: BaseException) -> list[str]:
    """The names of the functions through which an error came."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]
