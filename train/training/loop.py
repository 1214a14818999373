"""The training loop: one update after another, the same lines for every task and every strategy.

An update is one step of the optimizer: this rank's micro-batches of one global batch, forward and backward, and the
step, unless the update is refused (step.py). All ranks run the loop together and take every decision alike.
"""

import time
from typing import Any

from train.checkpoint.directory import ASKED, CLOCK, LEAVING
from train.health.anomaly import ACTIONS, MAX_IN_A_ROW
from train.health.shutdown import StopReason
from train.training.evaluation import timed_evaluation
from train.training.run import Ending, Run
from train.training.step import StepResult
from train.training.stream import UpdateStream


def train(run: Run) -> Ending:
    """Train from the first update that is not done to the last, or until there is a reason to stop."""
    state, length = run.state, run.length
    if run.task.recipe.eval_on_start and not state.updates:
        evaluate_before_training(run)
    stream = UpdateStream(run.task, run.engine, length, state.updates)
    run.engine.model.train()
    run.memory.reset()
    for update in range(state.updates + 1, length.num_updates + 1):
        batches, began = stream.next(), time.perf_counter()
        if update in state.skipped_updates:  # after a rewind
            result = run.step.skip(update)
        else:
            if run.task.recipe.record_samples:
                run.recorder.write_samples(update, batches.samples)
            result = run.step(update, batches, stream.prefetch)
        line = metrics_line(run, result, time.perf_counter() - began)
        state.anomalies_in_a_row = state.anomalies_in_a_row + 1 if result.anomaly else 0
        if result.anomaly and report_refused(run, result):
            return Ending(StopReason.ANOMALY, result.anomaly)
        held_out, timing = maybe_evaluate(run, update)
        line |= {**held_out, **timing}
        is_best = run.best.record_evaluation(update, held_out) if held_out else False
        state.updates = update
        state.tokens, state.positions = state.tokens + line["tokens"], state.positions + result.positions
        run.recorder.write(line)
        run.recorder.show(line)
        maybe_checkpoint(run, result, is_best and run.best.keeps, held_out)
        stop_reason = reason_to_stop(run, result)
        run.recorder.note(*run.checkpoints.messages())
        if stop_reason or run.best.is_exhausted:
            return Ending(stop_reason)
    return Ending()


def evaluate_before_training(run: Run) -> None:
    """The held-out figures of update 0."""
    if run.task.evaluate is None:
        return
    run.phase("evaluate", 0)
    figures, timing = timed_evaluation(run.task, run.engine)
    run.state.held_out_before = run.state.held_out = figures
    run.throughput.evaluations.append(timing)
    run.recorder.write({"update": 0, "epoch": 0.0, "consumed_samples": 0, **figures, **timing})


def metrics_line(run: Run, result: StepResult, seconds: float) -> dict[str, Any]:
    """The line of metrics.jsonl, without held-out figures."""
    consumed, before = run.length.consumed(result.update), run.length.consumed(result.update - 1)
    line = {"update": result.update, "epoch": run.length.epoch(result.update), "consumed_samples": consumed}
    line |= result.figures
    if result.update not in run.state.skipped_updates:
        line |= {**run.throughput.of_update(line["tokens"], consumed - before, seconds), "seconds": seconds}
    if result.anomaly:
        line["fault"] = result.anomaly.reason
    return line


def report_refused(run: Run, result: StepResult) -> bool:
    """Report an update that the step has refused. Returns whether training stops for it."""
    action = run.task.recipe.on_fault
    run.recorder.write_anomaly(result.anomaly, action)
    run.recorder.note(f"anomaly   update {result.update}: {result.anomaly.reason}. {ACTIONS[action]}")
    return action != "skip" or run.state.anomalies_in_a_row >= MAX_IN_A_ROW


def maybe_evaluate(run: Run, update: int) -> tuple[dict[str, float], dict[str, float]]:
    """The held-out figures and how long they took, where an evaluation is due after this update; empty elsewhere."""
    steps = run.task.recipe.eval_steps
    is_due = run.length.is_last(update) or run.length.is_due("steps" if steps else "epoch", steps, update)
    if run.task.evaluate is None or not is_due:
        return {}, {}
    run.phase("evaluate", update)
    run.state.held_out, timing = timed_evaluation(run.task, run.engine)
    run.throughput.evaluations.append(timing)
    run.recorder.show_held_out(update, run.state.held_out)
    run.memory.reset()
    return run.state.held_out, timing


def maybe_checkpoint(run: Run, result: StepResult, is_best: bool, held_out: dict[str, float]) -> None:
    """Begin a checkpoint, where one is due after this update or the weights are the best so far."""
    recipe, update, is_last = run.task.recipe, result.update, run.length.is_last(result.update)
    why = None
    if run.length.is_due(recipe.save_strategy, recipe.save_steps, update):
        why = ASKED
    elif not is_last:  # the last update's weights are exported
        why = LEAVING if result.signals.stop_reason else CLOCK if result.signals.checkpoint_is_due else None
    if why or is_best:
        run.phase("save", update)
        run.checkpoints.save(why, is_best, held_out)
        run.memory.reset()


def reason_to_stop(run: Run, result: StepResult) -> StopReason:
    """What ends the run before its last update, if anything; the same on all ranks."""
    if result.signals.checkpoint_failed:
        run.checkpoints.wait()
    if run.length.is_last(result.update):
        return StopReason.NONE
    if run.checkpoints.last_failed and run.task.recipe.on_save_failure == "stop":
        return StopReason.CHECKPOINT_FAILED
    if not result.signals.stop_reason and run.best.is_exhausted:
        best = run.best
        run.recorder.note(
            f"update {result.update}: {best.best.worse_in_a_row} evaluations without a better {best.metric}: the end"
        )
    return result.signals.stop_reason
