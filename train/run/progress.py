"""How far a run has come, and what a person sees of it: a bar at a terminal, else a line now and then."""

import sys
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """How far a run has come: what it goes on from, beside the weights and the optimizer's state."""

    updates: int = 0
    tokens: float = 0.0
    positions: float = 0.0
    before: dict[str, float] = field(default_factory=dict)  # held-out figures before the first update
    after: dict[str, float] = field(default_factory=dict)  # and the latest ones
    left_out: list[int] = field(default_factory=list)  # updates whose samples are not trained on, after faults
    faults_in_a_row: int = 0
    trackers: dict[str, str] = field(default_factory=dict)  # the run's id at each
    history: dict[str, list[float]] = field(default_factory=dict)  # of the fault sentinel


def say(*lines: str, main: bool = True) -> None:
    """Print to stdout at once, on the main process; nothing where there are no lines."""
    if main and lines:
        print(*lines, sep="\n", flush=True)


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows as aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligned = (
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    )  # fmt: skip
    return "\n".join("  " + line.rstrip() for line in aligned)


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


class Bar:
    """The bar, or the lines: update, loss, learning rate, tokens/s and the time left."""

    def __init__(self, total: int, every: int, main: bool, done: int = 0):
        self.total, self.every, self.main, self.done = total, every, main, done
        self.started, self.bar = time.perf_counter(), None
        if main and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, initial=done, unit="update", dynamic_ncols=True, bar_format=_BAR)

    def update(self, line: dict[str, Any], shown: bool = True) -> None:
        """One update more; its figures are shown, unless they are those of an update that was left out."""
        if not self.main:
            return
        if not shown:
            if self.bar is not None:
                self.bar.update()
            return
        number = line["update"]
        figures = f"loss {line['loss']:.4f}  lr {line['learning_rate']:.2e}  {line['tokens_per_s']:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.set_description_str(figures, refresh=False)
            self.bar.update()
        elif number % self.every == 0 or number in (self.done + 1, self.total):
            left = (time.perf_counter() - self.started) / (number - self.done) * (self.total - number)
            print(
                f"update {number:>{len(str(self.total))}}/{self.total}  {figures}  {duration(left)} left", flush=True
            )

    def note(self, text: str) -> None:
        """A line of its own, above the bar if there is one."""
        if self.bar is not None:
            self.bar.write(text)
        else:
            say(text, main=self.main)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


_BAR = "{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt}  {desc}  {remaining} left"
