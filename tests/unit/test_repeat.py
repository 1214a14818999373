"""The last words on a terminal are the run's, and not its launcher's."""

import os
import pty
import subprocess
import sys

import pytest
from helpers import ROOT, environment

from train.recipe.last_message import repeat_after_launcher

LAUNCHER = """
import subprocess, sys
code = subprocess.run([sys.executable, sys.argv[-1]]).returncode
if "--quiet" in sys.argv:
    sys.exit(1)
raise subprocess.CalledProcessError(code, "the command " * 20)
"""
RUN = """
from train.recipe.errors import UserError, reports_user_errors

@reports_user_errors
def main(argv=None):
    raise {error}

raise SystemExit(main())
"""


def screen(folder, error: str, *flags: str, **variables: str) -> list[str]:
    """The lines of a terminal on which a launcher, named as accelerate's, has run a program that fails."""
    (folder / "accelerate").write_text(LAUNCHER)
    (folder / "run.py").write_text(RUN.format(error=error))
    master, slave = pty.openpty()
    command = [sys.executable, str(folder / "accelerate"), "launch", *flags, str(folder / "run.py")]
    variables = environment(PYTHONPATH=str(ROOT), **variables)
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=variables):
        os.close(slave)
        shown = b""
        try:
            while read := os.read(master, 65536):
                shown += read
        except OSError:  # nobody has the terminal any more
            pass
    os.close(master)
    return shown.decode().split("\r\n")


@pytest.mark.skipif(sys.platform != "linux", reason="who the launcher is, is read from /proc")
@pytest.mark.parametrize(
    ("error", "last"),
    [
        ("UserError('epochs = 0: no')", "error: epochs = 0: no"),
        ("ValueError('no')", "ValueError: no (its traceback is above)"),
        ("KeyboardInterrupt()", "interrupted while the run was starting: its folder is unchanged"),
    ],
)
def test_the_message_comes_after_the_launchers_traceback(tmp_path, error, last):
    lines = screen(tmp_path, error)
    assert any(line.startswith("subprocess.CalledProcessError: Command") for line in lines)
    assert [line for line in lines if line][-1] == last


@pytest.mark.skipif(sys.platform != "linux", reason="who the launcher is, is read from /proc")
def test_after_ctrl_c_torchrun_shows_no_summary(tmp_path):
    lines = screen(tmp_path, "KeyboardInterrupt()", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    assert [line for line in lines if line][-1].startswith("interrupted while the run was starting")


@pytest.mark.skipif(sys.platform != "linux", reason="who the launcher is, is read from /proc")
def test_it_comes_once_where_the_launcher_is_quiet(tmp_path):
    lines = screen(tmp_path, "UserError('epochs = 0: no')", "--quiet")
    assert lines.count("error: epochs = 0: no") == 1


def test_torchruns_summary_has_the_message(tmp_path, monkeypatch):
    """The error file, as torch reads it."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    repeat_after_launcher("error: 2 problems\n  1. one\n  2. two")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    summary = str(ChildFailedError("train/clm.py", {0: failure})).splitlines()
    assert summary[-4:-1] == ["  traceback : error: 2 problems", "    1. one", "    2. two"]
