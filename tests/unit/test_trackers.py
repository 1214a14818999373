"""All trackers of accelerate: a run begins there, goes on after a resume, and gets its figures."""

import json
import subprocess
import sys

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import LoggerType
from helpers import ROOT, environment

from zerofit.recipe import ClmRecipe
from zerofit.recipe.errors import UserError
from zerofit.recipe.options import TRACKERS
from zerofit.record.recorder import RESUMED, wanted_trackers

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
from zerofit.compat.accelerate import forget_state
from zerofit.recipe import ClmRecipe
from zerofit.record.run_folder import RunFolder
from zerofit.record.recorder import start_trackers
for tracker in sys.argv[2:]:
    ids = []
    for updates in (0, 3):
        recipe = ClmRecipe(with_tracking=True, report_to=tracker)
        state = SimpleNamespace(updates=updates, tracker_ids=ids[-1] if ids else {})
        accelerator = Accelerator(cpu=True, log_with=[tracker], project_dir=sys.argv[1])
        engine, config = SimpleNamespace(accelerator=accelerator), SimpleNamespace(trackers=[tracker])
        start_trackers(SimpleNamespace(recipe=recipe, folder=RunFolder(sys.argv[1]), state=state, engine=engine,
                                       config=config, task="clm"))
        for update in range(updates + 1, updates + 4):
            figures = {"loss": 4.0 / update, "eval_loss": float("nan"), "anomaly": 1, "skipped": True}
            accelerator.log(figures, step=update)
        accelerator.end_training()
        forget_state()
        ids.append(dict(state.tracker_ids))
    print("\\n" + json.dumps({"tracker": tracker, "ids": ids}))
"""


def test_a_run_begins_there_and_goes_on_after_a_resume(tmp_path):
    trackers = wanted_trackers(ClmRecipe(with_tracking=True, report_to="all"))
    assert "tensorboard" in trackers
    variables = {name: value.format(folder=tmp_path) for each in LOCAL.values() for name, value in each.items()}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), *trackers],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT), HOME=str(tmp_path), **variables),
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"tracker"')]
    assert [each["tracker"] for each in found] == trackers
    for each in found:
        first, again = each["ids"]
        assert (each["tracker"] in first) == (each["tracker"] in RESUMED)
        assert again == first


def test_every_tracker_of_accelerate_is_one_of_ours():
    assert {*TRACKERS} == {*LOGGER_TYPE_TO_CLASS}
    assert len(TRACKERS) >= 9
    assert {*RESUMED} <= {*TRACKERS}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_that_is_missing_and_how_to_install_it(tracker, monkeypatch):
    monkeypatch.setattr("zerofit.record.recorder.get_available_trackers", lambda: [LoggerType.WANDB])
    recipe = ClmRecipe(with_tracking=True, report_to=tracker)
    if tracker == "wandb":
        assert wanted_trackers(recipe) == ["wandb"]
        return
    with pytest.raises(UserError, match=f"report_to = '{tracker}'.*pip install {tracker}"):
        wanted_trackers(recipe)
    assert wanted_trackers(ClmRecipe(with_tracking=True)) == ["wandb"]
    assert wanted_trackers(ClmRecipe(report_to=tracker)) == []
