"""The files of a comparison's trials.

journal.jsonl has a line for each launch and each result; from it an interrupted comparison resumes. A trial's folder
has its request (JSON) and its answers (lines of JSON): those of the main process in answers.jsonl, those of any rank
whose memory has run out in failures.jsonl.
"""

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerofit.launch.runs import RunningLaunch
from zerofit.record.jsonl import LineReader, add_line

REQUEST, ANSWERS, FAILURES = "request.json", "answers.jsonl", "failures.jsonl"
NOT_MEASURED_WITH = (  # code that a trial does not run
    *(
        f"tools/compare/{name}.py"
        for name in ("comparison_report", "report_page", "plots", "results", "finish", "guess")
    ),
    "cli.py",
    "tools/verify/",
    "tools/plan/",
    "estimate/",
)


def key_of(**values: Any) -> str:
    """A short name for the values that a trial was made with: equal values have the same name."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class TrialJournal:
    """journal.jsonl. Lines of kind `guess` (a prediction), `launch` (it begins), `ready` (what its trials have in
    common), `size` (the result of one: fits, out_of_memory or timed_out) and `end`."""

    def __init__(self, file: Path):
        self.file, reader = file, LineReader(file)
        self.lines = reader.poll()
        reader.drop_rest()

    def add(self, kind: str, **line: Any) -> dict[str, Any]:
        line = {"kind": kind, **line}
        add_line(self.file, line)
        self.lines.append(line)
        return line

    def of(self, key: str, kind: str) -> list[dict[str, Any]]:
        """The lines of this kind with this key."""
        return [line for line in self.lines if line["kind"] == kind and line["key"] == key]

    def sizes(self, key: str, patience_s: float) -> list[dict[str, Any]]:
        """The results of sizes; without those that timed out with less patience than this."""
        return [line for line in self.of(key, "size") if line.get("patience_s", math.inf) >= patience_s]

    @property
    def launches(self) -> int:
        """The number of all launches so far."""
        return sum(line["kind"] == "launch" for line in self.lines)

    def end_interrupted_launches(self) -> int:
        """Kill the processes of launches that a killed comparison has left. Returns the number of such launches."""
        ended = {line["launch"] for line in self.lines if line["kind"] == "end"}
        unfinished = [line for line in self.lines if line["kind"] == "launch" and line["launch"] not in ended]
        for line in unfinished:
            RunningLaunch([], self.file.parent, self.file, line["mark"]).kill()
            self.add("end", launch=line["launch"], key=line["key"], how="interrupted", seconds=None)
        return len(unfinished)


def peak_of(line: dict[str, Any], name: str = "reserved", with_evaluation: bool = True) -> int:
    """The largest peak of any rank, in bytes."""
    ranks = line["with_evaluation" if with_evaluation else "ranks"]
    return max(rank[name] for rank in ranks)


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
        by_length: sizes are lengths of rows, in tokens; micro-batches are the recipe's.
        pid: of the process that made this request; the ranks end when that process is gone.
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
    by_length: bool = False
    pid: int = field(default_factory=os.getpid)

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
