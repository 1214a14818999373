"""One launch of a comparison: started, followed by its answers, and ended as soon as its result is known."""

import re
import signal
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerofit.health.out_of_memory_errors import memory_in
from zerofit.launch.runs import LaunchedRun, RunningLaunch, failure, launched, mistake
from zerofit.record.jsonl import LineReader
from zerofit.record.terminal import duration, say
from zerofit.tools.compare.candidates import Candidate
from zerofit.tools.compare.trial_files import ANSWERS, FAILURES, TrialJournal, TrialRequest
from zerofit.tools.compare.trial_machine import TrialMachine, launch_environment

POLL_S = 0.1
PROGRESS_S = 60.0  # without an answer, after which a line says that the launch is still at work
KERNEL = re.compile(r"^\s*cause +(the kernel's out-of-memory killer|killed, very likely for want of memory)", re.M)
KILLED = re.compile(r"exitcode\s*:\s*-(6|7|9|11)\b")
# The launcher itself; or a rank, as the launcher ends with its code: SIGABRT, SIGBUS, SIGKILL, SIGSEGV.
KILLED_CODES = (-signal.SIGKILL, 134, 135, 137, 139)
AT_THE_LIMIT = (
    "can't start new thread",
    "Thread creation failed",
    "could not create a primitive",
    "could not create a memory object",
)


@dataclass
class TrialOutcome:
    """How a launch ended.

    Args:
        how: done, out_of_memory, timed_out, killed (SIGKILL or a crash, with no sign that memory ran out),
            too_small (a process takes more than a limit before it has a model), refused (a mistake in the recipe),
            or failed.
        where: device or host: which memory ran out.
        phase: in which it ran out.
        text: for the user.
    """

    how: str
    where: str = ""
    phase: str = ""
    text: str = ""


@dataclass
class TrialLaunch:
    """A launch of a candidate. Its answers go to the journal.

    Args:
        key: names what the candidate's trials are made with (trial_files.key_of).
        answered: called with each line of the main process.
        patience_s: a launch without a new line for this long has timed out.
        again: the launch before was killed without a result; a second time counts as out of memory.
    """

    trial: LaunchedRun
    num_processes: int
    request: TrialRequest
    candidate: Candidate
    key: str
    journal: TrialJournal
    machine: TrialMachine
    answered: Callable[[dict[str, Any]], None]
    patience_s: float
    again: bool

    def __post_init__(self) -> None:
        self.on_cpu, self.folder, self.trying = not self.machine.devices, self.trial.output.parent, self.request.first
        self.is_trying, self.has_result = False, False
        self._answers, self._failures = LineReader(self.folder / ANSWERS), LineReader(self.folder / FAILURES)

    def run(self) -> TrialOutcome:
        """Launch, and follow it to its end. A size that does not fit is in the journal afterwards."""
        number, mark = self.journal.launches + 1, uuid.uuid4().hex
        about = {"launch": number, "key": self.key}
        self.journal.add(
            "launch",
            **about,
            candidate=self.candidate.name,
            mark=mark,
            folder=self.folder.name,
            first=self.request.first,
        )
        command, log = self.trial.command(self.num_processes), self.folder / "log.txt"
        environment = launch_environment(self.machine, self.num_processes)
        with launched(command, self.trial.output, log, mark=mark, environment=environment) as launch:
            ending = self._follow(launch, about)
            seconds = launch.seconds
        if ending.how == "killed" and self.again and not self.has_result:
            ending = TrialOutcome("out_of_memory", "host", text=f"{ending.text}, twice")
        if ending.how in ("out_of_memory", "timed_out"):
            self._give_up(ending, about)
        self.journal.add("end", **about, how=ending.how, seconds=round(seconds, 1))
        return ending

    def _give_up(self, ending: TrialOutcome, about: dict[str, Any]) -> None:
        """Write to the journal that the current size does not fit."""
        patience = {"patience_s": self.patience_s} if ending.how == "timed_out" else {}
        self.journal.add(
            "size",
            **about,
            size=self.trying,
            fresh=self.trying == self.request.first,
            outcome=ending.how,
            where=ending.where,
            phase=ending.phase,
            **patience,
        )

    def _follow(self, launch: RunningLaunch, about: dict[str, Any]) -> TrialOutcome:
        last_answer_at, shown_at = launch.seconds, launch.seconds
        while True:
            how = launch.wait(launch.seconds + POLL_S)
            failures = self._failures.poll()  # read first: answers from before a failure are then read below
            for line in self._answers.poll():
                last_answer_at = shown_at = launch.seconds
                self._record(line, about)
                if line["event"] == "done":
                    return TrialOutcome("done")
            if failures:
                return self._ending_of(failures[0])
            if how == "ended":
                return self._ending_without_report(launch)
            if launch.seconds - shown_at > PROGRESS_S:
                shown_at = launch.seconds
                doing = "its updates" if self.is_trying else "starts"
                say(f"  {self.trying:>6}  {doing}, for {duration(launch.seconds - last_answer_at)} now")
            if launch.seconds - last_answer_at > self.patience_s:
                silence = f"no progress for {self.patience_s / 60:.3g} minutes"
                early = f"{silence}, before the first batch. A larger --trial_minutes may help"
                return (
                    TrialOutcome("timed_out", text=silence) if self.is_trying else TrialOutcome("failed", text=early)
                )

    def _record(self, line: dict[str, Any], about: dict[str, Any]) -> None:
        if line["event"] == "trying":
            self.trying, self.is_trying = line["size"], True
        if line["event"] == "fits":
            self.has_result = True
            self.journal.add("size", **about, outcome="fits", **_without_event(line))
        if line["event"] == "ready":
            self.journal.add("ready", **about, about=_without_event(line))
        self.answered(line)

    def _ending_of(self, report: dict[str, Any]) -> TrialOutcome:
        """How it ends after a rank has reported a failure. The other ranks are not waited for."""
        self.trying = report["size"]
        if report["event"] == "too_small":
            return TrialOutcome("too_small", text=report["text"])
        return TrialOutcome("out_of_memory", report["where"], report["phase"], f"rank {report['rank']}")

    def _ending_without_report(self, launch: RunningLaunch) -> TrialOutcome:
        """Why a launch has ended without a report from its ranks."""
        if not launch.process.returncode:
            return TrialOutcome("failed", text="it ended without a result")
        refused = mistake(launch)
        if refused:
            return TrialOutcome("refused", text=refused)
        text = launch.text
        if KERNEL.search(text):
            return TrialOutcome("out_of_memory", "host", text="killed by the kernel")
        where = memory_in(text)
        if self.on_cpu and (where or any(failures in text for failures in AT_THE_LIMIT)):
            where = "device"  # a CPU has only one memory
        if where:
            return TrialOutcome("out_of_memory", where, text="in native code")
        if launch.process.returncode in KILLED_CODES or KILLED.search(text):
            return TrialOutcome("killed", text="a process was killed (SIGKILL), or crashed")
        return TrialOutcome("failed", text=failure(launch, "ended") or "")


def _without_event(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "event"}
