"""The end of a run: its model, its record, and the lines that the log has before and after training."""

import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.checkpoint.directory import SaveReason
from zerofit.compat.torch import compiled_graphs
from zerofit.health.shutdown import SIGNALS
from zerofit.model.export import NamedWeights
from zerofit.recipe.errors import EXIT, EXIT_NEEDS_A_PERSON, UserError, first_line, print_last
from zerofit.recipe.files import counted
from zerofit.recipe.options import Schedule
from zerofit.record.environment import describe_environment
from zerofit.record.metrics import UpdateMetrics, plot_run
from zerofit.record.run_folder import MODEL
from zerofit.record.terminal import decimals, duration, rounded, screen_width, table
from zerofit.strategy.gpus import describe_device
from zerofit.strategy.muon import Muon
from zerofit.strategy.state import EMA
from zerofit.training.setup import LONG_PATIENCE

if TYPE_CHECKING:
    from zerofit.training.run import Run


def describe_run(run: "Run", data: Any) -> list[str]:
    """Return lines for the log before the first update: the model, the strategy, the data, and what was noted."""
    recipe = run.recipe
    strategy = run.strategy
    schedule = run.schedule
    length: list[str] = []
    if run.stored is not None:
        base = f" on {run.stored.base}" if run.stored.adapter else ""
        model = [f"model     {run.stored.asked_for}{base}: {run.parameters:,} parameters"]
        layout = strategy.describe_layout
    else:
        origin = recipe.model_name_or_path or f"{recipe.config_name or recipe.model_type} from scratch"
        share = f"{run.trainable:,} ({run.trainable / run.parameters:.2%})"
        trained = "all" if run.trainable == run.parameters else share
        model = [f"model     {origin}: {run.parameters:,} parameters, {trained} trained"]
        layout = strategy.describe
        if run.adapter is not None:
            model.append(f"adapter   {run.adapter.note}")
        if run.adapter is not None and not recipe.model_name_or_path:
            model.append(
                "warning   the frozen weights are random (no model_name_or_path), and the adapter's folder will not "
                "have them: good for measuring only"
            )
        if isinstance(run.engine.torch_optimizer, Muon):
            model += [f"optimizer {run.engine.torch_optimizer.describe()}"]
        rate = "learning rate by the script's own schedule"
        if isinstance(schedule, Schedule):
            warmup = f", {schedule.num_warmup} warm-up" if schedule.num_warmup else ""
            rate = f"learning rate {recipe.learning_rate:g}, {recipe.lr_scheduler_type}{warmup}"
        epochs = counted(rounded(run.length.epoch(run.num_updates)), "epoch")
        length = [f"run       {counted(run.num_updates, 'update')}, {epochs}; {rate}"]
    return [
        *model,
        f"strategy  {layout}",
        f"device    {describe_device(run.device)}",
        *(line if isinstance(line, str) else table(line, screen_width()) for line in data.describe()),
        *([run.by_tokens.describe()] if run.by_tokens else []),
        *(note for note in data.notes if note),
        *run.lines,
        *getattr(data, "shown", ()),
        *length,
        f"folder    {run.folder.path}",
        *(f"note      {note.removeprefix('note: ')}" for note in [*strategy.notes, *run.notes]),
    ]


def explain_stop(run: "Run") -> list[str]:
    """Return lines on why a run stopped before its last update, and what to do."""
    stopped_by = f"stopped     by {run.stop_reason.text} after update {run.state.updates:,} of {run.num_updates:,}"
    if run.anomaly is not None:
        remedy = "The same command will hit it again. To skip these samples add --on_anomaly skip (or rewind)"
        if run.recipe.on_anomaly != "stop":
            remedy = f"--on_anomaly {run.recipe.on_anomaly} is no longer a remedy: there were too many. Fix the data"
        return [
            f"{stopped_by}: update {run.anomaly.update}: {run.anomaly.reason}",
            f"            its samples are in {run.folder.anomalies.path}; the weights are as they were before it",
            f"            {remedy}",
            "            Should the loss have gone wrong before it: start over with a lower --learning_rate",
        ]
    newest = next(run.checkpoints.directory.resumable(), None)
    remedy = f"resumes from {newest}" if newest else "starts over"
    if not run.checkpoints.saved_latest:
        return [f"{stopped_by}, which could not be saved: the same command {remedy}"]
    return [f"{stopped_by}: the same command resumes there"]


def compilation_line() -> str:
    """Return a line on how often torch.compile compiled in this process."""
    number = compiled_graphs()
    if not number:
        return "compiled    nothing: torch's compiler has failed (above). --torch_compile false leaves it out"
    return f"compiled    {counted(number, 'graph')}: parts of the model, and some again for other shapes"


def summary(run: "Run", remarks: list[str]) -> list[str]:
    """Return lines on the result of a run that reached its end. `remarks`: the task's own lines on the held-out
    figures."""
    state = run.state
    best = run.best
    lines = [_trained(run)]
    loads_best = best.loads and best.best.update is not None
    before = state.held_out_before
    after = best.best.figures if loads_best else state.held_out
    for name, value in after.items():
        was = f"{decimals(before[name])} -> " if name in before else ""
        lines.append(f"held out    {name.removeprefix('eval_')} {was}{decimals(value)}")
    lines += remarks
    if best.keeps and best.best.update is not None:
        where = "checkpoints/best, and model/ is that one" if loads_best else "checkpoints/best; model/ is the last"
        lines.append(f"best        {best.metric} {decimals(best.best.value)} at update {best.best.update:,} ({where})")
    return lines


def _trained(run: "Run") -> str:
    state = run.state
    throughput = run.throughput
    updates_now = run.state.updates - run.checkpoints.resumed_at
    seconds = (run.seconds or 0.0) - sum(evaluation.seconds for evaluation in throughput.evaluations)
    if not updates_now:
        return f"trained     {counted(state.updates, 'update')}, all of them before: there was nothing left to train"
    tokens_per_s = throughput.typical()
    flops_per_s = tokens_per_s * throughput.flops_per_token
    mfu = f", MFU {flops_per_s / throughput.peak:.1%}" if throughput.peak else ""
    padding = 1.0 - state.tokens / state.positions if state.positions else 0.0
    padded = f", {padding:.1%} of all positions padding" if padding else ""
    share_now = f" ({updates_now:,} of them now)" if updates_now != state.updates else ""
    return (
        f"trained     {counted(state.updates, 'update')}{share_now} in {duration(seconds)}, "
        f"median {tokens_per_s:,.0f} tokens/s, "
        f"{rounded(flops_per_s / 1e12)} TFLOP/s{mfu}{padded}"
    )


def export_run(run: "Run", remarks: Callable[[], list[str]] = list) -> None:
    """Write model/, the loss curve and the end of the record, after training. If the run stopped early, only log why,
    and where it resumes.

    Args:
        remarks: () -> lines for the end of the log; called after the model is written.
    """
    if run.measurement:
        return
    run.end_loop()  # in case the script left the loop itself
    recipe = run.recipe
    state = run.state
    checkpoints = run.checkpoints
    if run.stopped:
        run.watchdog.phase("leave", patience=math.inf)
        if run.is_main:
            print_last(
                "\n".join(["", *explain_stop(run)]), after_signal=run.stop_reason in SIGNALS.values(), file=sys.stdout
            )
        return
    run.watchdog.phase("export", patience=LONG_PATIENCE)
    loads_best = run.best.loads and state.best.update is not None
    review = _export_model(run, checkpoints.directory.best / "model" if loads_best else None)
    if run.engine.from_main(bool(run.folder.missing)):  # then the same command exports again, without training
        if not checkpoints.saved_latest:
            checkpoints.save(SaveReason.BEFORE_EXIT, False, {})
            checkpoints.writer.wait()
        run.log_lines(*checkpoints.messages())
    if recipe.ema_decay:
        with run.engine.state.averaged():
            _export_weights(run, {}, EMA)
    figures = state.best.figures if loads_best else state.held_out
    remark_lines = _export_record(run, loads_best, remarks if figures else list) if run.is_main else []
    run.folder.missing = run.engine.from_main(run.folder.missing)
    updates = state.best.update if loads_best else state.updates
    run.environment["held_out"] = {"update": updates, **figures} if figures else {}
    run.log_lines(
        "",
        *summary(run, remark_lines),
        *([compilation_line()] if recipe.compiles else []),
        *(f"export      {line}" for line in review),
    )


def _export_model(run: "Run", best: Path | None) -> list[str]:
    """Write model/ on all ranks together, and load it back as a check. Returns lines for the log.

    Args:
        best: the folder of the best evaluation's model, which is copied; None: export the current weights.
    """
    if best is None:
        _export_weights(run, run.state.held_out)
    elif run.is_main:
        with run.folder.noting(MODEL), run.folder.new_model() as place:
            shutil.copytree(best, place, dirs_exist_ok=True)
        run.folder.missing |= {file: f"{MODEL}/: {file}" for file in run.checkpoints.missing}
    if not (run.is_main and run.folder.model.is_dir()):
        return []
    try:
        return run.exporter.review(run.folder.model)
    except RuntimeError as error:
        run.folder.missing["review"] = f"{MODEL}/: a look at the files ({first_line(error)})"
        return []
    except Exception as error:  # a custom class may need its own loading code; its weights are written
        return [f"it was not loaded back ({first_line(error)})"]


def _export_weights(run: "Run", held_out: dict[str, float], below: str = "") -> None:
    """Write the engine's weights to model/, or to a folder below it, on all ranks together."""
    errors: list[Exception] = []
    name = "/".join(filter(None, [MODEL, below]))

    def gathered() -> NamedWeights:
        try:
            yield from run.exporter.weights()
        except Exception as error:
            errors.append(error)
            raise

    weights = gathered()
    if run.is_main:
        with run.folder.noting(name):
            with run.folder.new_model(below) as place:
                missing = run.exporter.write(weights, held_out, place)
            run.folder.missing |= {f"{name}/{file}": f"{name}/: {file}" for file in missing}
    deque(weights, maxlen=0)  # every rank takes part in gathering them, even if writing has failed
    if errors:  # the gathering itself failed, on all ranks
        raise errors[0]


def _export_record(run: "Run", loads_best: bool, remarks: Callable[[], list[str]]) -> list[str]:
    """Write the rest of the run's folder (metrics, predictions, loss.png), on the main process. Returns the task's
    lines on the held-out figures."""
    folder = run.folder
    with folder.noting("metrics.jsonl"):
        folder.metrics.close()
    if loads_best:
        for file in run.checkpoints.directory.best.glob("predictions*.jsonl"):  # they belong to the exported model
            with folder.noting(file.name), folder.new_file(file.name, "wb") as written:
                written.write(file.read_bytes())
    with folder.noting("loss.png"), folder.new_file("loss.png", "wb") as picture:
        quality_figures = (name for name in (run.best.metric, *run.figures) if name not in ("loss", "perplexity"))
        plotted = next(quality_figures, "loss")
        resumed = run.environment.get("resumed_after", ())
        plot_run(folder.metrics.read(), picture, run.unit, plotted, resumed=resumed)
    lines: list[str] = []
    if not folder.missing:
        with folder.noting("the report of the held-out examples"):
            lines = remarks()
    return lines


def finish_run(run: "Run") -> int:
    """Log where the files are, leave the process group, wait for mirror and hub. Returns the exit code of the
    process."""
    if run.measurement:
        run.engine.close()
        return 0
    checkpoints = run.checkpoints
    folder = run.folder
    code = EXIT_NEEDS_A_PERSON if folder.missing else run.stop_reason.exit_code(checkpoints.saved_latest)
    if run.is_main:
        is_whole = not any(entry.startswith(MODEL) for entry in folder.missing.values())
        is_finished = not run.stopped and is_whole
        record = {"checkpoints": checkpoints.writer.records, "finished": is_finished, "exit_code": code}
        if folder.missing:
            record["exit_reason"] = f"could not be written: {'; '.join(folder.missing.values())}"
        with folder.noting("environment.json"):  # accelerate launch turns every exit code but 0 into 1
            folder.write_environment({**run.environment, **record})
        code = EXIT_NEEDS_A_PERSON if folder.missing else code
    EXIT.code = code
    if folder.missing and run.is_main:
        lines = ["", *(f"incomplete  not written: {entry}" for entry in folder.missing.values())]
        if not run.stopped:  # otherwise export_run has logged why it stopped
            has_weights = any(folder.model.glob("*.safetensors"))
            weights = f"the trained weights are in {folder.model}" if has_weights else "model/ is not there"
            newest = next(checkpoints.directory.resumable(), None)
            remedy = f"the same command exports again, from {newest}" if newest else "there is no checkpoint"
            lines.append(f"            {weights}; {remedy}. First fix the cause")
        print_last("\n".join(lines), file=sys.stdout)
    elif not run.stopped:
        run.log_lines(f"run folder  {folder.path}  (loss.png, metrics.jsonl, model/)")
    run.engine.close()
    if run.mirror is not None:
        run.log_lines(*run.mirror.finish())
    if run.hub is not None and not run.stopped and not folder.missing:
        run.log_lines(*run.hub.finish(folder.model))
    return code


def answer_held_out(
    run: "Run",
    evaluate: Callable[[], dict[str, float]],
    predict: Callable[[], list[str]],
    num_held_out: int,
    remarks: Callable[[], list[str]] = list,
) -> int:
    """Evaluate the stored model, or predict for predict_file. Returns the exit code. Raises UserError: nothing is held
    out.

    Args:
        evaluate: () -> the held-out figures.
        predict: () -> the files that the main process has written.
        remarks: () -> lines for the end of the log.
    """
    engine = run.engine
    recipe = run.recipe
    folder = run.folder
    if not recipe.predict_file and not num_held_out:
        raise UserError("evaluate_only: nothing is held out. Name a validation_file")
    if run.is_main:
        environment = describe_environment(run.strategy.launch.command, engine.device)
        options = {**recipe.to_dict(), "model_name_or_path": run.stored.asked_for}
        folder.start_answers(options, engine.effective_strategy(), environment)
    run.watchdog.phase("evaluate", patience=LONG_PATIENCE)
    began = time.perf_counter()
    figures: dict[str, float] = {}
    if recipe.predict_file:
        files = predict()
    else:
        run.begin_evaluation(0)
        run.watchdog.phase("evaluate", patience=LONG_PATIENCE)
        figures = evaluate()
        clock = run.end_evaluation(num_held_out)
        files = ["metrics.jsonl", *(path.name for path in sorted(folder.path.glob("predictions*.jsonl")))]
        if run.is_main:
            folder.metrics.add(UpdateMetrics.of_evaluation(figures, clock).to_line())
    seconds = time.perf_counter() - began
    code = 0
    if run.is_main:
        with folder.noting("metrics.jsonl"):
            folder.metrics.close()
        code = EXIT_NEEDS_A_PERSON if folder.missing else 0
        with folder.noting("environment.json"):
            folder.write_environment({**environment, "seconds": seconds, "exit_code": code})
        run.log_lines(
            *(f"held out    {name.removeprefix('eval_')} {decimals(value)}" for name, value in figures.items()),
            *(remarks() if figures and not folder.missing else ()),
            f"{'answered' if recipe.predict_file else 'evaluated':12}in {duration(seconds)}",
            f"run folder  {folder.path}  ({', '.join(files)})",
        )
        if folder.missing:
            code = EXIT_NEEDS_A_PERSON
            print_last(f"\nincomplete  not written: {'; '.join(folder.missing.values())}", file=sys.stdout)
    engine.close()
    return code
