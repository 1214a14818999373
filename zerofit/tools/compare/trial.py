"""One trial of a comparison: an ordinary launch of the task at one batch size, told by its environment to measure.

journal.jsonl has a line for each launch and each result; from it an interrupted comparison resumes. A trial's folder
has the request, the answers of the ranks (zerofit/training/measurement.py) and the output of the launch.
"""

import hashlib
import json
import math
import re
import shutil
import signal
import uuid
from pathlib import Path
from typing import Any

from zerofit.health.out_of_memory_errors import memory_in
from zerofit.launch.runs import LaunchedRun, RunningLaunch, failure, mistake
from zerofit.record.jsonl import LineReader, add_line
from zerofit.record.terminal import duration, log_lines
from zerofit.training.measurement import ANSWERS, VARIABLE

PROGRESS_S = 60.0  # without an answer, after which a line says that the launch is still at work
KERNEL = re.compile(r"^\s*cause +(the kernel's out-of-memory killer|killed, very likely for want of memory)", re.M)
KILLED = re.compile(r"exitcode\s*:\s*-(6|7|9|11)\b")
# The launcher itself; or a rank, as the launcher ends with its code: SIGABRT, SIGBUS, SIGKILL, SIGSEGV.
KILLED_CODES = (-signal.SIGKILL, 134, 135, 137, 139)


def key_of(**values: Any) -> str:
    """A short name for the values that a trial was made with: equal values have the same name."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def peak_bytes(line: dict[str, Any], name: str = "reserved") -> int:
    """The largest peak of any rank in a result of the journal, in bytes."""
    return max(rank[name] for rank in line["ranks"])


class Journal:
    """journal.jsonl. Lines of kind `prediction`, `launch` (it begins), `size` (the result of one: fits, out_of_memory
    or timed_out) and `end`."""

    def __init__(self, file: Path):
        self.file, reader = file, LineReader(file)
        self.lines = reader.poll()
        reader.drop_rest()

    def add(self, kind: str, **line: Any) -> None:
        add_line(self.file, {"kind": kind, **line})
        self.lines.append({"kind": kind, **line})

    def lines_of(self, key: str, kind: str) -> list[dict[str, Any]]:
        """The lines of this kind with this key."""
        return [line for line in self.lines if line["kind"] == kind and line["key"] == key]

    def results(self, key: str, patience_s: float) -> dict[int, dict[str, Any]]:
        """{size: its latest result}; without those that timed out with less patience than this."""
        lines = [line for line in self.lines_of(key, "size") if line.get("patience_s", math.inf) >= patience_s]
        return {line["size"]: line for line in sorted(lines, key=lambda line: line["size"])}

    def begin(self, **about: Any) -> dict[str, Any]:
        """Write that a launch begins. Returns its number, its key and the mark of its processes."""
        number = sum(line["kind"] == "launch" for line in self.lines) + 1
        launch = {"launch": number, "mark": uuid.uuid4().hex, **about}
        self.add("launch", **launch)
        return launch

    def end(self, launch: dict[str, Any], how: str, seconds: float | None) -> None:
        self.add("end", launch=launch["launch"], key=launch["key"], how=how, seconds=seconds and round(seconds, 1))

    def end_interrupted_launches(self) -> int:
        """Kill the processes of launches that a killed comparison has left. Returns the number of such launches."""
        ended = {line["launch"] for line in self.lines if line["kind"] == "end"}
        unfinished = [line for line in self.lines if line["kind"] == "launch" and line["launch"] not in ended]
        for line in unfinished:
            RunningLaunch([], self.file.parent, self.file, line["mark"]).kill()
            self.end(line, "interrupted", None)
        return len(unfinished)


def run_trial(
    trial: LaunchedRun,
    num_processes: int,
    mark: str,
    request: dict[str, Any],
    environment: dict[str, str],
    *,
    patience_s: float,
) -> dict[str, Any]:
    """Launch a trial and follow it until its result is known.

    Args:
        trial: its output lies in the folder of the trial.
        request: steps and memory_limit, as the measured run reads them.
        patience_s: a launch without a new line for this long has timed out.

    Returns: `outcome` and what belongs to it. fits: what was measured. out_of_memory: `where` (device or host) and the
        `phase`. timed_out: patience_s. Else, with a `text` for the user: killed (SIGKILL or a crash, with no sign that
        memory ran out), refused (a mistake in the recipe), failed. All have `seconds_taken`.
    """
    folder = trial.output.parent
    shutil.rmtree(folder, ignore_errors=True)  # left by a comparison that was killed at this point
    folder.mkdir(parents=True)
    file = folder / "request.json"
    file.write_text(json.dumps(request) + "\n", encoding="utf-8")
    environment = {**environment, VARIABLE: str(file.absolute())}
    command, log = trial.command(num_processes), folder / "log.txt"
    with RunningLaunch(command, trial.output, log, mark=mark, environment=environment) as launch:
        result = _follow(launch, LineReader(folder / ANSWERS), patience_s)
        return {**result, "seconds_taken": launch.seconds}


def _follow(launch: RunningLaunch, answers: LineReader, patience_s: float) -> dict[str, Any]:
    begun, answered_at, shown_at = False, launch.seconds, launch.seconds
    while True:
        has_ended = launch.wait(launch.seconds + 0.1) == "ended"  # answers from before are read below
        for line in answers.poll():
            begun, answered_at, shown_at = True, launch.seconds, launch.seconds
            if (event := line.pop("event")) != "begins":
                return {"outcome": event, **line}
        if has_ended:
            return outcome_of(launch)
        if launch.seconds - shown_at > PROGRESS_S:
            shown_at = launch.seconds
            log_lines(f"  {'its updates' if begun else 'starts'}, for {duration(launch.seconds - answered_at)} now")
        if launch.seconds - answered_at > patience_s:
            if begun:
                return {"outcome": "timed_out", "patience_s": patience_s}
            early = f"no progress for {patience_s / 60:.3g} minutes, before the first batch"
            return {"outcome": "failed", "text": f"{early}. A larger --trial_minutes may help"}


def outcome_of(launch: RunningLaunch) -> dict[str, Any]:
    """Say why a launch has ended without an answer from its ranks, as run_trial returns it."""
    code, text = launch.exit_code, launch.text
    if not code:
        return {"outcome": "failed", "text": "it ended without a result"}
    if refused := mistake(launch):
        return {"outcome": "refused", "text": refused}
    if where := "host" if KERNEL.search(text) else memory_in(text):
        return {"outcome": "out_of_memory", "where": where}
    if code in KILLED_CODES or KILLED.search(text):
        return {"outcome": "killed", "text": "a process was killed (SIGKILL), or crashed"}
    return {"outcome": "failed", "text": failure(launch, "ended") or ""}
