"""A run as its folder has it, while it trains and afterwards. Nothing in the folder is written or locked."""

import contextlib
import os
import platform
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zerofit.recipe.errors import UserError
from zerofit.recipe.parsing import read_record
from zerofit.recipe.paths import why_no_model
from zerofit.record.jsonl import LineReader
from zerofit.record.metrics import line_of_metrics
from zerofit.record.run_folder import RunFolder, is_count

RECENT = 20  # updates whose median is the speed
SILENT_S, SILENT_UPDATES = 60, 10  # a run without a new line for longer than both is silent
GONE_S = 10  # the same of one whose process is not there; it may be there, and not be seen from this container
RUNNING, SILENT, KILLED, FINISHED, EXIT = "running", "silent", "killed", "finished", "exit"


class WatchedRun:
    """One run; `poll` reads what is new.

    Attributes:
        lines: {update: its line in metrics.jsonl}.
        written_at: when the latest line was written, in seconds since 1970.
    """

    def __init__(self, path: Path):
        self.path, self.folder = path, RunFolder(path)
        self.recipe: dict[str, Any] = {}
        self.strategy: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}
        self.lines: dict[int, dict[str, Any]] = {}
        self.written_at = 0.0
        self._reader: LineReader | None = None
        self._file = None

    def poll(self) -> None:
        """Read what the run has written since the last call."""
        file, size = None, 0
        with contextlib.suppress(OSError):
            found = self.folder.metrics.path.stat()
            file, size, self.written_at = found.st_ino, found.st_size, found.st_mtime
        if self._reader is None or file != self._file or size < self._reader.position:  # a resume replaces the record
            self._reader = LineReader(self.folder.metrics.path, line_of_metrics)
            self._file, self.lines = file, {}
            self.recipe = read_record(self.path / "recipe.yaml")
            self.strategy = read_record(self.path / "strategy.yaml")
        self.lines |= {line["update"]: line for line in self._reader.poll()}
        self.environment = self.folder.environment()

    def last(self, name: str) -> Any:
        """A figure of the latest update that has it; None: there is none."""
        return next((line[name] for line in reversed(self.lines.values()) if name in line), None)

    def median(self, name: str) -> float | None:
        """The median of a figure over the latest updates; None: there is none."""
        values = [line[name] for line in list(self.lines.values())[-RECENT:] if name in line]
        return statistics.median(values) if values else None

    @property
    def updates(self) -> int:
        return max(self.lines, default=0)

    @property
    def num_updates(self) -> int | None:
        """The updates of the whole run; None: it cannot be told yet."""
        total, epochs = self.recipe.get("max_train_steps"), self.recipe.get("num_train_epochs")
        if total is None and (epoch := self.last("epoch")) and isinstance(epochs, (int, float)):
            total = round(epochs * self.updates / epoch)
        return total if is_count(total) else None

    @property
    def metric(self) -> str:
        """The name of the held-out figure that the run is judged by."""
        return str(self.recipe.get("metric_for_best_model") or "loss").removeprefix("eval_")

    @property
    def held_out(self) -> float | None:
        """The latest of it."""
        return self.last(f"eval_{self.metric}")

    def state(self, now: float) -> tuple[str, float]:
        """The state of the run, and with it how long it is silent, in seconds, or its exit code.

        Args:
            now: seconds since 1970.
        """
        code, silent_s = self.environment.get("exit_code"), now - self.written_at
        patience_s = SILENT_UPDATES * (self.median("seconds") or 0)
        if code is not None:
            return (EXIT, code) if code else (FINISHED, 0)
        if silent_s > max(GONE_S, patience_s) and self._process_is_gone():
            return KILLED, 0
        if silent_s > max(SILENT_S, patience_s):
            return SILENT, silent_s
        return RUNNING, 0

    def seconds_left(self) -> float | None:
        """Seconds to the end at the speed of the latest updates, without evaluations and checkpoints."""
        seconds, total = self.median("seconds"), self.num_updates
        return seconds * (total - self.updates) if seconds and total else None

    def _process_is_gone(self) -> bool:
        """Check whether the run's process was on this machine and has ended without an exit code. Its lock would tell
        as well, but who asks for a lock holds it for a moment, and may keep the run from starting again."""
        try:
            owner = re.match(r"process (\d+) of (.*)", (self.path / ".lock").read_text())
            if owner is None or owner[2] != platform.node():
                return False
            os.kill(int(owner[1]), 0)
        except (ProcessLookupError, OverflowError):
            return True
        except (OSError, ValueError):  # it is another user's, or there is no lock
            return False
        return False


class WatchedRuns:
    """The runs in some folders; `poll` finds those that have begun since the last call as well.

    Args:
        places: folders of runs, or folders of such folders.

    Raises:
        UserError: there is no such folder, or no run in any.
    """

    def __init__(self, places: Iterable[str]):
        self.places, self._runs = [Path(place).expanduser() for place in places], {}
        if missing := [str(place) for place in self.places if not place.is_dir()]:
            raise UserError(f"{missing[0]!r} is no folder. Name the folder of a run, or one with runs in it")
        if not self.poll():
            if why := why_no_model(str(self.places[0])):
                raise UserError(f"{self.places[0]}: {why}")
            raise UserError(f"no run in {', '.join(map(str, self.places))}. Name the folder of a run, or its parent")

    def poll(self) -> dict[str, WatchedRun]:
        """{name: run}, in the order of the folders, with what is new."""
        for place in self.places:
            below = [place] if _is_run(place) else filter(_is_run, sorted(place.iterdir()) if place.is_dir() else ())
            for path in below:
                self._runs.setdefault(path.resolve(), WatchedRun(path))
        for run in self._runs.values():
            run.poll()
        names = [path.name for path in self._runs]
        return {
            path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}": run
            for path, run in self._runs.items()
        }


def _is_run(path: Path) -> bool:
    """Check whether a run has begun there; a launch that failed before leaves an exit code and no more."""
    begun = "zerofit_commit" in RunFolder(path).environment()
    return begun or (path / "metrics.jsonl").is_file() or (path / "recipe.yaml").is_file()
