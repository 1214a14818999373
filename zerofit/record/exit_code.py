"""The exit code of a run in its environment.json, where a job script reads it: a launcher ends with codes of its own.

The code of the launch before is removed before anything can fail, so a code is always that of the last launch, and a
launch that has left none has crashed. The main process removes it, and writes how a run ended that all ranks left
together. A failure is written by the rank that has it, unless a code is there: the first failure is the cause of those
on other ranks.
"""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import yaml

from zerofit.recipe.parse import is_flag
from zerofit.recipe.paths import answers_folder, output_folder
from zerofit.record.run_folder import RunFolder

NAMES = ("output_dir", "evaluate_only", "predict_file", "model_name_or_path")


def find_folder(task: str, argv: list[str]) -> Path:
    """The run's folder, before its options are checked: also where one of them is wrong, or the YAML is broken."""
    options = _flags(argv)
    by_flag, recipe = "output_dir" in options, options.get("config")
    options = {**_lines(recipe), **options} if recipe else options
    named = {name: options.get(name) for name in NAMES}
    recipe = SimpleNamespace(**named, source=lambda name: options.get(name))
    if named["predict_file"] or str(named["evaluate_only"] or "false").lower() not in ("false", "no", "0"):
        return Path(named["output_dir"]) if by_flag else Path(answers_folder(task, recipe))
    return output_folder(task, recipe)


def _flags(argv: list[str]) -> dict[str, str]:
    """{option: its first value}, "true" where it has none."""
    found = {}
    for word, following in zip(argv, [*argv[1:], "--"]):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name.replace("-", "_")] = value if equals else "true" if is_flag(following) else following
    return found


def _lines(file: str) -> dict[str, str]:
    """The options of NAMES in a recipe, line by line: the file need not be valid YAML."""
    found = {}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            match = re.match(rf"({'|'.join(NAMES)})\s*:\s(.*)", line)
            with contextlib.suppress(yaml.YAMLError):
                value = yaml.safe_load(match[2]) if match else None
                found |= {} if value is None else {match[1]: str(value)}
    return found


class ExitCode:
    """The exit code of one launch. Nothing here raises: a run fails by its own cause.

    Args:
        environment: variables with the number of this rank.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] = os.environ):
        self.folder, self.is_main = RunFolder(folder), environment.get("RANK", "0") == "0"

    def forget(self) -> None:
        """Remove the code of the launch before; on the main process, while no other run is at work there."""
        with contextlib.suppress(OSError):
            environment = self.read()
            if self.is_main and "exit_code" in environment and not self._is_at_work():
                environment.pop("exit_code")
                environment.pop("exit_reason", None)
                if environment:
                    self.folder.write_environment(environment)
                else:  # of a launch that ended before it was a run
                    (self.folder.path / "environment.json").unlink()

    def write(self, code: int, reason: str | None = None) -> None:
        """Write how this launch ends, unless a rank has done so.

        Args:
            reason: what the run said last.
        """
        with contextlib.suppress(OSError):
            environment = self.read()
            if "exit_code" in environment or not self._is_ours(environment) or (self.is_main and self._is_at_work()):
                return
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self.folder.write_environment(
                {**environment, "exit_code": code, **({"exit_reason": reason} if reason else {})}
            )

    def read(self) -> dict:
        """environment.json; empty where there is none."""
        return self.folder.environment()

    def _is_ours(self, environment: dict) -> bool:
        """Whether the folder is a run's, or may become one."""
        folder = self.folder.path
        return "zerofit_commit" in environment or not folder.exists() or not set(os.listdir(folder)) - {".lock"}

    def _is_at_work(self) -> bool:
        """Whether another process holds the folder's lock."""
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            with (self.folder.path / ".lock").open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return f"process {os.getpid()} " not in file.read()
        return False
