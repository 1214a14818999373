"""The output of a run: a status line at a terminal, else a line at intervals; wrapped lines, tables and numbers."""

import contextlib
import errno
import io
import os
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from zerofit.recipe.errors import escape_controls
from zerofit.record.metrics import UpdateMetrics

if TYPE_CHECKING:
    from typing_extensions import Buffer  # collections.abc has it from Python 3.12 on

STATUS_INTERVAL_S = 0.5  # between two status lines at a terminal
LOG_INTERVAL_S = 30.0  # between two status lines in a log
MIN_NAME_COLUMNS = 28  # the first column of a table is never narrower
LABEL = re.compile(r"(?! )(?=.{4,16}\S)[^ ]+(?: [^ ]+)?  +")  # `held out    ` before a text


class _Lasting(io.FileIO):
    """A raw output stream whose errors do not end the run: it writes to the null device once nobody reads it any more
    (`| head`, a closed terminal), and it drops what a full disk (`> log`) cannot take."""

    def write(self, data: "Buffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return memoryview(data).nbytes
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes


def outlive_the_terminal() -> None:
    """Let this process continue after the reader of its output has gone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        lasting: _Lasting | io.BufferedWriter = _Lasting(stream.fileno(), "w", closefd=False)
        if not stream.write_through:  # with PYTHONUNBUFFERED there is no buffer
            lasting = io.BufferedWriter(lasting)
        wrapper = io.TextIOWrapper(lasting, stream.encoding, stream.errors)
        wrapper.reconfigure(line_buffering=stream.line_buffering, write_through=stream.write_through)
        setattr(sys, name, wrapper)


def log_lines(*lines: str, main: bool = True) -> None:
    """Print lines to stdout, on the main process, and flush them. At a terminal they are wrapped to its width."""
    if main and lines:
        print(*(on_screen(escape_controls(line), screen_width()) for line in lines), sep="\n", flush=True)


def log_to_stderr(text: str) -> None:
    """Print to stderr, since stdout holds only the text that a model generates."""
    print(on_screen(escape_controls(text), screen_width(sys.stderr)), file=sys.stderr, flush=True)


def screen_width(stream: TextIO | None = None) -> int | None:
    """Return the columns of the terminal that a stream (by default stdout) writes to; None if it is not a terminal:
    then lines may have any length."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return None
    columns = os.environ.get("COLUMNS", "")
    try:
        return (
            int(columns) if columns.isdigit() and int(columns) else os.get_terminal_size(stream.fileno()).columns or 80
        )
    except OSError:
        return 80


def fitted(pieces: list[str], width: int | None) -> str:
    """Return as many of the pieces, by priority, as a line of this width holds; the first one is always there."""
    while width is not None and len(pieces) > 1 and len("  ".join(pieces)) > width:
        pieces = pieces[:-1]
    return "  ".join(pieces)


def shortened(text: str, width: int) -> str:
    """Return a text (such as a path) with its middle left out if it needs more than `width` columns."""
    max_characters = min(len(text), width)
    result = text
    while columns_of(result) > width and max_characters > 3:
        head = (max_characters - 3) // 3
        result = f"{text[:head]}...{text[len(text) - (max_characters - 3 - head) :]}"
        max_characters -= 1
    return result


def on_screen(text: str, width: int | None) -> str:
    """Wrap each line of a text to this width. A continued line is indented to the text after a label (`note   ...`),
    or, without a label, by four columns more than the first line."""
    return "\n".join(wrapped(line, width) for line in text.split("\n"))


def wrapped(line: str, width: int | None, indent: int | None = None) -> str:
    """Wrap a line to this width; the lines after the first are indented."""
    if width is None or columns_of(line) <= width:
        return line
    if indent is None:
        label = LABEL.match(line)
        indent = len(label[0]) if label else len(line) - len(line.lstrip()) + 4
    words = line.split(" ")
    lines = [""]
    for place, word in enumerate(words):
        extended = f"{lines[-1]} {word}" if place else word
        if columns_of(extended) > width and lines[-1].strip():
            lines.append(" " * indent + word)
        else:
            lines[-1] = extended
    return "\n".join(line.rstrip() for line in lines)


def columns_of(text: str) -> int:
    """Count the columns of a text on a screen: two for each wide character (kanji, kana, ...)."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def table(rows: list[tuple[str, ...]], width: int | None = None) -> str:
    """Format rows as aligned columns, the first one to the left, the others to the right. If the table is wider than
    `width`, the heading gets one line for each word, and the first column gets narrower; columns that still do not fit
    follow in further tables."""
    rows = [tuple(escape_controls(cell.replace("\n", " ")) for cell in row) for row in rows]
    first, *others = _widths(rows)
    if width is not None and 2 + first + sum(others) + 2 * len(others) > width:
        words = [cell.split() or [""] for cell in rows[0]]
        height = max(map(len, words))
        rows = [*zip(*([""] * (height - len(cell)) + cell for cell in words)), *rows[1:]]
        first, *others = _widths(rows)
        first = min(first, max(MIN_NAME_COLUMNS, width - 2 - sum(others) - 2 * len(others)))
        num_fitting = 0
        while (
            num_fitting < len(others) and 2 + first + sum(others[: num_fitting + 1]) + 2 * (num_fitting + 1) <= width
        ):
            num_fitting += 1
        if 0 < num_fitting < len(others):
            remaining = [(row[0], *row[num_fitting + 1 :]) for row in rows]
            return _aligned([row[: num_fitting + 1] for row in rows], first, others) + "\n\n" + table(remaining, width)
    return _aligned(rows, first, others)


def _widths(rows: list[tuple[str, ...]]) -> list[int]:
    return [max(columns_of(row[column]) for row in rows) for column in range(len(rows[0]))]


def _aligned(rows: list[tuple[str, ...]], first: int, others: list[int]) -> str:
    lines = []
    for name, *cells in rows:
        name = shortened(name, first)
        padded = name + " " * (first - columns_of(name))
        lines.append("  " + "  ".join([padded, *(cell.rjust(wide) for cell, wide in zip(cells, others))]).rstrip())
    return "\n".join(lines)


def rounded(value: float, digits: int = 3) -> str:
    """Format a number with this many digits: 1234.5 -> 1,234 and 0.012345 -> 0.0123. Large ones have no exponent."""
    return f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g}"


def decimals(value: float) -> str:
    """Format a loss or a held-out figure: 2.3456, or, if it is small, 0.000123 or 1.23e-05."""
    return f"{value:.4f}" if not 0 < abs(value) < 0.01 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: 3725.0 -> 1:02:05."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def size(count: float) -> str:
    """Format a number of bytes in GiB, MiB or KiB, the largest unit of which there is at least one."""
    if count >= 2**30:
        return f"{count / 2**30:,.2f} GiB"
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 or not count else f"{count / 2**10:,.1f} KiB"


class StatusLine:
    """The progress on stderr: one line that is rewritten at a terminal, else a line at intervals."""

    def __init__(self) -> None:
        self.renewed = sys.stderr.isatty()
        self.shown = time.perf_counter()
        self.width = 0

    def is_due(self) -> bool:
        """Return True if the last line is old enough."""
        return time.perf_counter() - self.shown >= (STATUS_INTERVAL_S if self.renewed else LOG_INTERVAL_S)

    def show(self, pieces: list[str]) -> None:
        """Print as many of the pieces, by priority, as fit."""
        self.shown = time.perf_counter()
        width = screen_width(sys.stderr)
        line = escape_controls(fitted(pieces, width and width - 1))
        if not self.renewed:
            print(line, file=sys.stderr, flush=True)
            return
        print(f"\r{line:<{self.width}}", end="", file=sys.stderr, flush=True)
        self.width = len(line)

    def clear(self) -> None:
        """Remove the line, if it is at a terminal."""
        if self.renewed and self.width:
            print(f"\r{'':<{self.width}}\r", end="", file=sys.stderr, flush=True)
            self.width = 0

    def close(self) -> None:
        """End the status line, so that the next print begins a line."""
        if self.renewed and self.width:
            print(file=sys.stderr, flush=True)


@contextlib.contextmanager
def doing() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows at a terminal what is done now; the line is removed at the end. Without a terminal
    it prints nothing."""
    line = StatusLine()
    try:
        yield lambda text: line.show([text]) if line.renewed else None
    finally:
        line.clear()


class Bar(StatusLine):
    """The progress of a run: the status line at a terminal, else a line at intervals on stdout. By priority: update,
    loss, the script's own figures, time left, tokens/s, learning rate."""

    def __init__(self, total: int, every: int, main: bool):
        super().__init__()
        self.total = total
        self.every = every
        self.main = main
        self.figures: list[str] = []

    def begin(self, done: int) -> None:
        """Start at, or go back to, the update after `done`."""
        self.done = done
        self.started = time.perf_counter()

    def update(self, metrics: UpdateMetrics) -> None:
        """Show an update, with its figures unless it was not applied."""
        if not self.main:
            return
        number = metrics.update
        is_computed = not (metrics.anomaly or metrics.skipped)
        if is_computed and metrics.loss is not None:
            seconds_left = (time.perf_counter() - self.started) / (number - self.done) * (self.total - number)
            self.figures = [
                f"loss {decimals(metrics.loss)}",
                *(f"{name} {decimals(value)}" for name, value in (metrics.own or {}).items()),
                f"{duration(seconds_left)} left",
                f"{metrics.tokens_per_s:,.0f} tokens/s",
                f"lr {metrics.learning_rate:.2e}",
            ]
        pieces = [f"update {number:>{len(str(self.total))}}/{self.total}", *self.figures]
        if self.renewed and (self.is_due() or not self.width or number == self.total):
            self.show(pieces)
        elif not self.renewed and is_computed and (number % self.every == 0 or number in (self.done + 1, self.total)):
            log_lines(fitted(pieces, screen_width()))

    def log_lines(self, *texts: str) -> None:
        """Print lines in place of the status line, which the next update shows again."""
        if texts:
            self.clear()
            log_lines(*texts, main=self.main)
