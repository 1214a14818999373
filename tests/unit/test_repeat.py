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


def command_of(folder, error: str, variables: dict[str, str]) -> tuple[list, dict[str, str]]:
    """(command, environment) of a launcher, named as accelerate's, that runs a program which fails."""
    (folder / "accelerate").write_text(LAUNCHER)
    (folder / "run.py").write_text(RUN.format(error=error))
    command = [sys.executable, folder / "accelerate", "launch", folder / "run.py"]
    return command, environment(PYTHONPATH=str(ROOT), **variables)


def screen(folder, error: str, **variables: str) -> list[str]:
    """The lines of a terminal."""
    command, ours = command_of(folder, error, variables)
    return on_a_terminal(command, env=ours)[1].split("\r\n")


def shown(folder, error: str, **variables: str) -> list[str]:
    """The same lines without a terminal."""
    command, ours = command_of(folder, error, variables)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ours)
    return done.stdout.splitlines()


LAST = [
    ("UserError('epochs = 0: no')", "error: epochs = 0: no"),
    ("ValueError('no')", "ValueError: no (its traceback is above)"),
    ("KeyboardInterrupt()", "interrupted while the run was starting: its folder is unchanged"),
]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="who the launcher is, is read from /proc")


@on_linux
@pytest.mark.parametrize("lines_of", [screen, shown])
@pytest.mark.parametrize(("error", "last"), LAST)
def test_the_message_comes_once_below_the_launchers_traceback(tmp_path, lines_of, error, last):
    lines = lines_of(tmp_path, error)
    assert any(line.startswith("subprocess.CalledProcessError: Command") for line in lines)
    assert [line for line in lines if line][-1] == last
    assert lines.count(last) == 1


@on_linux
@pytest.mark.parametrize("lines_of", [screen, shown])
@pytest.mark.parametrize(("error", "last"), LAST)
def test_of_several_processes_torchruns_summary_has_it_or_it_comes_below(tmp_path, lines_of, error, last):
    file = tmp_path / "error.json"
    lines = lines_of(tmp_path, error, TORCHELASTIC_ERROR_FILE=str(file))
    content = json.loads(file.read_text())["message"]["message"]
    is_below = lines_of is screen or error.startswith("Keyboard")  # the launcher gets Ctrl-C itself
    assert content == ("its message is the last one below" if is_below else last)
    assert lines.count(last) == is_below
    assert [line for line in lines if line][-1] == last or not is_below
