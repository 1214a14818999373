"""The progress of `zerofit prepare` on stderr."""

import time

from zerofit.record.terminal import StatusLine, duration


class Meter:
    """Shows documents, tokens, their rates, and the part of the input that is read, as a context."""

    def __init__(self, total_bytes: int):
        self.total, self.line = max(1, total_bytes), StatusLine()
        self.started = time.perf_counter()

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()

    def show(self, read_bytes: int, documents: int, tokens: int) -> None:
        """Print the progress, if it is time to."""
        if not self.line.is_due():
            return
        seconds, part = self.stop(), min(1.0, read_bytes / self.total)
        self.line.show(
            [
                f"{part:6.1%}",
                *([f"{duration(seconds * (1 - part) / part)} left"] if part else []),
                f"{tokens:,} tokens ({tokens / seconds:,.0f}/s)",
                f"{documents:,} documents ({documents / seconds:,.0f}/s)",
            ]
        )

    def stop(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self.started
