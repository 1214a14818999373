"""The journal of a comparison: a line for each launch and each result, from which an interrupted one resumes."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from zerofit.record.jsonl import LineReader, add_line
from zerofit.tools.launches import RunningLaunch

PACKAGE = Path(__file__).resolve().parents[2]
NOT_MEASURED_WITH = {
    f"tools/compare/{name}.py"
    for name in ("comparison_report", "html_report", "plots", "results", "finish", "finished", "guess")
} | {"cli.py"}


def code_hash() -> str:
    """A hash of the code that a trial runs, changes that are not committed included."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name not in NOT_MEASURED_WITH and not name.startswith(("tools/verify/", "tools/plan/", "estimate/")):
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


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
