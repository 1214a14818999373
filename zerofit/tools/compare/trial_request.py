"""What `zerofit compare` asks of a launch, and what the launch answers, as files in the trial's folder.

The request is JSON. The answers are lines of JSON: those of the main process are in `answers.jsonl`, those of any rank
whose memory has run out in `failures.jsonl`.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

REQUEST, ANSWERS, FAILURES = "request.json", "answers.jsonl", "failures.jsonl"


@dataclass(frozen=True)
class TrialRequest:
    """What one launch is to try.

    Args:
        sizes: all batch sizes (of one process) in question, ascending; or lengths of rows.
        first: the one to begin with, in a fresh process.
        only_first: try this one and no other.
        fits, fails: the largest size that fits so far (0: none), and the smallest that does not (None: none).
        must_try: sizes below the next one that are tried too, so that strategies can be compared at the same size.
        points: (size, peak bytes) so far, from which the largest size is predicted.
        per_sample: bytes by which a peak is predicted to grow with each sample; None: there is no prediction.
        steps: timed updates of each size.
        memory_limit: bytes that a rank may use of its device; None: all of it.
        host_memory_limit: bytes that a rank may use of its host, besides.
        by_length: sizes are lengths of rows, in tokens; micro-batches are the recipe's.
        pid, started: of the process that made this request; the ranks end when that process is gone.
    """

    sizes: list[int]
    first: int
    only_first: bool
    steps: int
    fits: int = 0
    fails: int | None = None
    must_try: list[int] = field(default_factory=list)
    points: list[tuple[int, int]] = field(default_factory=list)
    per_sample: float | None = None
    memory_limit: int | None = None
    host_memory_limit: int | None = None
    by_length: bool = False
    pid: int = field(default_factory=os.getpid)
    started: float = field(default_factory=lambda: psutil.Process().create_time())

    def write(self, folder: Path) -> Path:
        """Write it into the trial's folder, which is made. Returns the file."""
        folder.mkdir(parents=True)
        file = folder / REQUEST
        file.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        return file

    @classmethod
    def read(cls, file: Path) -> "TrialRequest":
        values = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{**values, "points": [tuple(point) for point in values["points"]]})
