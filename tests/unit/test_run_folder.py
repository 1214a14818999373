"""A run's folder: what is never removed, what is read where a part of the record is lost, and links in it."""

import contextlib
import io
import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, check_refusal, refusal
from matplotlib.figure import Figure

from zerofit.checkpoint.directory import CheckpointDirectory, SaveReason
from zerofit.checkpoint.manager import START_OVER_OPTIONS, EarlierRuns
from zerofit.launch.command import exit_code_of, program_of
from zerofit.launch.exit_code import ExitCode, Restarts
from zerofit.model.adapter_folder import AdapterFolder, recorded_base
from zerofit.recipe import ClmRecipe, UserError, parse_recipe
from zerofit.recipe.paths import name_of_recipe, output_folder, why_no_model
from zerofit.recipe.tasks import TASKS, task_of_recipe
from zerofit.record.metrics import UpdateMetrics, plot_run
from zerofit.record.run_folder import RunFolder, identity_options
from zerofit.tools.doctor.doctor import DoctorOptions, read_doctor_options
from zerofit.tools.show import find_runs, make_runs_table
from zerofit.tools.submit.submit import reason_not_requeued
from zerofit.tools.tool_recipe import join_with_recipe

USERS = ("model/net.py", "checkpoints/mine.bin", "predictions_mine.jsonl", "results.tsv", "train.log")


def recipe(*flags: str) -> ClmRecipe:
    basic = ["--config_name", "gpt2", "--tokenizer_name", "x", "--train_file", "x.txt"]
    return parse_recipe(ClmRecipe, [*basic, *flags], prog="clm.py")


def checkpoint(path: Path, update: int, with_state: bool = True) -> Path:
    checkpoints = CheckpointDirectory(path / "checkpoints")
    partial = checkpoints.partial(update)
    (partial / "model").mkdir(parents=True)
    (partial / "model" / "weights").write_text("1")
    if with_state:
        (partial / "state").mkdir()
        run = {**identity_options(recipe(), 8), "options_given_for": 2, "strategy": "ddp"}
        (partial / "state" / "progress.json").write_text(json.dumps({"run": run}))
    checkpoints.finish(update, SaveReason.REQUESTED if with_state else SaveReason.BEST, False, {})
    return checkpoints.folder(update)


def a_run(path: Path, updates: int = 4, *, saved: int | None = 2, with_state: bool = True) -> RunFolder:
    """A run of `recipe()` that was killed after an update."""
    folder = RunFolder(path)
    folder.start(recipe(), 8, {"options_given_for": 2}, {})
    for update in range(1, updates + 1):
        folder.metrics.add({"update": update, "loss": 1.0})
    if saved:
        checkpoint(path, saved, with_state)
    folder.metrics.close()
    return RunFolder(path)


def plan(path: Path, *flags: str) -> list[str]:
    folder, options = RunFolder(path), recipe(*flags)
    earlier = EarlierRuns.read(options, folder)
    return list(earlier.plan(options, 8, folder).sources)


def restart(path: Path, updates: int = 0, resumed_from: Path | None = None) -> None:
    """What a launch does to the folder, once its plan is made."""
    CheckpointDirectory(path / "checkpoints").drop(lambda update: resumed_from != path or update > updates)
    RunFolder(path).start(recipe(), 8, {"options_given_for": 2}, {}, updates, resumed_from=resumed_from)


def put(path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("mine")


def left(path: Path, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if (path / name).is_file() and (path / name).read_text() == "mine"]


@pytest.mark.parametrize(("name", "content"), [
    ("metrics.jsonl", None), ("metrics.jsonl", ""), ("metrics.jsonl", '{"update": 1, "lo'),
    ("metrics.jsonl", '{"update": 1}\nnot json\n[1]\n{"update": 2}\n'), ("recipe.yaml", None), ("recipe.yaml", ""),
    ("recipe.yaml", "a: [1"), ("files.json", None), ("files.json", "{"), ("strategy.yaml", None),
])  # fmt: skip
def test_where_a_part_of_the_record_is_lost_the_run_is_read_from_its_checkpoint(tmp_path, name, content):
    a_run(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    assert plan(tmp_path) == ["auto"]
    said = refusal(plan, tmp_path, "--learning_rate", "1e-3")
    assert "holds a different run: learning_rate was 5e-05, now 0.001" in said
    restart(tmp_path, 2, tmp_path)
    assert (tmp_path / "checkpoints" / "update_00000002" / "model" / "weights").is_file()
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["learning_rate"] == 5e-5


@pytest.mark.parametrize("with_state", [False, True])
def test_checkpoints_are_deleted_only_where_that_is_said(tmp_path, with_state):
    a_run(tmp_path, with_state=with_state)
    check_refusal(["holds checkpoints/update_00000002", START_OVER_OPTIONS], plan, tmp_path, "--resume", "never")
    plan(tmp_path, *START_OVER_OPTIONS.split())
    restart(tmp_path)
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_a_run_that_left_no_state_may_start_over(tmp_path):
    """Its models are not a reason to refuse it for ever. They stay; a finished model is a reason."""
    a_run(tmp_path, with_state=False)
    assert plan(tmp_path) == ["auto"]
    assert (tmp_path / "checkpoints" / "update_00000002" / "model" / "weights").is_file()
    a_run(tmp_path / "there")
    named = str(tmp_path / "there" / "checkpoints" / "update_00000002")
    assert plan(tmp_path, "--resume", named, "--overwrite_output_dir") == ["auto", named]
    shutil.rmtree(tmp_path / "there")
    with RunFolder(tmp_path).new_model() as model:
        (model / "weights").write_text("1")
    assert START_OVER_OPTIONS in refusal(plan, tmp_path)


def damaged(content: bytes) -> dict[str, bytes]:
    """What a kill, a full disk, a bad disk or a hand make of a file."""
    return {
        "cut off": content[: len(content) // 2],
        "garbage": bytes(range(256)) * 3,
        "garbage behind it": content + b"\xff\xfe\x00{{{\n",
        "garbage before it": b"\x80\x00\n" + content,
        "empty": b"",
        "zeros": bytes(len(content)),
        "a list": b"[1, 2, 3]\n",
        "no keys": b"{}\n",
        "other keys": b'{"a": 1}\n',
        "other values": b'{"update": "x", "loss": [], "exit_code": "x", "finished": 1, "written": 3}\n'
        b'{"update": true}\n{"update": 2, "loss": "x", "grad_norm": null, "eval_loss": {}, "seconds": "x"}\n',
        "deep": b"[" * 10_000,
        "other sizes": b"global_batch_size: x\nnum_processes: two\ndata_parallel: [1]\noptions_given_for: true\n"
        b"max_train_steps: {a: 1}\nnum_train_epochs: no\nname: [1]\n",
    }


RECORDS = ("recipe.yaml", "strategy.yaml", "environment.json", "files.json", "metrics.jsonl", "samples.jsonl",
           "anomalies.jsonl", "stream.jsonl", "predictions.jsonl", "loss.png", ".lock")  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("kind", damaged(b""))
def test_a_damaged_record_is_passed_over_or_refused_in_a_sentence(tmp_path, name, kind):
    """Whoever reads it: a launch of this run, of another one, the launcher, a scheduler's job, `show`, the plot."""
    folder = a_run(tmp_path)
    folder.metrics.add({"update": 5, "loss": 1.0, "grad_norm": 1.0, "seconds": 0.5, "epoch": 0.5, "eval_loss": 1.0})
    for lines in (folder.samples, folder.anomalies):
        lines.add({"update": 1, "samples": [1]})
    folder.write_environment({"zerofit_commit": "x", "exit_code": 1, "finished": False})
    folder.write_predictions([{"label": "a", "prediction": "b"}, {"label": "a", "prediction": "a"}])
    for other in RECORDS[7:]:
        (tmp_path / other).touch()
    (tmp_path / name).write_bytes(damaged((tmp_path / name).read_bytes())[kind])

    ExitCode(tmp_path, {"RANK": "0"}).forget()
    with contextlib.suppress(UserError):
        options = recipe()
        earlier = EarlierRuns.read(options, RunFolder(tmp_path))
        for replicas in (1, 2, 4):
            earlier.keep_global_batch(options, replicas)
        sources = earlier.plan(options, 8, RunFolder(tmp_path)).sources
        assert sources == ("auto",), "its checkpoint says which run it is"
    with contextlib.suppress(UserError):
        plan(tmp_path, "--learning_rate", "1e-3")
    shown = find_runs([str(tmp_path)])
    make_runs_table(shown, 80, 0.0)
    if name == "metrics.jsonl":
        plot_run(RunFolder(tmp_path).metrics.read(), io.BytesIO(), "token", "accuracy")
    assert all(row["label"] == "a" for row in RunFolder(tmp_path).predictions("", ("label", "prediction")))
    assert Restarts(tmp_path).updates() in range(6)
    assert "this run has no model" in why_no_model(str(tmp_path)) or name == "environment.json"
    adapter = AdapterFolder(tmp_path / "model", "adapter", {"base_model_name_or_path": "./base"}, {})
    with contextlib.suppress(UserError):
        assert recorded_base(adapter) == "./base"
    assert reason_not_requeued(1, tmp_path, is_first=True) == ""
    assert isinstance(RunFolder(tmp_path).environment().get("exit_code", 0), int)
    with contextlib.suppress(UserError):
        restart(tmp_path, 2, tmp_path)
        lines = RunFolder(tmp_path).metrics.read()
        assert all(1 <= line["update"] <= 2 for line in lines)
        ExitCode(tmp_path, {"RANK": "0"}).write(7)


def test_a_launch_that_died_before_its_first_update_does_not_claim_the_folder(tmp_path):
    earlier = a_run(tmp_path / "other").path
    for begun_at, resumed_from in ((0, None), (4, earlier)):
        path = tmp_path / f"run-{begun_at}"
        other = recipe("--learning_rate", "1e-3")
        RunFolder(path).start(other, 8, {"options_given_for": 2}, {}, begun_at, resumed_from=resumed_from)
        RunFolder(path).metrics.add({"update": begun_at, "eval_loss": 1.0})
        assert plan(path) == []
        RunFolder(path).metrics.add({"update": begun_at + 1, "loss": 1.0})
        assert "learning_rate was 0.001" in refusal(plan, path)


@pytest.mark.parametrize("task", TASKS)
def test_a_runs_own_recipe_is_one_for_every_tool(tmp_path, task, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = sorted((ROOT / "recipes" / task).glob("st*.yaml"))[0]
    written = parse_recipe(TASKS[task], ["--config", str(file)])
    RunFolder(Path("outputs/mine")).start(written, 16, {"name": "ddp"}, {})
    own = "outputs/mine/recipe.yaml"
    assert task_of_recipe(own) == task
    found, _ = join_with_recipe(DoctorOptions, ["--config", own], "zerofit doctor")  # plan, compare, verify
    assert (found, read_doctor_options(["--config", own])[-1]) == (task, [])  # no line of it is a problem
    again = parse_recipe(TASKS[task], ["--config", own])
    assert program_of([own]) == [str(ROOT / f"train/{task}.py"), "--config", own]
    assert exit_code_of([own]).folder.path == Path(written.output_dir)
    again.output_dir = None
    assert output_folder(task, again) == Path("outputs/mine")
    assert name_of_recipe(own, task) == "mine"
    assert name_of_recipe(str(file), task) == file.stem
    assert name_of_recipe(None, task) == task


@pytest.mark.parametrize("names", [USERS, *((name,) for name in (*USERS, "recipe.yaml"))])
def test_a_folder_of_other_files_is_refused(tmp_path, names):
    put(tmp_path, names)
    said = refusal(plan, tmp_path)
    assert "holds what no run has written: " in said
    assert sum(name in said for name in names) == min(len(names), 3)
    assert left(tmp_path, names) == list(names)


def test_files_of_the_user_stay_where_a_run_starts_beside_them(tmp_path):
    put(tmp_path, USERS)
    said = refusal(plan, tmp_path, "--overwrite_output_dir")
    assert "model/net.py" in said, "it would lie in the run's model"
    (tmp_path / "model" / "net.py").unlink()
    plan(tmp_path, "--overwrite_output_dir")
    restart(tmp_path)
    kept = USERS[1:]
    assert left(tmp_path, kept) == list(kept)
    folder = RunFolder(tmp_path)
    folder.write_predictions([{}])
    assert "predictions_mine.jsonl was written by no run" in refusal(folder.write_predictions, [{}], "_mine")
    folder.metrics.add({"update": 1})
    checkpoint(tmp_path, 1)
    put(tmp_path, ("checkpoints/update_00000001/notes.txt",))
    assert plan(tmp_path) == ["auto"], "files beside a run are not in the way of its resume"
    assert "notes.txt" in refusal(plan, tmp_path, *START_OVER_OPTIONS.split())
    restart(tmp_path)  # what it removes, even so, is its own
    assert not (tmp_path / "predictions.jsonl").exists()
    assert not (tmp_path / "checkpoints" / "update_00000001" / "model").exists()
    assert left(tmp_path, kept) == list(kept)
    assert left(tmp_path, ("checkpoints/update_00000001/notes.txt",))


def test_a_record_that_names_files_elsewhere_removes_none(tmp_path):
    put(tmp_path, ("victim", "run/keep"))
    run = tmp_path / "run"
    names = ["../victim", str(tmp_path / "victim"), "link/victim"]
    (run / "link").symlink_to(tmp_path)
    (run / "files.json").write_text(json.dumps({"written": names, "begun_at": 0}))
    folder = RunFolder(run)
    folder.written.remove({*names, *folder.written.names})
    assert left(tmp_path, ("victim", "run/keep")) == ["victim", "run/keep"]


@pytest.mark.parametrize("name", ["recipe.yaml", "strategy.yaml", "environment.json", "metrics", "metrics.jsonl",
                                  "anomalies.jsonl", "predictions", "predictions.jsonl", "loss.png"])  # fmt: skip
def test_no_link_in_the_folder_is_written_through(tmp_path, name):
    """As an unpacked archive may hold them, with a record that says they are a run's."""
    put(tmp_path, ("victim",))
    run = tmp_path / "run"
    a_run(run)
    for link in (run / name, run / f"{name}.partial"):
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / "victim")
    RunFolder(run).start(recipe(), 8, {"options_given_for": 2}, {}, 2, resumed_from=run)
    folder = RunFolder(run)
    folder.metrics.add({"update": 3})
    with contextlib.suppress(OSError):  # ELOOP
        folder.anomalies.add({"update": 3})
    folder.write_predictions([{"a": 1}])
    folder.write_environment({})
    with folder.new_file("loss.png", "wb") as file:
        file.write(b"png")
    assert left(tmp_path, ("victim",))


@pytest.mark.parametrize("name", ["model", "checkpoints"])
def test_a_folder_that_is_a_link_is_neither_emptied_nor_filled(tmp_path, name):
    put(tmp_path, ("victims/config.json", "victims/update_00000009/state/x", "victims/update_00000009.partial/x"))
    run = tmp_path / "run"
    folder = a_run(run, saved=None)
    folder.written.add([f"{name}/config.json"])
    (run / name).symlink_to(tmp_path / "victims")
    for flags in ((), ("--overwrite_output_dir",), tuple(START_OVER_OPTIONS.split())):
        assert name in refusal(plan, run, *flags)
    folder.written.remove(folder.written.names)
    assert left(tmp_path, ("victims/config.json",))


def test_the_table_of_fields_is_current():
    named = {"held_out": "eval_...", "own": "..."}
    rows = [f"| `{named.get(each.name, each.name)}` | {each.metadata['meaning']} |" for each in fields(UpdateMetrics)]
    assert len(rows) > 20
    assert "\n".join(rows) in (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8")


def test_a_figure_of_ones_own_has_a_name_of_its_own():
    with pytest.raises(UserError, match=r"has loss, seconds: name your figure otherwise"):
        UpdateMetrics(update=1, epoch=0.0, consumed_samples=1, own={"seconds": 1.0, "loss": 0.0, "mine": 2.0})


@pytest.mark.parametrize("updates", [1, 5, 300])
def test_the_curves_of_a_run(monkeypatch, tmp_path, updates):
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, file: (save(figure, file), figures.append(figure)))
    lines = [{"update": n, "loss": 3.0 / n, "learning_rate": 2e-5, "grad_norm": 10.0**n if n < 9 else 1.0,
              "eval_loss": 2.0, "eval_accuracy": 0.5} for n in range(1, updates + 1)]  # fmt: skip
    lines.append({"update": updates + 1, "anomaly": "loss is nan", "loss": float("nan")})
    resumed = [1, 4] if updates > 4 else []
    plot_run(lines, tmp_path / "loss.png", "token", "accuracy", resumed=resumed)
    assert (tmp_path / "loss.png").stat().st_size > 10000
    upper, middle, lower, right = figures[-1].axes
    labels = {line.get_label(): line for line in upper.get_lines()}
    assert list(labels["training, each update"].get_ydata()) == [line["loss"] for line in lines[:-1]]
    assert list(labels["held out"].get_ydata()) == [2.0] * updates
    for axes in (upper, middle, lower):
        marked = [next(iter(line.get_xdata())) for line in axes.get_lines() if line.get_linestyle() == "--"]
        assert marked == resumed, "each resume is marked"
    assert list(middle.get_lines()[0].get_ydata()) == [0.5] * updates
    assert right.get_yscale() == ("linear" if updates == 1 else "log")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_updates_at_which_a_run_was_resumed_are_kept(tmp_path, elsewhere):
    """Also where a copy of the run in another folder goes on, and of one that goes back."""
    here, before = RunFolder(tmp_path / "run"), None
    for place, (updates, expected) in enumerate([(0, []), (4, [4]), (9, [4, 9]), (6, [4, 6])]):
        folder = RunFolder(tmp_path / f"run{place}") if elsewhere else here
        environment = {}
        folder.start(recipe(), 8, {}, environment, updates, resumed_from=before)
        assert environment.get("resumed_after", []) == expected
        assert folder.environment().get("resumed_after", []) == expected
        folder.metrics.close()
        before = folder.path
