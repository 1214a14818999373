"""All trackers of accelerate: a run begins there, goes on after a resume, and gets its figures."""

import json
import subprocess
import sys

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from helpers import ROOT, environment

from zerofit.recipe import ClmRecipe
from zerofit.recipe.errors import UserError
from zerofit.recipe.options import TRACKERS
from zerofit.record.trackers import RESUMED, is_installed, tracker_options, wanted_trackers

# Where each tracker keeps what this test does, without a login or a server.
LOCAL = {
    "comet_ml": {"COMET_START_ONLINE": "0", "COMET_OFFLINE_DIRECTORY": "{folder}/comet"},
    "clearml": {"CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": "{folder}/clearml"},
    "mlflow": {"MLFLOW_TRACKING_URI": "sqlite:///{folder}/mlflow.db"},
    "trackio": {"TRACKIO_DIR": "{folder}/trackio"},
    "wandb": {"WANDB_SILENT": "true"},
}
PROGRAM = """
import json, sys
from types import SimpleNamespace
from accelerate import Accelerator
from zerofit.recipe import ClmRecipe
from zerofit.record.run_folder import RunFolder
from zerofit.record.trackers import start_trackers
tracker, path, updates, ids = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
folder, recipe = RunFolder(path), ClmRecipe(with_tracking=True, report_to=tracker)
state = SimpleNamespace(updates=updates, tracker_ids=ids)
accelerator = Accelerator(cpu=True, log_with=[tracker], project_dir=path)
notes = start_trackers(accelerator, [tracker], recipe, folder, "clm", state)
for update in range(updates + 1, updates + 4):
    accelerator.log({"loss": 4.0 / update, "eval_loss": float("nan"), "anomaly": 1, "skipped": True}, step=update)
accelerator.end_training()
print("\\n" + json.dumps({"ids": state.tracker_ids, "notes": notes}))
"""


def run(tracker: str, folder, updates: int, ids: dict) -> dict:
    variables = {name: value.format(folder=folder) for name, value in LOCAL.get(tracker, {}).items()}
    arguments = [tracker, str(folder), str(updates), json.dumps(ids)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, cwd=folder,
        env=environment(PYTHONPATH=str(ROOT), HOME=str(folder), **variables),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"ids"')))


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_run_begins_there_and_goes_on_after_a_resume(tracker, tmp_path):
    if not is_installed(tracker):
        pytest.skip(f"{tracker} is not installed")
    first = run(tracker, tmp_path, 0, {})
    assert (tracker in first["ids"]) == (tracker in RESUMED)
    assert run(tracker, tmp_path, 3, first["ids"])["ids"] == first["ids"]


def test_every_tracker_of_accelerate_is_one_of_ours():
    assert {*TRACKERS} == {*LOGGER_TYPE_TO_CLASS}
    assert len(TRACKERS) >= 9
    assert {*RESUMED} <= {*TRACKERS}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_that_is_missing_and_how_to_install_it(tracker, monkeypatch):
    monkeypatch.setattr("zerofit.record.trackers.is_installed", lambda name: name == "wandb")
    recipe = ClmRecipe(with_tracking=True, report_to=tracker)
    if tracker == "wandb":
        assert wanted_trackers(recipe) == ["wandb"]
        return
    with pytest.raises(UserError, match=f"report_to = '{tracker}'.*pip install {tracker}"):
        wanted_trackers(recipe)
    assert wanted_trackers(ClmRecipe(with_tracking=True)) == ["wandb"]
    assert wanted_trackers(ClmRecipe(report_to=tracker)) == []


def test_a_folder_that_a_tracker_has_written_is_no_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "aim_of_a_test").mkdir()
    assert not is_installed("aim_of_a_test")


def test_a_new_run_has_no_id_of_another_one(tmp_path):
    for tracker in TRACKERS:
        new, resumed = (tracker_options(tracker, "name", tmp_path, id, 4) for id in (None, "abc"))
        assert "abc" not in new.values()
        assert ("abc" in resumed.values()) == (tracker in RESUMED)
