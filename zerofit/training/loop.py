"""The training loop: one update after another, the same lines for every task and every strategy.

An update is one step of the optimizer: this rank's micro-batches of one global batch, forward and backward, and the
step, unless the update is refused (step.py). All ranks run the loop together and take every decision alike.
"""

import time

from zerofit.checkpoint.directory import ASKED, CLOCK, LEAVING
from zerofit.health.anomaly import ACTIONS, MAX_IN_A_ROW, Anomaly
from zerofit.health.shutdown import StopReason
from zerofit.recipe.parsing import counted
from zerofit.record.metrics import EvaluationTime, UpdateMetrics
from zerofit.training.evaluation import timed_evaluation
from zerofit.training.run import Run, Stop
from zerofit.training.step import StepResult
from zerofit.training.stream import UpdateStream


def train(run: Run) -> Stop:
    """Train from the first update that is not done to the last, or until there is a reason to stop.

    Patience is looked at before each update: it may have run out in the evaluation that a resumed state ends with.
    """
    state, stream, totals = run.state, begin(run), None
    while state.updates < run.length.num_updates:
        if run.best.is_exhausted:
            worse = counted(state.best.worse_in_a_row, "evaluation")
            run.recorder.note(f"update {state.updates}: {worse} without a better {run.best.metric}: the end")
            break
        update, batches, began = state.updates + 1, stream.next(), time.perf_counter()
        if update in state.skipped_updates:  # after a rewind
            result = StepResult(update, learning_rate=run.engine.schedule(update - 1))
        else:
            if run.task.recipe.record_samples:
                run.recorder.write_samples(update, batches.samples)
            result = run.step(update, batches, totals, stream.prefetch)
        seconds, totals = time.perf_counter() - began, result.next_totals
        state.anomalies_in_a_row = state.anomalies_in_a_row + 1 if result.anomaly else 0
        if result.anomaly:
            report_anomaly(run, result.anomaly)
            if run.checkpoints.rewind(result.anomaly):
                stream, totals = begin(run), None
                continue
            if run.task.recipe.on_anomaly != "skip" or state.anomalies_in_a_row >= MAX_IN_A_ROW:
                return Stop(StopReason.ANOMALY, result.anomaly)
        held_out, timing = maybe_evaluate(run, update)
        is_best = run.best.record_evaluation(update, held_out) if held_out else False
        state.updates = update
        state.tokens, state.positions = state.tokens + result.totals.tokens, state.positions + result.totals.positions
        ranks = run.slow_ranks.add(update, result.seconds_before)
        metrics = result.metrics(run.length, run.throughput, seconds, held_out, timing, ranks)
        run.recorder.write(metrics)
        run.recorder.show(metrics)
        maybe_checkpoint(run, result, is_best and run.best.keeps, held_out)
        stop_reason = reason_to_stop(run, result)
        run.recorder.note(*run.checkpoints.messages(), *run.slow_ranks.messages())
        if stop_reason:
            return Stop(stop_reason)
    return Stop()


def begin(run: Run) -> UpdateStream:
    """The training data from the update on that the state is at: at the start of a launch, and after a rewind."""
    run.step.detector.begin(run.state.anomaly_history)
    run.recorder.begin(run.state.updates)
    if run.task.recipe.eval_on_start and not run.state.updates:
        evaluate_before_training(run)
    run.engine.model.train()
    run.memory.reset()
    return UpdateStream(run.task, run.engine, run.length, run.state.updates)


def evaluate_before_training(run: Run) -> None:
    """The held-out figures of update 0."""
    if run.task.evaluate is None:
        return
    run.phase("evaluate", 0)
    figures, timing = timed_evaluation(run.task, run.engine)
    run.state.held_out_before = run.state.held_out = figures
    run.throughput.evaluations.append(timing)
    run.recorder.write(UpdateMetrics.of_evaluation(figures, timing))


def report_anomaly(run: Run, anomaly: Anomaly) -> None:
    """Record an update that the step has not applied, and say it."""
    action = run.task.recipe.on_anomaly
    run.recorder.write_anomaly(anomaly, action)
    run.recorder.note(f"anomaly   update {anomaly.update}: {anomaly.reason}. {ACTIONS[action]}")


def maybe_evaluate(run: Run, update: int) -> tuple[dict[str, float], EvaluationTime | None]:
    """The held-out figures and how long they took, where an evaluation is due now; else ({}, None)."""
    steps = run.task.recipe.eval_steps
    is_due = run.length.is_last(update) or run.length.is_due("steps" if steps else "epoch", steps, update)
    if run.task.evaluate is None or not is_due:
        return {}, None
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
    return result.signals.stop_reason
