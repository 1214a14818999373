"""The exit code of a run, and the failures after which a run is started again.

The code is in environment.json of the run's folder, where a job script reads it, since some launchers end with their
own codes. zerofit/launch/__init__.py says which process writes it. A launch that has left no code has crashed.

`zerofit launch --max_restarts` and `zerofit submit slurm` never start a run again after a mistake of the user, an
anomaly or out of memory, since the same command would end in the same way, after a signal to the launcher itself, or
after two failures at the same update. They always do after processes that have saved and left (85), which is not
counted.
"""

import contextlib
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

from zerofit.recipe.errors import (
    EXIT_NEEDS_A_PERSON,
    EXIT_OUT_OF_MEMORY,
    EXIT_TERMINATED,
    EXIT_TO_BE_RESUMED,
    EXIT_USER_ERROR,
    UserError,
    is_first_rank,
)
from zerofit.recipe.parse import read_recipe, wants_help
from zerofit.recipe.paths import answers_folder, output_folder
from zerofit.recipe.tasks import TASKS
from zerofit.record.metrics import JsonlFile
from zerofit.record.run_folder import RunFolder


def find_folder(task: str, argv: list[str]) -> Path:
    """Return the run's folder before its options are checked: some of them may be wrong."""
    argv = [] if wants_help(argv) else argv
    try:
        recipe, _ = read_recipe(TASKS[task], argv)
    except UserError:  # the recipe's file cannot be read
        words = [word for word, previous in zip(argv, ["", *argv]) if "--config" not in (word, previous)]
        recipe, _ = read_recipe(TASKS[task], [word for word in words if not word.startswith("--config=")])
    if recipe.trains:
        return output_folder(task, recipe)
    if recipe.output_dir and recipe.source("output_dir") == "--output_dir":
        return Path(recipe.output_dir)
    return Path(answers_folder(task, recipe))


class ExitCode:
    """The record of the exit code of one launch. A record that cannot be read or written is no error of the run."""

    def __init__(self, folder: Path, environment: Mapping[str, str] = os.environ):
        self.folder = RunFolder(folder)
        self.is_main = is_first_rank(environment)

    def forget(self) -> None:
        """Remove the code of an earlier launch; on the main process, unless another run is at work in the folder."""
        with contextlib.suppress(OSError):
            environment = self.folder.environment()
            if self.is_main and "exit_code" in environment and not self._is_at_work():
                environment.pop("exit_code")
                environment.pop("exit_reason", None)
                if environment:
                    self.folder.write_environment(environment)
                else:  # that launch ended before its run began
                    (self.folder.path / "environment.json").unlink()

    def write(self, code: int, reason: str | None = None) -> None:
        """Write how this launch ends, unless a rank has written it."""
        with contextlib.suppress(OSError):
            environment = self.folder.environment()
            folder = self.folder.path
            is_ours = "zerofit_commit" in environment or not folder.exists() or not set(os.listdir(folder)) - {".lock"}
            if "exit_code" in environment or not is_ours or (self.is_main and self._is_at_work()):
                return
            folder.mkdir(parents=True, exist_ok=True)
            environment |= {"exit_code": code} | ({"exit_reason": reason} if reason else {})
            self.folder.write_environment(environment)

    def _is_at_work(self) -> bool:
        """Return whether another process has locked the folder."""
        with contextlib.suppress(OSError):
            with (self.folder.path / ".lock").open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return f"process {os.getpid()} " not in file.read()
        return False


FINAL_CODES = {
    EXIT_USER_ERROR: "a mistake",
    EXIT_NEEDS_A_PERSON: "an anomaly, or a full disk",
    EXIT_OUT_OF_MEMORY: "out of memory",
}


class Restarts:
    """The decisions, after each failure, whether the ranks are started again."""

    def __init__(self, folder: Path | None, failed_after: int | None = None):
        self.folder = folder  # of the run
        self.failed_after = failed_after  # the update after which the last failure was
        self.is_stopped = False  # a signal has asked the launch to end

    def record_failure(self, codes: set[int]) -> str:
        """Take a failure into account. Returns why the processes are not started again; empty: they are. `codes`: the
        exit codes of the processes that have failed; a negative one is the signal that killed a process, and
        EXIT_TERMINATED that of processes which the agent has ended since."""
        if self.is_stopped:
            return "it was asked to end"
        if final := codes & FINAL_CODES.keys():
            return f"the same command would end in the same way: {FINAL_CODES[min(final)]}"
        if not have_saved(codes):
            previous = self.failed_after
            self.failed_after = self.updates()
            if self.failed_after == previous:
                return f"it has failed twice after update {previous}"
        return ""

    def updates(self) -> int:
        """Return the number of the last update in metrics.jsonl; 0 if there is none."""
        lines = [] if self.folder is None else JsonlFile(self.folder / "metrics.jsonl").read()
        return lines[-1]["update"] if lines else 0


def have_saved(codes: set[int]) -> bool:
    """Return whether processes with these exit codes have saved and left in order."""
    return EXIT_TO_BE_RESUMED in codes and codes <= {EXIT_TO_BE_RESUMED, EXIT_TERMINATED}


def code_of_run(codes: list[int]) -> int:
    """Return the exit code of a run from those of its machines. A code that needs a person goes first, and the code
    of processes that were ended because of others goes last."""
    if not any(codes):
        return 0
    if final := [code for code in codes if code in FINAL_CODES]:
        return min(final)
    if have_saved({*codes} - {0}):
        return EXIT_TO_BE_RESUMED
    return next((code for code in codes if code not in (0, EXIT_TERMINATED, EXIT_TO_BE_RESUMED)), max(codes))
