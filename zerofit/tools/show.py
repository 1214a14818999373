"""`zerofit show`: a table of runs, while they train and afterwards.

    zerofit show                                       # the runs in outputs/, once
    zerofit show --watch outputs/small outputs/large   # again and again, until every run has ended

It reads the folders of the runs, and writes nothing there.
"""

import contextlib
import platform
import re
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from zerofit.recipe.base import option
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import read_record
from zerofit.recipe.options import Recipe
from zerofit.recipe.parse import parse_recipe, take_words
from zerofit.recipe.paths import why_no_model
from zerofit.record.run_folder import RunFolder, is_count
from zerofit.record.terminal import decimals, duration, log_lines, rounded, screen_width, shortened, size, table

NUM_RECENT_UPDATES = 20  # the speed is a median over these
# a run without a new line for longer than both of these is silent
SILENT_AFTER_S = 60
SILENT_AFTER_UPDATES = 10
GONE_AFTER_S = 10  # instead of SILENT_AFTER_S, for a run whose process does not exist
STATE_RUNNING = "running"
STATE_SILENT = "silent"
STATE_KILLED = "killed"
STATE_FINISHED = "finished"
STATE_EXIT = "exit"


class WatchedRun:
    """A run, as read from its folder.

    Attributes:
        lines: {update: its line in metrics.jsonl}.
        written_at: when the latest line was written, in seconds since 1970.
    """

    def __init__(self, path: Path):
        folder = RunFolder(path)
        self.path = path
        files = [file for name in ("metrics.jsonl", "environment.json") if (file := path / name).exists()]
        self.written_at = max((file.stat().st_mtime for file in files), default=0.0)
        self.lines = {line["update"]: line for line in folder.metrics.read()}
        self.environment = folder.environment()
        self.recipe, self.strategy = (read_record(path / f"{name}.yaml") for name in ("recipe", "strategy"))

    def last(self, name: str) -> Any:
        """Return a figure of the latest update that has it; None: there is none."""
        return next((line[name] for line in reversed(self.lines.values()) if name in line), None)

    def median(self, name: str) -> float | None:
        """Return the median of a figure over the latest updates; None: there is none."""
        values = [line[name] for line in list(self.lines.values())[-NUM_RECENT_UPDATES:] if name in line]
        return statistics.median(values) if values else None

    @property
    def updates(self) -> int:
        """The number of the latest update."""
        return max(self.lines, default=0)

    @property
    def num_updates(self) -> int | None:
        """The number of updates of the whole run; None: not known yet."""
        total = self.recipe.get("max_train_steps")
        epochs = self.recipe.get("num_train_epochs")
        if total is None and (epoch := self.last("epoch")) and isinstance(epochs, (int, float)):
            total = round(epochs * self.updates / epoch)
        return total if is_count(total) else None

    @property
    def metric(self) -> str:
        """The name of the held-out figure that chooses the best checkpoint."""
        return str(self.recipe.get("metric_for_best_model") or "loss").removeprefix("eval_")

    @property
    def held_out(self) -> float | None:
        """The latest value of `metric`; None: there is none."""
        return self.last(f"eval_{self.metric}")

    def state(self, now: float) -> str:
        """Return the state of the run in words, with the time of its silence or its exit code. `now`: seconds since
        1970."""
        code = self.environment.get("exit_code")
        silent_s = now - self.written_at
        patience_s = SILENT_AFTER_UPDATES * (self.median("seconds") or 0)
        if code is not None:
            return f"{STATE_EXIT} {code}" if code else STATE_FINISHED
        if silent_s > max(GONE_AFTER_S, patience_s) and self._process_is_gone():
            return STATE_KILLED
        return f"{STATE_SILENT} {duration(silent_s)}" if silent_s > max(SILENT_AFTER_S, patience_s) else STATE_RUNNING

    def seconds_left(self) -> float | None:
        """Return the seconds to the end at the speed of the latest updates, without evaluations and checkpoints."""
        seconds = self.median("seconds")
        total = self.num_updates
        return seconds * (total - self.updates) if seconds and total else None

    def _process_is_gone(self) -> bool:
        """Return whether the run's process was on this machine and no longer exists. (To try its lock would tell as
        well, but may keep the run from starting again at that moment.)"""
        with contextlib.suppress(OSError, ValueError):  # there is no lock, or it names no process
            owner = re.match(r"process (\d+) of (.*)", (self.path / ".lock").read_text())
            return owner is not None and owner[2] == platform.node() and not psutil.pid_exists(int(owner[1]))
        return False


def find_runs(paths: Iterable[str]) -> dict[str, WatchedRun]:
    """Return {name: run} of the given folders of runs, or folders that contain them, in their order. Raises UserError:
    a folder does not exist, or there is no run in any."""
    folders = [Path(path).expanduser() for path in paths]
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise UserError(f"{missing[0]!r} is not a folder. Name the folder of a run, or one with runs in it")
    runs_by_folder = [[folder] if _is_run(folder) else filter(_is_run, sorted(folder.iterdir())) for folder in folders]
    run_paths = list(dict.fromkeys(path.resolve() for runs in runs_by_folder for path in runs))
    if not run_paths:
        why = why_no_model(str(folders[0])) or "there is no run. Name the folder of a run, or its parent"
        raise UserError(f"{folders[0]}: {why}")
    names = [path.name for path in run_paths]
    return {
        path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}": WatchedRun(path)
        for path in run_paths
    }


def _is_run(path: Path) -> bool:
    """Return whether a run has begun there; a launch that failed before its run leaves only an exit code."""
    begun = "zerofit_commit" in RunFolder(path).environment()
    return begun or (path / "metrics.jsonl").is_file() or (path / "recipe.yaml").is_file()


POLL_S = 2.0
MAX_STRATEGY_WIDTH = 12  # characters of a strategy's name


@dataclass
class ShowOptions(Recipe):
    """Folders of runs, or folders with runs in them (by default outputs)"""

    watch: bool = option(False, "Show the table again every 2 s, until every run has ended.")


def read_show_options(argv: list[str]) -> tuple[ShowOptions, list[str]]:
    """Return (options, folders)."""
    words, other_words = take_words(ShowOptions, argv)
    words += [word for word in other_words if word.startswith("-")]  # unknown options: the parser reports them
    options = parse_recipe(ShowOptions, words, prog="zerofit show [FOLDER ...]", tool=True)
    return options, [word for word in other_words if not word.startswith("-")] or ["outputs"]


def main(argv: list[str]) -> int:
    """Print the table; with --watch at a terminal again and again, until every run has ended."""
    options, folders = read_show_options(argv)
    while True:
        runs = find_runs(folders)
        width = screen_width()
        now = time.time()
        is_watched = options.watch and width is not None
        sys.stdout.write("\x1b[H\x1b[J" if is_watched else "")  # clear the screen
        log_lines(make_runs_table(runs, width, now))
        if not is_watched or not any(
            run.state(now).startswith((STATE_RUNNING, STATE_SILENT)) for run in runs.values()
        ):
            return 0
        time.sleep(POLL_S)


def make_runs_table(runs: dict[str, WatchedRun], width: int | None, now: float) -> str:
    """Return the table of runs as text. `width`: characters of the screen; `now`: seconds since 1970."""
    metrics = {run.metric for run in runs.values()}
    column = f"eval_{min(metrics)}" if len(metrics) == 1 else "held-out"
    head = ("run", "state", "update", "loss", column, "tokens/s", "memory", "left", "strategy")
    rows: list[tuple[str, ...]] = [head]
    for name, run in runs.items():
        state = run.state(now)
        left = run.seconds_left() if state == STATE_RUNNING else None
        loss = run.last("loss")
        speed = run.median("tokens_per_s")
        memory = run.last("peak_memory_bytes")
        held_out = "-" if run.held_out is None else decimals(run.held_out)
        cells = [
            name,
            state,
            f"{run.updates}/{run.num_updates}" if run.num_updates else str(run.updates),
            "-" if loss is None else decimals(loss),
            f"{run.metric} {held_out}" if len(metrics) > 1 else held_out,
            "-" if speed is None else rounded(speed),
            "-" if memory is None else size(memory),
            "-" if left is None else duration(left),
            shortened(str(run.strategy.get("name", "-")), MAX_STRATEGY_WIDTH),
        ]
        rows.append(tuple(cells))
    return table(rows, width)
