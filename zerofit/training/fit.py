"""Training, or an evaluation or answers alone, with its record: from a prepared model and a task to what came of it,
and the model in its folder."""

import math
import shutil
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import distributed
from transformers import PreTrainedTokenizerBase

from zerofit.checkpoint.directory import LEAVING
from zerofit.checkpoint.exporter import Exported, ModelExporter
from zerofit.checkpoint.manager import CheckpointManager
from zerofit.checkpoint.resume import fingerprint
from zerofit.checkpoint.run_state import RunState
from zerofit.data.mixture import options_of_sources
from zerofit.data.options import DataOptions
from zerofit.data.sources import table_format
from zerofit.health.anomaly import AnomalyDetector
from zerofit.health.flight import FOLDER
from zerofit.health.shutdown import StopReason
from zerofit.health.slow_ranks import RankClock, SlowRanks
from zerofit.launch.ranks import RANKS
from zerofit.model.export import Weights, write_beside
from zerofit.recipe.errors import EXIT_NEEDS_A_PERSON, UserError, decide, first_line, print_last
from zerofit.recipe.files import is_of_the_disk
from zerofit.recipe.tasks import TaskRecipe
from zerofit.record.environment import describe_environment
from zerofit.record.meters import MemoryMeter, ThroughputMeter
from zerofit.record.metrics import UpdateMetrics
from zerofit.record.plot import plot_run
from zerofit.record.recorder import RunRecorder
from zerofit.record.run_folder import RunFolder
from zerofit.record.terminal import Bar, decimals, duration
from zerofit.record.trackers import start_trackers
from zerofit.record.written_files import MODEL
from zerofit.strategy.machines import check_same
from zerofit.strategy.state import AVERAGE
from zerofit.training.best_metric import BestMetricTracker, make_best_tracker
from zerofit.training.evaluation import timed_evaluation
from zerofit.training.loop import train
from zerofit.training.prepare import Prepared, check_output_folder
from zerofit.training.profiling import profiled
from zerofit.training.run import Run, Stop
from zerofit.training.session import LONG
from zerofit.training.step import Signals, TrainStep
from zerofit.training.summary import about_evaluations, compiled, incomplete, summary, why_stopped
from zerofit.training.task import Task


@dataclass(frozen=True)
class TrainResult:
    """What came of training.

    Args:
        stop: why it ended.
        seconds: of the loop, with the last checkpoint.
        environment: of environment.json; on the main process.
        missing: what the run was to leave and could not be written, with the reason; on all ranks, after `export`.
    """

    prepared: Prepared
    run: Run
    stop: Stop
    seconds: float
    exporter: ModelExporter
    environment: dict[str, Any]
    missing: list[str] = field(default_factory=list)

    @property
    def stopped(self) -> bool:
        """Whether training stopped before its end, and nothing is exported."""
        return self.stop.reason is not StopReason.NONE

    def note_missing(self, failed: dict[str, Exception]) -> None:
        """Add files that could not be written: {file: why}."""
        for name, error in failed.items():
            if not is_of_the_disk(error):
                traceback.print_exception(error)
            self.missing.append(f"{name} ({first_line(error)})")


def fit(
    prepared: Prepared, task: Task, throughput: ThroughputMeter, tokenizer: PreTrainedTokenizerBase
) -> TrainResult:
    """Run the loop and keep its record.

    Raises:
        UserError: there is no such figure as metric_for_best_model; the folder holds another run.
    """
    session, engine, recipe, state = prepared.session, prepared.engine, prepared.session.recipe, RunState()
    lengths = task.samples.lengths
    session.facts.row_tokens = len(task.samples[0]["input_ids"]) if lengths is None else int(lengths.max())
    session.advise()
    best = make_best_tracker(recipe, task.figures, task.evaluate is not None, state.best)
    environment = describe_environment(session.strategy.launch.command, engine.device) if engine.is_main else {}
    exporter = ModelExporter(engine, prepared.adapter, tokenizer, session.task, recipe, environment)
    checkpoints = _resume(prepared, task, state, best, exporter, environment)
    notes = start_trackers(engine.accelerator, session.config.trackers, recipe, session.folder, session.task, state)
    session.say(*(f"note      {note}" for note in notes))
    session.shutdown.install()
    checkpoints.start()
    run = _run(prepared, task, state, best, checkpoints, throughput, tokenizer, environment)
    began = time.perf_counter()
    stop = train(run)
    run.recorder.close()
    session.phase("save", state.updates)
    checkpoints.finish(after_anomaly=stop.reason is StopReason.ANOMALY)
    return TrainResult(prepared, run, stop, time.perf_counter() - began, exporter, environment)


def _resume(
    prepared: Prepared,
    task: Task,
    state: RunState,
    best: BestMetricTracker,
    exporter: ModelExporter,
    environment: dict[str, Any],
) -> CheckpointManager:
    """The run's checkpoints, and its record in the folder, from the update on that it resumes at."""
    session, engine, config = prepared.session, prepared.engine, prepared.session.config
    data = fingerprint(task.samples, task.grouping)
    check_same({"training data": data}, "Give all machines the same data and the same packages")
    run = {
        **config.resume.identity,
        "num_processes": engine.layout.world_size,
        "data_parallel": engine.layout.data_size,
        "options_given_for": config.options_given_for,
        "strategy": session.strategy.name,
    }
    checkpoints = CheckpointManager(
        session.folder,
        engine,
        session.recipe,
        state,
        exporter,
        run,
        data,
        best.metric,
        best.keeps,
        session.advise,
        session.mirror,
        session.hub,
    )
    checkpoints.resume(config.resume)
    if engine.is_main:
        checkpoints.drop_replaced()
        session.folder.start(
            session.recipe,
            session.strategy.batches.global_batch,
            {**engine.effective_strategy(), "options_given_for": config.options_given_for},
            environment,
            state.updates,
            checkpoints.resumed_from,
        )
        if distributed.is_initialized() and distributed.get_backend() == "nccl":
            (session.folder.path / FOLDER).mkdir(exist_ok=True)  # NCCL's watchdog writes there, and makes no folder
    check_output_folder(config, engine)
    checkpoints.restore_best_checkpoint()
    return checkpoints


def _run(
    prepared: Prepared,
    task: Task,
    state: RunState,
    best: BestMetricTracker,
    checkpoints: CheckpointManager,
    throughput: ThroughputMeter,
    tokenizer: PreTrainedTokenizerBase,
    environment: dict[str, Any],
) -> Run:
    """The parts that the loop works with."""
    session, engine, recipe, length = prepared.session, prepared.engine, prepared.session.recipe, prepared.length
    assert length is not None, "of a launch that trains"
    memory = MemoryMeter(engine.device)
    scaled = session.strategy.precision == "fp16"
    detector = AnomalyDetector(recipe.spike_threshold, recipe.max_grad_norm > 0, scaled)

    def signals() -> Signals:
        return Signals(session.shutdown.reason(), checkpoints.is_due_by_clock(), checkpoints.writer.has_failed)

    def preview_sample(index: int) -> str:
        return str(tokenizer.decode(task.samples[index]["input_ids"]))

    bar = Bar(length.num_updates, recipe.logging_steps, engine.is_main)
    recorder = RunRecorder(session.folder, engine, environment, session.timeline, bar, preview_sample)
    step = TrainStep(task, engine, detector, memory, signals, session.phase, RankClock.of(engine))
    if recipe.profile:
        step = profiled(step, recipe, session.folder, recorder.note)
    slow = SlowRanks(
        engine.layout,
        recipe.logging_steps,
        lambda rank: RANKS.place_of(rank, engine.device.type),
        step.clock.measures,
    )
    return Run(task, engine, length, state, step, checkpoints, recorder, best, throughput, memory, session.phase, slow)


def export(result: TrainResult) -> None:
    """Write the model, draw the curve, and say what came of the run; of one that stopped early, where it is."""
    session, run, recipe = result.prepared.session, result.run, result.prepared.session.recipe
    state, best, checkpoints = run.state, run.best, run.checkpoints
    if result.stopped:
        session.watchdog.phase("leave", patience=math.inf)
        why = why_stopped(result.stop, run.length.num_updates, state, checkpoints, recipe.on_anomaly)
        if session.is_main:
            print_last("\n".join(["", *why]), after_signal=result.stop.reason.is_signal, file=sys.stdout)
        return
    session.watchdog.phase("export", patience=LONG)
    loads_best = best.loads and state.best.update is not None
    review = _export_model(result, checkpoints.directory.best / "model" if loads_best else None)
    _keep_state_if_incomplete(result)
    if recipe.ema_decay:
        result.prepared.engine.state.take_average()  # it takes the place of the weights
        _export_weights(result, {}, AVERAGE)
    remarks: list[str] = []
    if session.is_main:
        remarks = _export_record(result, loads_best)
    result.missing[:] = result.prepared.engine.from_main(result.missing)
    figures = state.best.figures if loads_best else state.held_out
    updates = state.best.update if loads_best else state.updates
    result.environment["held_out"] = {"update": updates, **figures} if figures else {}
    made = state.updates - checkpoints.resumed_at
    session.say(
        "",
        *summary(state, made, result.seconds, run.throughput, checkpoints.writer.records, best, remarks),
        *([compiled()] if recipe.torch_compile else []),
        *(f"export      {line}" for line in review),
    )


def _export_model(result: TrainResult, best: Path | None) -> list[str]:
    """Write model/ before anything else, on all ranks together. Returns lines for the log.

    Args:
        best: the model of the best evaluation, which is copied; None: the weights are those of the last update.
    """
    if best is None:
        return _export_weights(result, result.run.state.held_out)
    folder, exported = result.run.checkpoints.folder, Exported([], [])
    if result.prepared.session.is_main:

        def copy_best() -> None:
            nonlocal exported
            with folder.new_model() as place:
                shutil.copytree(best, place, dirs_exist_ok=True)
                exported = result.exporter.read_back(place)

        result.note_missing(write_beside({MODEL: copy_best}))
        missing = [*result.run.checkpoints.missing, *exported.missing]
        result.missing.extend(f"{MODEL}/: {each}" for each in missing)
    return exported.review


def _export_weights(result: TrainResult, held_out: dict[str, float], below: str = "") -> list[str]:
    """Write the engine's weights to model/, or to a folder below it, on all ranks together. Returns lines for the
    log."""
    broken, exported = list[Exception](), Exported([], [])

    def gathered() -> Weights:
        try:
            yield from result.exporter.weights()
        except Exception as error:
            broken.append(error)
            raise

    weights = gathered()
    name = "/".join(filter(None, [MODEL, below]))
    if result.prepared.session.is_main:

        def write() -> None:
            nonlocal exported
            with result.run.checkpoints.folder.new_model(below) as place:
                exported = result.exporter.write(weights, held_out, place)

        result.note_missing(write_beside({name: write}))
        result.missing.extend(f"{name}/: {each}" for each in exported.missing)
    deque(weights, maxlen=0)  # every rank takes part in gathering them, also where writing has failed
    if broken:  # nothing failed but what the ranks do together
        raise broken[0]
    return exported.review


def _keep_state_if_incomplete(result: TrainResult) -> None:
    """Where model/ is not whole, keep the state of the last update, if no checkpoint has it: with it the same command
    exports again, and trains nothing again."""
    checkpoints = result.run.checkpoints
    if result.prepared.engine.from_main(bool(result.missing)):
        if not checkpoints.saved_latest:
            checkpoints.save(LEAVING, False, {})
            checkpoints.wait()
        result.prepared.session.say(*checkpoints.messages())


def _export_record(result: TrainResult, loads_best: bool) -> list[str]:
    """Write what is beside the model in the run's folder, on the main process, and hand it to the trackers. Returns
    what the task has to say of the held-out figures."""
    run, checkpoints, remarks = result.run, result.run.checkpoints, list[str]()
    task, folder = run.task, checkpoints.folder

    def predictions() -> None:
        for file in checkpoints.directory.best.glob("predictions*.jsonl"):  # of the model that is exported
            folder.failed.pop(file.name, None)
            with folder.new_file(file.name, "wb") as written:
                written.write(file.read_bytes())

    def plot() -> None:
        with folder.new_file("loss.png", "wb") as picture:
            of_quality = (name for name in (run.best.metric, *task.figures) if name not in ("loss", "perplexity"))
            merit, resumed = next(of_quality, "loss"), result.environment.get("resumed_after", ())
            plot_run(folder.metrics.read(), picture, folder.path.name, task.unit, merit, resumed)

    files: dict[str, Callable[[], object]] = {"metrics.jsonl": folder.metrics.close}
    files |= {"predictions.jsonl": predictions} if loads_best else {}
    files |= {"predictions as a table": lambda: _tabulate(folder, result.prepared.session.recipe), "loss.png": plot}
    failed = write_beside(files) | folder.failed
    if (result.run.state.best.figures if loads_best else run.state.held_out) and not folder.failed:
        failed |= write_beside({"the report of the held-out examples": lambda: remarks.extend(task.remarks())})
    result.note_missing(failed)
    return remarks


def _tabulate(folder: RunFolder, recipe: TaskRecipe) -> list[str]:
    """Write the predictions as .csv or .tsv too, where the records came from such a file. Returns the files."""
    if not any(folder.path.glob("predictions*.jsonl")):
        return []
    try:
        sources = options_of_sources(DataOptions.of(recipe), recipe)
        kind = table_format(next(iter(sources.values())))
    except (UserError, OSError):  # the data is gone meanwhile
        return []
    return folder.tabulate_predictions(*kind) if kind else []


def finish(result: TrainResult) -> int:
    """Say where everything lies, leave the process group, wait for mirror and hub. Returns the exit code."""
    session, checkpoints = result.prepared.session, result.run.checkpoints
    code = result.stop.reason.exit_code(checkpoints.saved_latest)
    if result.missing:
        code = EXIT_NEEDS_A_PERSON
    if session.is_main:
        is_whole = not any(each.startswith(MODEL) for each in result.missing)
        is_finished = not result.stopped and is_whole
        record = {"checkpoints": checkpoints.writer.records, "finished": is_finished, "exit_code": code}
        if result.missing:
            record["exit_reason"] = f"could not be written: {'; '.join(result.missing)}"
        environment = {**result.environment, **record}  # accelerate launch makes 1 of any exit code but 0
        failed = write_beside({"environment.json": lambda: session.folder.write_environment(environment)})
        result.note_missing(failed)
        code = EXIT_NEEDS_A_PERSON if failed else code
    decide(code)
    if result.missing and session.is_main:
        lines = incomplete(result.missing, session.folder, checkpoints, result.stopped)
        print_last("\n".join(["", *lines]), file=sys.stdout)
    elif not result.stopped:
        session.say(f"run folder  {session.folder.path}  (loss.png, metrics.jsonl, model/)")
    result.prepared.engine.close()
    if session.mirror is not None:
        session.say(*session.mirror.finish())
    if session.hub is not None and not result.stopped and not result.missing:
        session.say(*session.hub.finish(session.folder.model))
    return code


def answer(prepared: Prepared, task: Task) -> int:
    """Evaluate, or answer the file, leave the record and the process group. Returns the exit code.

    Raises:
        UserError: nothing is held out.
    """
    session, engine, recipe = prepared.session, prepared.engine, prepared.session.recipe
    folder, stored = session.folder, session.stored
    assert stored is not None, "a launch that trains nothing has a stored model"
    if not recipe.predict_file and task.evaluate is None:
        raise UserError("evaluate_only: nothing is held out. Name a validation_file")
    if session.is_main:
        environment = describe_environment(session.strategy.launch.command, engine.device)
        options = {**recipe.to_dict(), "model_name_or_path": stored.asked_for}
        folder.start_answers(options, engine.effective_strategy(), environment)
    session.watchdog.phase("evaluate", patience=LONG)
    began = time.perf_counter()
    if task.predict is not None and recipe.predict_file:
        files, figures, clock = task.predict(engine), dict[str, float](), None
    else:
        figures, clock = timed_evaluation(task, engine)
        files = ["metrics.jsonl", *(path.name for path in sorted(folder.path.glob("predictions*.jsonl")))]
        if session.is_main:
            folder.metrics.add(UpdateMetrics.of_evaluation(figures, clock).to_line())
    seconds = time.perf_counter() - began
    code = 0
    if session.is_main:
        tables = {"predictions as a table": lambda: files.extend(_tabulate(folder, recipe))}
        failed = write_beside({"metrics.jsonl": folder.metrics.close, **tables}) | folder.failed
        code = EXIT_NEEDS_A_PERSON if failed else 0
        record = {**environment, "seconds": seconds, "exit_code": code}
        failed |= write_beside({"environment.json": lambda: folder.write_environment(record)})
        done = [f"answered    in {duration(seconds)}"] if clock is None else about_evaluations([clock])
        session.say(
            *(f"held out    {name.removeprefix('eval_')} {decimals(value)}" for name, value in figures.items())
        )
        if figures and not folder.failed:
            session.say(*task.remarks())
        session.say(*done, f"run folder  {folder.path}  ({', '.join(files)})")
        if failed:
            code = EXIT_NEEDS_A_PERSON
            named = "; ".join(f"{name} ({first_line(error)})" for name, error in failed.items())
            print_last(f"\nincomplete  not written: {named}", file=sys.stdout)
    engine.close()
    return code
