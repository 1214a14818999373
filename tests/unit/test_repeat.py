"""The last words on a terminal are the run's, and not its launcher's."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT, environment, on_a_terminal

LAUNCHER = """
import subprocess, sys
code = subprocess.run([sys.executable, sys.argv[-1]]).returncode
raise subprocess.CalledProcessError(code, "the command " * 20)
"""
RUN = """
from zerofit.recipe.errors import UserError, reports_user_errors

@reports_user_errors
def main(argv=None):
    raise {error}

raise SystemExit(main())
"""


def lines_of(folder, error: str, on_screen: bool, **variables: str) -> list[str]:
    """The lines that a launcher and its program print, which fails; on a terminal or not."""
    (folder / "launcher").write_text(LAUNCHER)
    (folder / "run.py").write_text(RUN.format(error=error))
    command, ours = (
        [sys.executable, folder / "launcher", folder / "run.py"],
        environment(PYTHONPATH=str(ROOT), **variables),
    )
    if on_screen:
        return on_a_terminal(command, env=ours)[1].split("\r\n")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ours)
    return done.stdout.splitlines()


LAST = [
    ("UserError('epochs = 0: no')", "error: epochs = 0: no"),
    ("ValueError('no')", "ValueError: no (its traceback is above)"),
    ("KeyboardInterrupt()", "interrupted while the run was starting: its folder is unchanged"),
]
ACCELERATE = {"ACCELERATE_DYNAMO_BACKEND": "NO"}


@pytest.mark.parametrize(("error", "last"), LAST)
@pytest.mark.parametrize("on_screen", [True, False])
def test_of_several_processes_torchruns_summary_has_it(tmp_path, error, last, on_screen):
    file = tmp_path / "error.json"
    lines = lines_of(tmp_path, error, on_screen, TORCHELASTIC_ERROR_FILE=str(file), **ACCELERATE)
    if error.startswith("Keyboard"):  # the launcher gets Ctrl-C itself
        assert lines.count(last) == 1
        assert not file.exists()
    else:
        assert json.loads(file.read_text())["message"]["message"] == last
        assert last not in lines


def test_a_log_and_a_launch_without_a_traceback_have_the_message_once(tmp_path):
    error, last = LAST[0]
    for on_screen, variables in ((False, ACCELERATE), (True, {"ZEROFIT_LAUNCHER": "{}"}), (True, {})):
        assert lines_of(tmp_path, error, on_screen, **variables).count(last) == 1
