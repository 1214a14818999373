"""`zerofit show`: one table of all runs, which fits a terminal of 80 columns."""

import os
import sys
import time

from zerofit.recipe.errors import printable
from zerofit.record.terminal import columns_of, rounded, say, screen_width, shortened
from zerofit.tools.show.watched_run import EXIT, RUNNING, SILENT, WatchedRun, WatchedRuns

POLL_S = 2.0
HEAD = ("run", "strategy", "update", "loss", "held-out", "tokens/s", "memory", "left", "state")
RUN, STRATEGY = 12, 8  # columns that a name has at least
NOTHING = "-"


def show(runs: WatchedRuns, again: bool) -> None:
    """Print the table.

    Args:
        again: at a terminal again and again, until every run has ended.
    """
    height = 0
    while True:
        found = runs.poll()
        width, now = screen_width(), time.time()
        lines = table_of_runs(found, width, now).splitlines()
        if width is None or not again:
            say(*lines)
            return
        room = os.get_terminal_size().lines - 2
        if len(lines) > room > 1:
            lines = [*lines[:room], f"and {len(lines) - room} more: a higher terminal shows them"]
        sys.stdout.write(f"\x1b[{height}F\x1b[J" if height else "")
        say(*lines)
        height = len(lines)
        if not any(run.state(now)[0] in (RUNNING, SILENT) for run in found.values()):
            return
        time.sleep(POLL_S)


def table_of_runs(runs: dict[str, WatchedRun], width: int | None, now: float) -> str:
    """A line for each run, below the names of the columns.

    Args:
        width: of the screen; None: any. Names are shortened, and then the number of all updates is left out, where
            lines are longer.
        now: seconds since 1970.
    """
    metrics = {run.metric for run in runs.values()}  # that they are judged by
    held_out = f"eval_{min(metrics)}" if len(metrics) == 1 else "held-out"
    head = tuple(held_out if name == "held-out" else name for name in HEAD)
    for with_total in (True, False):
        rows = [head, *(row(name, run, now, with_total, len(metrics) > 1) for name, run in runs.items())]
        rows = [tuple(map(printable, cells)) for cells in rows]
        widths = [max(map(columns_of, column)) for column in zip(*rows)]
        for column, least in ((0, RUN), (1, STRATEGY)):
            excess = sum(widths) + len(HEAD) - 1 - (width or sum(widths) + len(HEAD))
            widths[column] = max(min(widths[column], least), widths[column] - max(excess, 0))
        if width is None or sum(widths) + len(HEAD) - 1 <= width:
            break
    return "\n".join(_line(cells, widths) for cells in rows)


def row(name: str, run: WatchedRun, now: float, with_total: bool, with_metric: bool = False) -> tuple[str, ...]:
    """The cells of one run.

    Args:
        with_metric: the held-out figure has its name, as others have another.
    """
    state, figure = run.state(now)
    state += f" {short_duration(figure)}" if state == SILENT else f" {figure}" if state == EXIT else ""
    left, total, tokens_per_s, memory = (
        run.seconds_left(),
        run.num_updates,
        run.median("tokens_per_s"),
        run.last("peak_memory_bytes"),
    )
    return (
        name,
        str(run.strategy.get("name", NOTHING)),
        f"{run.updates}/{total}" if total and with_total else str(run.updates),
        _loss(run.last("loss")),
        f"{run.metric} {_loss(run.held_out)}" if with_metric else _loss(run.held_out),
        NOTHING if tokens_per_s is None else short_number(tokens_per_s),
        NOTHING if memory is None else short_number(memory, 1024),
        short_duration(left) if left is not None and state == RUNNING else NOTHING,
        state,
    )


def short_duration(seconds: float) -> str:
    """45s, 12m, 3h05, 2d04."""
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes}m" if minutes else f"{max(int(seconds), 0)}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}" if hours < 24 else f"{hours // 24}d{hours % 24:02}"


def short_number(value: float, base: int = 1000) -> str:
    """12.3k, 1.2M; with base 1024 of bytes: 12.3k is 12.3 KiB."""
    power = 0
    while value >= base and power < 4:
        value, power = value / base, power + 1
    return f"{value:.1f}{' kMGT'[power]}".replace(" ", "") if power else f"{value:.0f}"


def _loss(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.3f}" if abs(value) < 100 and not 0 < abs(value) < 0.01 else rounded(value)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    texts = [_fitted(text, width) for text, width in zip(cells, widths)]
    gaps = [" " * (width - columns_of(text)) for text, width in zip(texts, widths)]
    named = [text + gap for text, gap in zip(texts[:2], gaps[:2])]
    return " ".join([*named, *(gap + text for text, gap in zip(texts[2:-1], gaps[2:-1])), texts[-1]]).rstrip()


def _fitted(text: str, width: int) -> str:
    """A text without its middle, where it takes more columns than `width`."""
    sizes = range(max(len(text), 3), 2, -1)
    return next(short for size in sizes if columns_of(short := shortened(text, size)) <= width)
