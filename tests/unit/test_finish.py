"""`zerofit compare --finish` without launches: which batch is trained, what is not trained again, and the table."""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers import ROOT, refusal, write_records

from zerofit.recipe.parse import parse_recipe
from zerofit.record.run_folder import RunFolder
from zerofit.strategy.launch import SHARES_DEVICES
from zerofit.tools.compare import finish
from zerofit.tools.compare.candidates import make_recipe, read_candidates
from zerofit.tools.compare.compare import CompareOptions
from zerofit.tools.compare.finish import (
    Finish,
    agreement,
    batch_to_train,
    finished_table,
    read_finished,
    values_to_finish,
)
from zerofit.tools.compare.trial_files import TrialJournal
from zerofit.tools.tool_recipe import read_with_recipe

CLS = ROOT / "recipes" / "cls" / "stdlib-packages.yaml"


def options(*flags, config=CLS):
    return read_with_recipe(CompareOptions, ["--config", str(config), *flags], "zerofit compare")


def row(size, name="ddp"):
    return SimpleNamespace(name=name, best={"size": size} if size else None)


def leave_run(folder: Path, rate: float = 10.0, f1: float = 0.8, **recipe) -> None:
    """What a finished run of 4 updates of 20 samples over 2 epochs leaves, evaluated before, in between and after."""
    (folder / "model").mkdir(parents=True)
    environment = {
        "finished": True,
        "zerofit_commit": "0123",
        "held_out": {"update": 2, "eval_loss": 0.5, "eval_f1": f1},
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    recipe = {"global_batch_size": 20, "per_device_eval_batch_size": 8, **recipe}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    lines = [{"update": 0, "eval_f1": 0.1, "evaluation_seconds": 9.0, "evaluation_samples_per_s": 5.0}]
    for update in range(1, 5):
        line = {"update": update, "epoch": update / 2, "consumed_samples": 20 * update, "seconds": 20 / rate,
                "loss": 3.0 - update / 2, "peak_memory_bytes": 2**30 + update}  # fmt: skip
        if update % 2 == 0:
            seconds = float(update)  # 2 and 4
            line |= {"eval_f1": 0.9, "evaluation_seconds": seconds, "evaluation_samples_per_s": 45 / seconds}
        lines.append(line)
    write_records(folder / "metrics.jsonl", lines)


# ----------------------------------------------------------------------------------------------------- what is trained


@pytest.mark.parametrize(("best", "global_batch", "size"), [
    (44, None, 44), (44, 64, 32), (44, 88, 44), (44, 90, 15), (8, 1024, 8), (200, 64, 32), (44, 2, 1),
])  # fmt: skip
def test_the_batch_divides_the_global_batch(best, global_batch, size):
    assert batch_to_train(row(best), global_batch, 2) == size


def test_runs_have_the_recipe_as_it_is(tmp_path):
    given, cls = options("--finish", "--save_steps", "50", "--eval_steps", "9", "--gradient_accumulation_steps", "4",
                         "--global_batch_size", "32")  # fmt: skip
    values = values_to_finish(given, cls)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    flags = ["--per_device_train_batch_size", "8", "--output_dir", "x"]
    run = parse_recipe(cls, ["--config", str(recipe), *flags])
    assert (run.global_batch_size, run.gradient_accumulation_steps) == (32, None)
    assert (run.eval_steps, run.save_steps, run.num_train_epochs) == (9, 50, given.num_train_epochs)
    assert "output_dir" not in values
    trials = make_recipe(given, cls).values
    assert not {"save_steps", "eval_steps", "global_batch_size"} & trials.keys(), "trials have no use for them"


def test_flags_without_effect_are_still_refused():
    said = refusal(make_recipe, *options("--finish", "--output_dir", "x"))
    assert "--output_dir has no effect" in said
    said = refusal(values_to_finish, *options("--finish", "--num_processes", "3"))
    assert "global_batch_size = 32" in said
    assert "no multiple of 3" in said


def test_trials_evaluate_one_batch_on_each_process():
    assert make_recipe(*options("--num_processes", "2")).values["max_eval_samples"] == 2 * 64
    given, cls = options(config=ROOT / "recipes" / "clm" / "compare-small.yaml")
    assert make_recipe(given, cls).values["max_eval_samples"] == given.num_processes, "of text, blocks"


# ------------------------------------------------------------------------------------------------------------ resuming


@pytest.fixture
def comparison(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "recipe.yaml").write_text("learning_rate: 0.001\n")
    candidates = read_candidates(["ddp", "zero2", "zero3"])
    rows = [row(8, "ddp"), row(16, "zero2"), row(None, "zero3")]
    machine = SimpleNamespace(settings={"A": "1"}, simulated={}, devices=[], identity={"cores": 2})
    return SimpleNamespace(
        options=SimpleNamespace(task="cls", num_processes=2, global_batch_size=None), candidates=candidates,
        rows=lambda: rows, machine=machine, journal=TrialJournal(tmp_path / "journal.jsonl"), output=tmp_path,
        pair_of=lambda candidate: candidate.name,
    )  # fmt: skip


@pytest.fixture
def launches(monkeypatch):
    """Launches that leave a finished run, or fail; the command lines of all of them."""
    said = SimpleNamespace(commands=[], environments=[], fails=False)

    @contextmanager
    def launched(command, output, log, mark, environment):
        said.commands.append(command)
        said.environments.append(environment)
        if not said.fails:
            leave_run(output)
        process = SimpleNamespace(returncode=int(said.fails), poll=lambda: int(said.fails))
        yield SimpleNamespace(wait=lambda limit: "ended", seconds=1.0, process=process, log=log,
                              text="error: nothing is held out\n" if said.fails else "")  # fmt: skip

    monkeypatch.setattr(finish, "launched", launched)
    return said


def test_what_is_finished_is_not_trained_again(comparison, launches, capsys):
    recipe = comparison.output / "recipe.yaml"
    first = Finish(comparison, recipe).run()
    assert [run.name for run in first] == ["ddp", "zero2"], "under zero3 no batch was found"
    assert [command[command.index("--per_device_train_batch_size") + 1] for command in launches.commands] == [
        "8",
        "16",
    ]
    assert launches.environments == [{"A": "1"}] * 2
    kinds = [line["kind"] for line in comparison.journal.lines]
    assert kinds == ["launch", "end"] * 2, "what is left of a killed comparison can be found"
    again = Finish(comparison, recipe).run()
    assert len(launches.commands) == 2
    assert finished_table(again) == finished_table(first)
    assert "trained at 8 per process before" in capsys.readouterr().out
    recipe.write_text("learning_rate: 0.002\n")
    changed = Finish(comparison, recipe).run()
    assert len(launches.commands) == 4, "another recipe is another run"
    assert not {run.folder for run in changed} & {run.folder for run in first}


def test_a_run_that_fails_is_told_and_launched_again(comparison, launches):
    launches.fails = True
    recipe = comparison.output / "recipe.yaml"
    failed = Finish(comparison, recipe).run()
    assert [run.problem for run in failed] == ["nothing is held out"] * 2
    assert finished_table(failed)[1][:3] == ("ddp", "8", "failed")
    launches.fails = False
    (folder,) = {run.folder for run in failed if run.name == "ddp"}
    assert not RunFolder(folder).is_finished
    runs = Finish(comparison, recipe).run()
    assert not any(run.problem for run in runs)
    assert runs[0].folder == folder, "it goes on where it was"


@pytest.mark.parametrize(("devices", "shares"), [(0, False), (1, True), (2, False)])
def test_processes_share_devices_where_the_trials_did(comparison, devices, shares):
    comparison.machine.devices = [{}] * devices
    found = Finish(comparison, comparison.output / "recipe.yaml").environment
    assert found.get(SHARES_DEVICES) == ("1" if shares else None)


# ----------------------------------------------------------------------------------------------------------- the table


def test_the_table_tells_training_and_evaluation_apart(tmp_path):
    leave_run(tmp_path / "run")
    run = read_finished("ddp", 5, tmp_path / "run")
    assert (run.updates, run.epochs, run.training_s, run.samples_per_s) == (4, 2.0, 8.0, 10.0)
    assert run.evaluation["evaluation_seconds"] == 4.0, "the median of 9, 2 and 4"
    head, line = finished_table([run])
    shown = dict(zip(head, line))
    assert shown["training"] == "8 s"
    assert shown["an epoch"] == "4 s"
    assert (shown["an evaluation"], shown["evaluation samples/s"]) == ("4 s", "11.2")
    assert (shown["f1"], shown["loss"]) == ("0.8000", "0.5000"), "of the weights in model/, not of the last evaluation"
    assert (shown["training loss"], shown["global batch"], shown["eval batch"]) == ("1.0000", "20", "8")
    assert shown["peak"] == "1.00 GiB"


def test_figures_are_compared_where_they_can_be(tmp_path):
    for name, changes in {"a": {}, "b": {"f1": 0.8 * 1.01}, "c": {"global_batch_size": 40}}.items():
        leave_run(tmp_path / name, **changes)
    a, b, c = (read_finished(name, 5, tmp_path / name) for name in "abc")
    assert agreement([a]) == ""
    assert "The final held-out figures are equal" in agreement([a, a])
    assert "differ by at most 1.0e-02 of a's (f1)" in agreement([a, b])
    assert "The global batches differ (20, 40)" in agreement([a, b, c])
    c.problem = "failed"
    assert "One global batch of 20 for all" in agreement([a, b, c])
