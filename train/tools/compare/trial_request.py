"""What `zerofit compare` asks of a launch, and what the launch answers: two files in the trial's folder.

Orders come as JSON. Answers are lines of JSON: those of the main process in `answers.jsonl`, and in `last_words.jsonl`
those of any rank whose memory has run out.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ORDERS, ANSWERS, LAST_WORDS = "orders.json", "answers.jsonl", "last_words.jsonl"


@dataclass(frozen=True)
class TrialRequest:
    """What one launch is to try.

    Args:
        sizes: all batch sizes (of one process) in question, ascending.
        first: the one to begin with, in a fresh process.
        alone: nothing else is to be tried.
        fits, fails: what is known: the largest size that fits (0: none) and the smallest that does not (None: none).
        visit: sizes that are wanted for the sake of comparison, should the way lead past them.
        points: (size, peak bytes) known by now, from which the largest size is predicted.
        steps: timed updates of each size.
        memory_limit: bytes that a rank may have on its device; None: what there is.
        host_memory_limit: bytes that a rank may have on its host, beside that.
        pid, started: of the process that has given these orders; when it is gone, so are the ranks.
    """

    sizes: list[int]
    first: int
    alone: bool
    steps: int
    pid: int
    started: float
    fits: int = 0
    fails: int | None = None
    visit: list[int] = field(default_factory=list)
    points: list[tuple[int, int]] = field(default_factory=list)
    memory_limit: int | None = None
    host_memory_limit: int | None = None

    def write(self, folder: Path) -> Path:
        """Into the trial's folder, which is made. Returns the file."""
        folder.mkdir(parents=True)
        file = folder / ORDERS
        file.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        return file

    @classmethod
    def read(cls, file: Path) -> "TrialRequest":
        found = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{**found, "points": [tuple(point) for point in found["points"]]})


def add_line(file: Path, line: dict[str, Any]) -> None:
    """One line more, in one write: several ranks may do that at once."""
    data = (json.dumps(line) + "\n").encode()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


class Answers:
    """The lines of a file that is being written, each once."""

    def __init__(self, file: Path):
        self.file, self._read = file, 0

    def news(self) -> list[dict[str, Any]]:
        """The whole lines that have come since the last time."""
        try:
            with self.file.open("rb") as lines:
                lines.seek(self._read)
                whole, line_break, _ = lines.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._read += len(whole) + len(line_break)
        return [json.loads(line) for line in whole.splitlines() if line]
