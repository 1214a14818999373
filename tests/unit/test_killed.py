"""Runs of the real loop that are killed after any update: they resume, or start over, and end as if nobody had."""

import contextlib
import itertools
from pathlib import Path
from random import Random
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from test_saving import Alone

from zerofit.checkpoint.manager import CheckpointManager
from zerofit.checkpoint.resume import ResumePlan
from zerofit.checkpoint.writer import RunState
from zerofit.data.collate import Batch
from zerofit.health.anomaly import AnomalyDetector
from zerofit.health.shutdown import StopReason
from zerofit.health.slow_ranks import RankClock, SlowRanks
from zerofit.recipe import ClmRecipe
from zerofit.recipe.errors import UserError
from zerofit.record.run_folder import RunFolder
from zerofit.strategy.batches import BatchSizes
from zerofit.strategy.engine import Outcome
from zerofit.training.evaluation import make_best_tracker
from zerofit.training.run import Run
from zerofit.training.stream import Progress, run_length

UPDATES = 12
FIGURES = ("accuracy", "loss")


class Killed(Exception):
    """The process is gone."""


class Exporter:
    writes_all = True

    def __init__(self, engine):
        self.engine, self.weights = engine, engine.weights

    def write(self, weights, held_out, folder: Path) -> list[str]:
        from safetensors.torch import save_file

        folder.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in weights}, folder / "model.safetensors")
        return []

    def check_base(self, folder: Path) -> None:
        """There is no adapter."""


class SavingEngine(Alone):
    """Each step is one update of the real optimizer; `before` is called with its number."""

    strategy = SimpleNamespace(shards_parameters=False, fully_shards=False)

    def weights(self):
        return self.module.state_dict().items()

    def forward_backward(self, micro_batches, loss_sum, scale):
        return []

    def step(self, losses, bounds):
        self.before()
        return Outcome([torch.zeros(())], lambda: (False, [[1.0, 1.0, *bounds.report]]), [0])

    def sum_over_replicas(self, values):
        return [float(value) for value in values]

    def per_rank(self, values):
        return [[float(value) for value in values]]

    def set_learning_rate(self, rate):
        pass

    learning_rate = 0.1


class Launches:
    """The launches of one run, each in a process of its own, as it were.

    Args:
        held_out: what each evaluation finds: {update: {eval_accuracy, eval_loss}}.
    """

    def __init__(self, path: Path, held_out: dict[int, dict[str, float]], **options):
        self.folder, self.held_out, self.options = RunFolder(path), held_out, options
        self.said: list[str] = []

    def launch(self, killed_after: int | None = None, resume: tuple[str, ...] = ("auto",), **changes) -> RunState:
        """Train to the end, or until the update after this one is to be made. Returns the state at the end."""
        recipe = ClmRecipe(max_train_steps=UPDATES, dataloader_num_workers=0, **{**self.options, **changes})
        engine, state = SavingEngine(), RunState()
        best = make_best_tracker(recipe, FIGURES, True, state.best)
        parts = {"recipe": recipe, "engine": engine, "state": state, "best": best, "mirror": None}
        run = SimpleNamespace(folder=self.folder, exporter=Exporter(engine), **parts)
        checkpoints = CheckpointManager(run, {"strategy": "single", "num_processes": 1}, {})
        checkpoints._log = lambda *lines: self.said.extend(lines)
        checkpoints.resume(ResumePlan({}, sources=resume))
        checkpoints.drop_replaced()
        self.folder.start(recipe, 1, {}, {}, state.updates, resumed_from=checkpoints.resumed_from)
        checkpoints.restore_best_checkpoint()
        checkpoints.start()
        self.first = state.updates + 1

        def before() -> None:
            if state.updates == killed_after:
                checkpoints.writer.wait()
                raise Killed
            self.folder.metrics.add({"update": state.updates + 1})
            engine.train(range(state.updates + 1, state.updates + 2))

        engine.before = before
        recorder = MagicMock()
        recorder.bar.log_lines = lambda *lines: self.said.extend(lines)
        with contextlib.suppress(Killed):
            self._train(recipe, engine, state=state, best=best, checkpoints=checkpoints, recorder=recorder)
        self.folder.metrics.close()
        vars(self.folder)["_lock"] = None
        self.weights, self.loads = dict(engine.weights()), best.loads
        return state

    def _train(self, recipe, engine, **parts) -> None:
        """The loop of train/clm.py around a Run that opens no record, with these parts in place of its own."""
        run, an_epoch = Run.__new__(Run), 4  # samples, and updates
        vars(run).update(
            recipe=recipe,
            engine=engine,
            length=run_length(recipe, an_epoch, BatchSizes(1, 1, 1)),
            schedule=lambda update: 0.1,
            stop_reason=StopReason.NONE,
            warmup=None,
            counters=[],
            detector=AnomalyDetector(0.0, False, False),
            throughput=SimpleNamespace(rates_of=lambda *_: {"tokens_per_s": 1.0}, evaluations=[]),
            memory=SimpleNamespace(peak_bytes=lambda: 1, reset=lambda: None),
            clock=RankClock(engine),
            slow_ranks=SlowRanks(engine.layout, 10, str, "forward"),
            watchdog=SimpleNamespace(phase=lambda *_, **__: None),
            shutdown=SimpleNamespace(reason=lambda: StopReason.NONE),
            profiler=None,
            measurement=None,
            _has_stepped=True,
            seconds=None,
            _now=Progress(),
            **parts,
        )
        data = SimpleNamespace(train=SimpleNamespace(sort_key=None, lengths=None), order=None, num_held_out=1)

        def evaluate() -> dict[str, float]:
            return self.held_out[run.state.updates]

        for update in run.updates(data, None, evaluate_first=evaluate):
            outcome = engine.step(engine.forward_backward(update.micro_batches, None, update.scale), run.bounds())
            run.log(update, outcome)
            if run.should_evaluate(update):
                run.log_held_out(update, evaluate())
            if run.should_save(update):
                run.save(update)

    @property
    def best(self) -> str:
        best = self.folder.path / "checkpoints" / "best"
        return best.resolve().name if (best / "model" / "model.safetensors").is_file() else ""


@pytest.fixture(autouse=True)
def no_data(monkeypatch):
    monkeypatch.setattr("zerofit.checkpoint.directory.sync", lambda path: None)  # the machine does not fail here
    batches = [Batch({}, 1, 1, 1, [0])]
    monkeypatch.setattr("zerofit.training.run.open_record", MagicMock())
    monkeypatch.setattr("zerofit.training.run.update_batches", lambda run: itertools.repeat(batches))


SAVES = (
    {"save_minutes": 0.0},
    {"save_minutes": 30.0},
    {"save_steps": 1},
    {"save_steps": 3},
    {"save_steps": 3, "save_total_limit": 1},
    {"save_strategy": "epoch", "save_total_limit": 2},
    {"save_steps": 4, "load_best_model_at_end": False},
)


@pytest.mark.parametrize("number", range(len(SAVES)))
def test_patience_runs_out_at_the_same_update_wherever_a_run_was_killed(tmp_path, number):
    """Values go up and down, so that worse ones lie between two that are the best."""
    saves, eval_steps, draw = SAVES[number], (1, 2, None)[number % 3], Random(6 + number)  # each ends early
    held_out = {
        update: {"eval_accuracy": draw.choice((0.1, 0.2, 0.25, 0.3, 0.35)) - 0.01 * update, "eval_loss": 1.0}
        for update in range(UPDATES + 1)
    }
    options = {
        **saves, "early_stopping_patience": 1 + number % 2 * bool(eval_steps),
        "eval_steps": eval_steps, "save_async": False,
    }  # fmt: skip
    undisturbed = Launches(tmp_path / "undisturbed", held_out, **options)
    expected = undisturbed.launch()
    assert expected.updates < UPDATES
    for killed_after in range(1 + number % 2, expected.updates + 1, 2):
        run = Launches(tmp_path / f"{killed_after}", held_out, **options)
        run.launch(killed_after)
        state = run.launch()
        assert state.updates == expected.updates, killed_after
        assert vars(state.best) == vars(expected.best), killed_after
        assert run.best == undisturbed.best, killed_after
        for name, tensor in undisturbed.weights.items():
            assert tensor.equal(run.weights[name]), killed_after


def test_a_loop_that_takes_no_update_down_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "log", lambda *_: None)
    with pytest.raises(UserError, match=r"has not called run.log\(.* for update 1"):
        Launches(tmp_path, {0: {}}, eval_on_start=False).launch()


def falling(update: int) -> dict[str, float]:
    """Each evaluation is better than the one before, by both figures."""
    return {"eval_accuracy": 0.01 * update, "eval_loss": 1.0 - 0.01 * update}


def test_a_best_model_without_a_state_keeps_no_run_from_starting_over(tmp_path):
    held_out = {update: falling(update) for update in range(UPDATES + 1)}
    for number, options in enumerate(({}, {"save_minutes": 0.0})):
        run = Launches(tmp_path / f"{number}", held_out, eval_steps=3, save_async=False, **options)
        run.launch(killed_after=7)
        left = {folder.name for folder in (run.folder.path / "checkpoints").glob("update_*")}
        assert "update_00000006" in left
        run.launch(killed_after=1)
        assert run.first == 1
        assert any("it starts over; its models stay until they come again" in line for line in run.said)
        assert {folder.name for folder in (run.folder.path / "checkpoints").glob("update_*")} == left, (
            "nothing is lost"
        )
        run.launch()
        assert run.first == 1
        assert run.best == "update_00000012"


@pytest.mark.parametrize(("before", "now"), [("accuracy", "loss"), ("loss", "accuracy")])
@pytest.mark.parametrize("killed_after", [4, 7])
def test_another_metric_is_never_compared_with_the_old_value(tmp_path, before, now, killed_after):
    """A loss of 1 is no better than an accuracy of 0.5, nor an accuracy better than it."""
    held_out = {
        update: {"eval_accuracy": 0.5 + 0.001 * update, "eval_loss": 2.0 - 0.01 * update} for update in range(13)
    }
    options = {"eval_steps": 2, "save_steps": 1, "save_async": False, "early_stopping_patience": 2}
    run = Launches(tmp_path / "run", held_out, **options)
    run.launch(killed_after, metric_for_best_model=before)
    state = run.launch(metric_for_best_model=now)
    assert any(f"metric_for_best_model was {before}, and is {now} now" in line for line in run.said)
    assert (state.updates, state.best.update, state.best.metric) == (UPDATES, UPDATES, now)
    assert state.best.value == held_out[UPDATES][f"eval_{now}"]
    run.said.clear()
    run.launch(metric_for_best_model=now)
    assert not any("metric_for_best_model" in line for line in run.said), "said once"
