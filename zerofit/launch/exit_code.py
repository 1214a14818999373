"""The exit code of a run in its environment.json, where a job script reads it (a launcher ends with codes of its own);
and after which failures a run is started again, by `zerofit launch --max_restarts` (agent.py) and by the batch script
of `zerofit submit slurm`.

Which process writes the code, and when: see zerofit/launch/__init__.py. A launch that has left none has crashed.

A run is started again never after a mistake of the user, an anomaly or an out-of-memory, since the same command would
end in the same way, nor after a signal to the launcher itself; always after processes that have saved and left
otherwise (85), which does not count; and not after two failures at the same update.
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
    """The run's folder, before its options are checked: also where one of them is wrong."""
    argv = [] if wants_help(argv) else argv
    try:
        recipe, _ = read_recipe(TASKS[task], argv)
    except UserError:  # the recipe's file cannot be read
        words = [word for word, before in zip(argv, ["", *argv]) if before != "--config"]
        recipe, _ = read_recipe(TASKS[task], [word for word in words if word.partition("=")[0] != "--config"])
    if recipe.trains:
        return output_folder(task, recipe)
    if recipe.output_dir and recipe.source("output_dir") == "--output_dir":
        return Path(recipe.output_dir)
    return Path(answers_folder(task, recipe))


class ExitCode:
    """The exit code of one launch. Nothing here raises: a run fails by its own cause."""

    def __init__(self, folder: Path, environment: Mapping[str, str] = os.environ):
        self.folder = RunFolder(folder)
        self.is_main = is_first_rank(environment)

    def forget(self) -> None:
        """Remove the code of the launch before; on the main process, while no other run is at work there."""
        with contextlib.suppress(OSError):
            environment = self.folder.environment()
            if self.is_main and "exit_code" in environment and not self._is_at_work():
                environment.pop("exit_code")
                environment.pop("exit_reason", None)
                if environment:
                    self.folder.write_environment(environment)
                else:  # of a launch that ended before it was a run
                    (self.folder.path / "environment.json").unlink()

    def write(self, code: int, reason: str | None = None) -> None:
        """Write how this launch ends, unless a rank has done so."""
        with contextlib.suppress(OSError):
            environment = self.folder.environment()
            folder = self.folder.path
            is_ours = "zerofit_commit" in environment or not folder.exists() or not set(os.listdir(folder)) - {".lock"}
            if "exit_code" in environment or not is_ours or (self.is_main and self._is_at_work()):
                return
            self.folder.path.mkdir(parents=True, exist_ok=True)
            environment |= {"exit_code": code} | ({"exit_reason": reason} if reason else {})
            self.folder.write_environment(environment)

    def _is_at_work(self) -> bool:
        """Return whether another process holds the folder's lock."""
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
    """Decides after each failure whether the ranks are started again."""

    def __init__(self, folder: Path | None, failed_after: int | None = None):
        self.folder = folder
        self.is_stopped = False  # somebody has asked the launch to end
        self.failed_after = failed_after

    def record_failure(self, codes: set[int]) -> str:
        """Take a failure into account. Returns why the processes are not started again; empty where they are. `codes`:
        of the processes that have failed; negative: the signal that killed one. Those that the agent has ended since
        have EXIT_TERMINATED."""
        if self.is_stopped:
            return "it was asked to end"
        if final := codes & FINAL_CODES.keys():
            return f"the same command would end in the same way: {FINAL_CODES[min(final)]}"
        if not have_saved(codes):
            before = self.failed_after
            self.failed_after = self.updates()
            if self.failed_after == before:
                return f"it has failed twice after update {before}"
        return ""

    def updates(self) -> int:
        """The last update in metrics.jsonl; 0 where there is none."""
        lines = [] if self.folder is None else JsonlFile(self.folder / "metrics.jsonl").read()
        return lines[-1]["update"] if lines else 0


def have_saved(codes: set[int]) -> bool:
    """Return whether the processes have left in order."""
    return EXIT_TO_BE_RESUMED in codes and codes <= {EXIT_TO_BE_RESUMED, EXIT_TERMINATED}


def code_of_run(codes: list[int]) -> int:
    """The exit code of a run from those of its machines: what needs a person goes first, and a process that was
    ended because of another goes last."""
    if not any(codes):
        return 0
    if final := [code for code in codes if code in FINAL_CODES]:
        return min(final)
    if have_saved({*codes} - {0}):
        return EXIT_TO_BE_RESUMED
    return next((code for code in codes if code not in (0, EXIT_TERMINATED, EXIT_TO_BE_RESUMED)), max(codes))
