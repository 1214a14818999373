r"""`zerofit show`: runs side by side, in one table.

    zerofit show                                       # the runs in outputs/, once
    zerofit show --watch outputs/small outputs/large   # again and again, until every run has ended

It reads the folders of the runs, and writes nothing there.
"""

import sys
import time
from dataclasses import dataclass

from zerofit.recipe.fields import option
from zerofit.recipe.options import Recipe
from zerofit.recipe.parse import parse_recipe, take_words
from zerofit.record.terminal import decimals, duration, log_lines, rounded, screen_width, shortened, size, table
from zerofit.tools.show.watched_run import RUNNING, SILENT, WatchedRun, runs_in

POLL_S = 2.0
STRATEGY = 12  # columns of a strategy's name


@dataclass
class ShowOptions(Recipe):
    """Folders of runs, or folders with runs in them (by default outputs)"""

    watch: bool = option(False, "Show the table again every 2 s, until every run has ended.")


def read_options(argv: list[str]) -> tuple[ShowOptions, list[str]]:
    """Return (options, folders)."""
    taken, rest = take_words(ShowOptions, argv)
    words = [word for words in taken for word in words] + [word for word in rest if word.startswith("-")]
    options = parse_recipe(ShowOptions, words, prog="zerofit show [FOLDER ...]", tool=True)
    return options, [word for word in rest if not word.startswith("-")] or ["outputs"]


def main(argv: list[str] | None = None) -> int:
    """Print the table; with --watch at a terminal again and again, until every run has ended."""
    options, places = read_options(list(argv or []))
    while True:
        found, width, now = runs_in(places), screen_width(), time.time()
        is_watched = options.watch and width is not None
        sys.stdout.write("\x1b[H\x1b[J" if is_watched else "")  # from the top of an empty screen
        log_lines(table_of_runs(found, width, now))
        if not is_watched or not any(run.state(now).startswith((RUNNING, SILENT)) for run in found.values()):
            return 0
        time.sleep(POLL_S)


def table_of_runs(runs: dict[str, WatchedRun], width: int | None, now: float) -> str:
    """A line for each run, below the names of the columns; `width` in columns, `now` in seconds since 1970."""
    metrics = {run.metric for run in runs.values()}  # that they are judged by
    held_out = f"eval_{min(metrics)}" if len(metrics) == 1 else "held-out"
    head = ("run", "state", "update", "loss", held_out, "tokens/s", "memory", "left", "strategy")
    return table([head, *(_row(name, run, now, len(metrics) > 1) for name, run in runs.items())], width)


def _row(name: str, run: WatchedRun, now: float, with_metric: bool) -> tuple[str, ...]:
    """The cells of one run; `with_metric`: with the name of its held-out figure, as others have another."""
    state = run.state(now)
    left = run.seconds_left() if state == RUNNING else None
    figures = {decimals: run.last("loss"), rounded: run.median("tokens_per_s"), size: run.last("peak_memory_bytes")}
    loss, speed, memory = ("-" if value is None else shown(value) for shown, value in figures.items())
    held_out = "-" if run.held_out is None else decimals(run.held_out)
    return (
        name,
        state,
        f"{run.updates}/{run.num_updates}" if run.num_updates else str(run.updates),
        loss,
        f"{run.metric} {held_out}" if with_metric else held_out,
        speed,
        memory,
        "-" if left is None else duration(left),
        shortened(str(run.strategy.get("name", "-")), STRATEGY),
    )
