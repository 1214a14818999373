"""The exit code of a run in its environment.json, where a job script reads it: a launcher ends with codes of its own.

Which process writes it, and when: see zerofit/launch/__init__.py. A launch that has left no code has crashed.
"""

import contextlib
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

from zerofit.recipe.errors import UserError
from zerofit.recipe.help import wants_help
from zerofit.recipe.parse import read_recipe
from zerofit.recipe.paths import answers_folder, output_folder
from zerofit.recipe.tasks import TASKS
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
        self.folder, self.is_main = RunFolder(folder), environment.get("RANK", "0") == "0"

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
            self.folder.write_environment(
                {**environment, "exit_code": code, **({"exit_reason": reason} if reason else {})}
            )

    def _is_at_work(self) -> bool:
        """Return whether another process holds the folder's lock."""
        with contextlib.suppress(OSError):
            with (self.folder.path / ".lock").open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return f"process {os.getpid()} " not in file.read()
        return False
