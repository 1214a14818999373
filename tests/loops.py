"""The loop of train/clm.py around parts that tests choose, without a model or a process group."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

from zerofit.checkpoint.run_state import RunState
from zerofit.health.anomaly import AnomalyDetector
from zerofit.health.shutdown import StopReason
from zerofit.health.slow_ranks import RankClock, SlowRanks
from zerofit.record.meters import Rates
from zerofit.training.best_metric import BestMetricTracker
from zerofit.training.run import Run, Stop


def bare_run(recipe, engine, length, **parts: Any) -> Run:
    """A Run that opens no record, with these parts in place of its own."""
    run = Run.__new__(Run)
    vars(run).update(
        recipe=recipe,
        engine=engine,
        length=length,
        schedule=lambda update: 0.1,
        state=RunState(),
        stop=Stop(),
        warmup=None,
        counters=[],
        best=BestMetricTracker("loss"),
        recorder=MagicMock(),
        checkpoints=SimpleNamespace(
            messages=list,
            save=lambda *_: None,
            finish=lambda after_anomaly: None,
            is_due_by_clock=lambda: False,
            last_failed=False,
            rewind=lambda anomaly: False,
            writer=SimpleNamespace(has_failed=False),
        ),
        throughput=SimpleNamespace(of_update=lambda *_: Rates(1.0, 1.0, 1.0, None), evaluations=[]),
        memory=SimpleNamespace(peak_bytes=lambda: 1, reset=lambda: None),
        detector=AnomalyDetector(0.0, False, False),
        clock=RankClock(engine.device, alone=True),
        slow_ranks=SlowRanks(engine.layout, 10, str, "forward"),
        shutdown=SimpleNamespace(reason=lambda: StopReason.NONE),
        watchdog=SimpleNamespace(phase=lambda *_, **__: None),
        profiler=None,
        _kept_is_checked=True,
        measurement=None,
        _stop_reason=StopReason.NONE,
        _checkpoint_failed=False,
    )
    vars(run).update(parts)
    return run


def train(run: Run, data, collate, loss_sum=None, evaluate=None, **kwargs) -> Run:
    """The loop of the scripts."""
    with patch("zerofit.training.run.open_record"):
        return _train(run, data, collate, loss_sum, evaluate, **kwargs)


def _train(run: Run, data, collate, loss_sum, evaluate, **kwargs) -> Run:
    for update in run.updates(data, collate, evaluate_first=evaluate, **kwargs):
        losses = run.engine.forward_backward(update.micro_batches, loss_sum, update.scale)
        outcome = run.engine.step(losses, run.bounds())
        run.log(update, outcome)
        if run.should_evaluate(update):
            run.log_held_out(update, evaluate())
        if run.should_save(update):
            run.save(update)
    return run
