"""Lines for the log: the model and the data before a run, its outcome, or why it stopped early."""

import statistics
from typing import TYPE_CHECKING, Any

from zerofit.compat.torch import compiled_graphs
from zerofit.recipe.parsing import counted
from zerofit.recipe.schedule import Schedule
from zerofit.record.metrics import EvaluationTime
from zerofit.record.terminal import decimals, duration, rounded, screen_width, table
from zerofit.strategy.gpus import describe_device
from zerofit.strategy.muon import Muon

if TYPE_CHECKING:
    from zerofit.training.run import Run


def about_the_run(run: "Run", data: Any) -> list[str]:
    """Lines for the log before the first update: the model, the strategy, the data, and what was noted."""
    recipe, strategy, schedule, length = run.recipe, run.strategy, run.schedule, list[str]()
    if run.stored is not None:
        base = f" on {run.stored.base}" if run.stored.adapter else ""
        model = [f"model     {run.stored.asked_for}{base}: {run.parameters:,} parameters"]
        layout = strategy.describe_layout
    else:
        origin = recipe.model_name_or_path or f"{recipe.config_name or recipe.model_type} from scratch"
        share = f"{run.trainable:,} ({run.trainable / run.parameters:.2%})"
        trained = "all" if run.trainable == run.parameters else share
        model, layout = [f"model     {origin}: {run.parameters:,} parameters, {trained} trained"], strategy.describe
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
        length = [f"run       {run.length.describe}; {rate}"]
    return [
        *model,
        f"strategy  {layout}",
        f"device    {describe_device(run.device)}",
        *(each if isinstance(each, str) else table(each, screen_width()) for each in data.describe()),
        *([run.by_tokens.describe()] if run.by_tokens else []),
        *(note for note in data.notes if note),
        *run.lines,
        *getattr(data, "shown", ()),
        *length,
        f"folder    {run.folder.path}",
        *(f"note      {note.removeprefix('note: ')}" for note in [*strategy.notes, *run.notes]),
    ]


def why_stopped(run: "Run") -> list[str]:
    """Lines on a run that stopped before its last update: why, and what to do."""
    stop = run.stop
    by = f"stopped     by {stop.reason.text} after update {run.state.updates:,} of {run.num_updates:,}"
    if stop.anomaly is not None:
        remedy = "The same command will hit it again. To skip these samples add --on_anomaly skip (or rewind)"
        if run.recipe.on_anomaly != "stop":
            remedy = f"--on_anomaly {run.recipe.on_anomaly} is no longer a remedy: there were too many. Mend the data"
        return [
            f"{by}: update {stop.anomaly.update}: {stop.anomaly.reason}",
            f"            its samples are in {run.folder.anomalies.path}; the weights are as they were before it",
            f"            {remedy}",
            "            Should the loss have gone wrong before it: start over with a lower --learning_rate",
        ]
    newest = next(run.checkpoints.directory.resumable(), None)
    remedy = f"resumes from {newest}" if newest else "starts over"
    if not run.checkpoints.saved_latest:
        return [f"{by}, which could not be saved: the same command {remedy}"]
    return [f"{by}: the same command resumes there"]


def incomplete_lines(run: "Run") -> list[str]:
    """Lines on a run that could not write all that it was to leave."""
    lines = [f"incomplete  not written: {each}" for each in run.missing]
    if run.stopped:
        return lines  # why it stopped, and where it resumes, has been said
    has_weights = any(run.folder.model.glob("*.safetensors"))
    newest = next(run.checkpoints.directory.resumable(), None)
    weights = f"the trained weights are in {run.folder.model}" if has_weights else "model/ is not there"
    remedy = f"the same command exports again, from {newest}" if newest else "there is no checkpoint"
    return [*lines, f"            {weights}; {remedy}. First mend the cause"]


def compilation_line() -> str:
    """A line on how often torch.compile compiled in this process."""
    number, _ = compiled_graphs()
    if not number:
        return "compiled    nothing: torch's compiler has failed (above). --torch_compile false leaves it out"
    return f"compiled    {counted(number, 'graph')}: parts of the model, and some again for other shapes"


def summary(run: "Run", remarks: list[str]) -> list[str]:
    """Lines on the outcome of a run that reached its end; `remarks`: what the task has to say of the held-out
    figures."""
    state, best, evaluations = run.state, run.best, run.throughput.evaluations
    lines = [_trained(run), *about_evaluations(evaluations)]
    if saves := run.checkpoints.writer.records:
        size, paused = (statistics.mean(save[name] for save in saves) for name in ("bytes", "blocked_s"))
        number = counted(len(saves), "checkpoint")
        lines.append(f"saved       {number}, {size / 1e6:,.1f} MB each; training paused {paused:.2f} s for each")
    loads_best = best.loads and best.best.update is not None
    before, after = state.held_out_before, best.best.figures if loads_best else state.held_out
    for name, value in after.items():
        was = f"{decimals(before[name])} -> " if name in before else ""
        lines.append(f"held out    {name.removeprefix('eval_')} {was}{decimals(value)}")
    lines += remarks
    if best.keeps and best.best.update is not None:
        where = "checkpoints/best, and model/ is that one" if loads_best else "checkpoints/best; model/ is the last"
        lines.append(f"best        {best.metric} {decimals(best.best.value)} at update {best.best.update:,} ({where})")
    return lines


def about_evaluations(evaluations: list[EvaluationTime]) -> list[str]:
    """Say how long evaluations took, which is not training time, for the log."""
    if not evaluations:
        return []
    total, last = sum(each.seconds for each in evaluations), evaluations[-1]
    times = f"{len(evaluations)} times in {duration(total)}, the last" if len(evaluations) > 1 else "once"
    return [f"evaluated   {times} in {rounded(last.seconds)} s: {rounded(last.samples_per_s)} samples/s"]


def _trained(run: "Run") -> str:
    state, throughput, made = run.state, run.throughput, run.state.updates - run.checkpoints.resumed_at
    seconds = (run.seconds or 0.0) - sum(each.seconds for each in throughput.evaluations)
    if not made:
        return f"trained     {counted(state.updates, 'update')}, all of them before: there was nothing left to train"
    tokens_per_s = throughput.typical()
    flops_per_s = tokens_per_s * throughput.flops_per_token
    mfu = f", MFU {flops_per_s / throughput.peak:.1%}" if throughput.peak else ""
    padding = 1.0 - state.tokens / state.positions if state.positions else 0.0
    padded = f", {padding:.1%} of all positions padding" if padding else ""
    of_them = f" ({made:,} of them now)" if made != state.updates else ""
    return (
        f"trained     {counted(state.updates, 'update')}{of_them} in {duration(seconds)}, "
        f"median {tokens_per_s:,.0f} tokens/s, "
        f"{rounded(flops_per_s / 1e12)} TFLOP/s{mfu}{padded}"
    )
