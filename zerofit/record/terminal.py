"""The terminal of a run: a status line where there is one, else a line now and then; wrapped lines and tables."""

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

# between two status lines
AT_A_TERMINAL_S = 0.5
ELSEWHERE_S = 30.0
READABLE = 28  # characters of a path that tell which one it is
LABEL = re.compile(r"(?! )(?=.{4,16}\S)[^ ]+(?: [^ ]+)?  +")  # `held out    ` before a text


class _Lasting(io.FileIO):
    """A descriptor to write to, which leads nowhere when nobody reads it any more (`| head`, a closed terminal). What
    a full disk does not take (`> log`) is lost, and ends no run."""

    def write(self, data: "Buffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return memoryview(data).nbytes
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes


def outlive_the_terminal() -> None:
    """Let this process go on when what it prints is no longer read."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        lasting: _Lasting | io.BufferedWriter = _Lasting(stream.fileno(), "w", closefd=False)
        if not stream.write_through:  # PYTHONUNBUFFERED: the interpreter leaves out this buffer as well
            lasting = io.BufferedWriter(lasting)
        wrapper = io.TextIOWrapper(lasting, stream.encoding, stream.errors)
        wrapper.reconfigure(line_buffering=stream.line_buffering, write_through=stream.write_through)
        setattr(sys, name, wrapper)


def log_lines(*lines: str, main: bool = True) -> None:
    """Print to stdout at once, on the main process; nothing where there are no lines. At a terminal lines are wrapped
    to its width."""
    if main and lines:
        print(*(on_screen(escape_controls(line), screen_width()) for line in lines), sep="\n", flush=True)


def log_to_stderr(text: str) -> None:
    """Print to stderr: stdout has what a model writes, and nothing else."""
    print(on_screen(escape_controls(text), screen_width(sys.stderr)), file=sys.stderr, flush=True)


def screen_width(stream: TextIO | None = None) -> int | None:
    """The columns of the terminal that a stream (by default stdout) writes to; None: it is not a terminal, and lines
    may be of any length."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return None
    told = os.environ.get("COLUMNS", "")
    try:
        return int(told) if told.isdigit() and int(told) else os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def fitted(pieces: list[str], width: int | None) -> str:
    """Return as many of the pieces, by priority, as a line of this width holds; the first one is always there."""
    while width is not None and len(pieces) > 1 and len("  ".join(pieces)) > width:
        pieces = pieces[:-1]
    return "  ".join(pieces)


def shortened(text: str, width: int) -> str:
    """A text (a path, say) without its middle, where it takes more than `width` columns: most of its end stays."""
    kept = min(len(text), width)
    shown = text
    while columns_of(shown) > width and kept > 3:
        head = (kept - 3) // 3
        shown = f"{text[:head]}...{text[len(text) - (kept - 3 - head) :]}"
        kept -= 1
    return shown


def on_screen(text: str, width: int | None) -> str:
    """A text of one or more lines, each wrapped to this width. A line that continues begins below its text, where it
    has a name before it (`note      ...`), else four columns further than its first word."""
    return "\n".join(wrapped(line, width) for line in text.split("\n"))


def wrapped(line: str, width: int | None, indent: int | None = None) -> str:
    """A line, wrapped to this width; those after the first are indented."""
    if width is None or columns_of(line) <= width:
        return line
    if indent is None:
        named = LABEL.match(line)
        indent = len(named[0]) if named else len(line) - len(line.lstrip()) + 4
    words = line.split(" ")
    lines = [""]
    for place, word in enumerate(words):
        longer = f"{lines[-1]} {word}" if place else word
        if columns_of(longer) > width and lines[-1].strip():
            lines.append(" " * indent + word)
        else:
            lines[-1] = longer
    return "\n".join(each.rstrip() for each in lines)


def columns_of(text: str) -> int:
    """The columns that a text takes on a screen: two for each wide character (kanji, kana, ...)."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def table(rows: list[tuple[str, ...]], width: int | None = None) -> str:
    """Rows as aligned columns: the first to the left, the others to the right. In a table wider than the screen is
    (`width`), the words of the first row stand below each other, and the first column gets narrower, as far as it can
    be read; columns that are still too many follow in further tables."""
    rows = [tuple(escape_controls(cell.replace("\n", " ")) for cell in row) for row in rows]
    first, *others = _widths(rows)
    if width is not None and 2 + first + sum(others) + 2 * len(others) > width:
        words = [cell.split() or [""] for cell in rows[0]]
        height = max(map(len, words))
        rows = [*zip(*([""] * (height - len(each)) + each for each in words)), *rows[1:]]
        first, *others = _widths(rows)
        first = min(first, max(READABLE, width - 2 - sum(others) - 2 * len(others)))
        shown = 0
        while shown < len(others) and 2 + first + sum(others[: shown + 1]) + 2 * (shown + 1) <= width:
            shown += 1
        if 0 < shown < len(others):
            rest = [(row[0], *row[shown + 1 :]) for row in rows]
            return _aligned([row[: shown + 1] for row in rows], first, others) + "\n\n" + table(rest, width)
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
    """1234.5 -> 1,234 and 0.012345 -> 0.0123: as many digits, and never an exponent for what is large."""
    return f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g}"


def decimals(value: float) -> str:
    """A loss or a held-out figure: 2.3456, and of a small one 0.000123 or 1.23e-05, not 0.0001 and 0.0000."""
    return f"{value:.4f}" if not 0 < abs(value) < 0.01 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """3725.0 -> 1:02:05."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def size(count: float) -> str:
    """Bytes in GiB, of less than one in MiB, and of less than one of those in KiB."""
    if count >= 2**30:
        return f"{count / 2**30:,.2f} GiB"
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 or not count else f"{count / 2**10:,.1f} KiB"


class StatusLine:
    """Progress on stderr: one line that is rewritten at a terminal, else a line now and then."""

    def __init__(self) -> None:
        self.renewed = sys.stderr.isatty()
        self.shown = time.perf_counter()
        self.width = 0

    def is_due(self) -> bool:
        """Return True if the last line is old enough."""
        return time.perf_counter() - self.shown >= (AT_A_TERMINAL_S if self.renewed else ELSEWHERE_S)

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
        """Take the line away where it can be."""
        if self.renewed and self.width:
            print(f"\r{'':<{self.width}}\r", end="", file=sys.stderr, flush=True)
            self.width = 0

    def close(self) -> None:
        """End the status line, so that the next print begins a line."""
        if self.renewed and self.width:
            print(file=sys.stderr, flush=True)


@contextlib.contextmanager
def doing() -> Iterator[Callable[[str], None]]:
    """A function that says at a terminal what is done now; nothing stays of it, and elsewhere nothing is said."""
    line = StatusLine()
    try:
        yield lambda text: line.show([text]) if line.renewed else None
    finally:
        line.clear()


class Bar(StatusLine):
    """Progress of a run: the status line at a terminal, else a line now and then on stdout. By priority: update,
    loss, the script's own figures, time left, tokens/s, learning rate."""

    def __init__(self, total: int, every: int, main: bool):
        super().__init__()
        self.total = total
        self.every = every
        self.main = main
        self.figures: list[str] = []

    def begin(self, done: int) -> None:
        """Begin at, or go back to, the update after `done`."""
        self.done = done
        self.started = time.perf_counter()

    def update(self, metrics: UpdateMetrics) -> None:
        """One update more; its figures are shown, unless it was not applied."""
        if not self.main:
            return
        number = metrics.update
        shown = not (metrics.anomaly or metrics.skipped)
        if shown and metrics.loss is not None:
            left = (time.perf_counter() - self.started) / (number - self.done) * (self.total - number)
            self.figures = [
                f"loss {decimals(metrics.loss)}",
                *(f"{name} {decimals(value)}" for name, value in (metrics.own or {}).items()),
                f"{duration(left)} left",
                f"{metrics.tokens_per_s:,.0f} tokens/s",
                f"lr {metrics.learning_rate:.2e}",
            ]
        pieces = [f"update {number:>{len(str(self.total))}}/{self.total}", *self.figures]
        if self.renewed and (self.is_due() or not self.width or number == self.total):
            self.show(pieces)
        elif not self.renewed and shown and (number % self.every == 0 or number in (self.done + 1, self.total)):
            log_lines(fitted(pieces, screen_width()))

    def log_lines(self, *texts: str) -> None:
        """Lines of their own, in the place of the status line if there is one, which comes again."""
        if texts:
            self.clear()
            log_lines(*texts, main=self.main)
