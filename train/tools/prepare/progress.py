"""The progress of `zerofit prepare` on stderr: one line that is rewritten at a terminal, else a line now and then."""

import sys
import time

from train.record.terminal import duration, fitted, screen_width

AT_A_TERMINAL_S, ELSEWHERE_S = 0.5, 30.0


class Meter:
    """Shows documents, tokens, their rates, and the part of the input that is read, as a context."""

    def __init__(self, total_bytes: int):
        self.total = max(1, total_bytes)
        self.renewed = sys.stderr.isatty()
        self.every = AT_A_TERMINAL_S if self.renewed else ELSEWHERE_S
        self.started = self.shown = time.perf_counter()
        self.width = 0

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, *_: object) -> None:
        if self.renewed and self.width:
            print(file=sys.stderr, flush=True)

    def show(self, read_bytes: int, documents: int, tokens: int) -> None:
        """Print the progress, if it is time to."""
        now = time.perf_counter()
        if now - self.shown < self.every:
            return
        self.shown = now
        seconds, part = now - self.started, min(1.0, read_bytes / self.total)
        pieces = [f"{part:6.1%}", *([f"{duration(seconds * (1 - part) / part)} left"] if part else []),
                  f"{tokens:,} tokens ({tokens / seconds:,.0f}/s)",
                  f"{documents:,} documents ({documents / seconds:,.0f}/s)"]  # fmt: skip
        width = screen_width(sys.stderr)
        line = fitted(pieces, width and width - 1)
        if not self.renewed:
            print(line, file=sys.stderr, flush=True)
            return
        print(f"\r{line:<{self.width}}", end="", file=sys.stderr, flush=True)
        self.width = len(line)

    def stop(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self.started
