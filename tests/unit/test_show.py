"""`zerofit show`: what it says of runs that train, are silent, were killed, have resumed or ended."""

import os
import platform
import subprocess
import sys

import pytest
import yaml
from helpers import recipe_of

from zerofit.cli import main
from zerofit.launch.exit_code import ExitCode
from zerofit.recipe import UserError
from zerofit.recipe.paths import check_paths
from zerofit.record.run_folder import RunFolder
from zerofit.tools.show import WatchedRun, find_runs, make_runs_table


def line(update: int, **changes) -> dict:
    figures = {"epoch": update / 50, "consumed_samples": 8 * update, "loss": 4 - update / 100, "seconds": 0.5,
               "tokens_per_s": 12345.6, "peak_memory_bytes": 3 * 2**30}  # fmt: skip
    return {"update": update, **figures, **changes}


def make_run(path, updates: int = 10, code: int | None = None, owner: int | None = None, **recipe) -> RunFolder:
    """The folder of a run that has made so many updates.

    Args:
        code: that it ended with; None: it has not.
        owner: the process that has begun it here; None: one on another machine.
    """
    path.mkdir(parents=True)
    folder = RunFolder(path)
    (path / "recipe.yaml").write_text(yaml.safe_dump({"max_train_steps": None, "num_train_epochs": 2, **recipe}))
    (path / "strategy.yaml").write_text("name: zero3_offload_optimizer\n")
    (path / ".lock").write_text(f"process {owner} of {platform.node()}\n" if owner else "process 1 of elsewhere\n")
    folder.write_environment({"zerofit_commit": "a", **({} if code is None else {"exit_code": code})})
    folder.metrics.start()
    for update in range(1, updates + 1):
        folder.metrics.add(line(update))
    return folder


def gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def watched(folder: RunFolder) -> WatchedRun:
    (run,) = find_runs([str(folder.path)]).values()
    return run


@pytest.mark.parametrize(
    ("options", "later_s", "state"),
    [
        ({}, 30, "running"),
        ({}, 600, "silent 10:00"),
        ({"owner": os.getpid()}, 600, "silent 10:00"),
        ({"owner": gone()}, 5, "running"),  # of another container: its lines come
        ({"owner": gone()}, 30, "killed"),
        ({"owner": gone(), "code": 0}, 600, "finished"),
        ({"code": 87}, 600, "exit 87"),
        ({"updates": 0}, 5, "running"),
    ],
)
def test_the_state_of_a_run(tmp_path, options, later_s, state):
    run = watched(make_run(tmp_path / "run", **options))
    assert run.state(run.written_at + later_s + 0.1) == state


def test_every_update_is_there_once_with_its_value_after_a_rewind(tmp_path):
    folder = make_run(tmp_path / "run", 6)
    assert list(find_runs([str(tmp_path)])["run"].lines) == [1, 2, 3, 4, 5, 6]
    folder.metrics.start(4)  # as a rewind or a resume does
    folder.metrics.add(line(5, loss=9.5))
    run = find_runs([str(tmp_path)])["run"]
    assert list(run.lines) == [1, 2, 3, 4, 5]
    assert run.lines[5]["loss"] == 9.5


def test_what_is_said_of_a_run(tmp_path):
    folder = make_run(tmp_path / "run")
    run = watched(folder)
    assert (run.updates, run.num_updates, run.seconds_left()) == (10, 100, 45)
    folder.metrics.add(line(11, eval_loss=2.5, eval_f1=0.5))
    folder.metrics.add({"update": 12, "epoch": 0.24, "consumed_samples": 96, "anomaly": "loss is nan"})
    run = watched(folder)
    assert (run.updates, run.last("loss"), run.held_out) == (12, 4 - 0.11, 2.5)
    other = watched(make_run(tmp_path / "other", max_train_steps=40, metric_for_best_model="f1"))
    assert (other.num_updates, other.held_out) == (40, None)


def test_the_column_names_the_figure(tmp_path):
    judged = {"a": None, "b": "accuracy", "c": "eval_bleu"}
    for name, metric in judged.items():
        folder = make_run(tmp_path / name, code=0, metric_for_best_model=metric)
        folder.metrics.add(line(11, eval_loss=2.5, eval_accuracy=0.75, eval_bleu=31.5))
    for names, head, cells in (
        ("a", "eval_loss", ["2.5000"]),
        ("b", "eval_accuracy", ["0.7500"]),
        ("ab", "held-out", ["loss 2.5000", "accuracy 0.7500"]),
        ("c", "eval_bleu", ["31.5000"]),
    ):
        runs = {name: watched(RunFolder(tmp_path / name)) for name in names}
        first, *rows = make_runs_table(runs, None, 0.0).splitlines()
        assert head in first.split(), first
        assert all(cell in row for cell, row in zip(cells, rows, strict=True)), rows


def test_runs_from_the_command_line(tmp_path, capsys, monkeypatch):
    """Twice the same name, a folder that is not a run, and one that still trains: the table is shown once."""
    monkeypatch.chdir(tmp_path)
    for name in ("outputs/run-01", "outputs/run-02", "elsewhere/run-01"):
        make_run(tmp_path / name, code=0 if name.startswith("outputs") else None)
    (tmp_path / "outputs" / "notes").mkdir()
    for words, names in (
        (["--watch"], ["run-01", "run-02"]),
        (["outputs/run-01", "elsewhere"], ["outputs/run-01", "elsewhere/run-01"]),
    ):
        assert main(["show", *words]) == 0
        assert [each.split()[0] for each in capsys.readouterr().out.splitlines()[1:]] == names


def test_a_launch_that_failed_before_it_was_a_run_is_not_listed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "outputs" / "good", code=0)
    (tmp_path / "outputs" / "failed").mkdir()
    ExitCode(tmp_path / "outputs" / "failed", {}).write(2, "error: no data")
    assert main(["show", "--watch"]) == 0
    assert "failed" not in capsys.readouterr().out
    assert main(["show", "--watch", "outputs/failed"]) == 2
    assert "ended with code 2 (no data)" in capsys.readouterr().err
    for words in (
        ["generate", "--model", "outputs/failed", "--prompt", "a"],
        ["merge", "--adapter", "outputs/failed", "--output", "merged"],
        "plan --gpu a100-40gb --task clm --model_name_or_path outputs/failed --train_file a.txt".split(),
    ):
        assert main(words) == 2
        assert "this run has no model: it ended with code 2" in capsys.readouterr().err, words
    with pytest.raises(UserError, match="it ended with code 2"):
        check_paths(recipe_of(model_name_or_path="outputs/failed"), tmp_path / "new")
    make_run(tmp_path / "outputs" / "at-work")
    with pytest.raises(UserError, match="it has not ended"):
        check_paths(recipe_of(model_name_or_path="outputs/at-work"), tmp_path / "new")


@pytest.mark.parametrize("words", [["outputs"], ["absent"], ["--wach"]])
def test_a_mistake(tmp_path, capsys, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    assert main(["show", *words]) == 2
    assert words[0] in capsys.readouterr().err
