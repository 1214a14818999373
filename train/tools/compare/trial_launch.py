"""One launch of a comparison: started, listened to, and ended as soon as there is nothing more to learn from it."""

import re
import signal
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from train.health.out_of_memory import memory_in
from train.record.terminal import size
from train.tools.compare.candidates import Candidate
from train.tools.compare.journal import Journal
from train.tools.compare.machine import Machine
from train.tools.compare.trial_request import ANSWERS, LAST_WORDS, Answers, TrialRequest
from train.tools.launches import Launch, Trial, failure, launched, mistake

LISTEN_S = 0.1
KERNEL = re.compile(r"^\s*cause +(the kernel's out-of-memory killer|killed, very likely for want of memory)", re.M)
KILLED = re.compile(r"exitcode\s*:\s*-(6|7|9|11)\b")
AT_A_CAP = ("can't start new thread", "Thread creation failed", "could not create a primitive",
            "could not create a memory object")  # fmt: skip
LOOK_S = 2.0


@dataclass
class Ending:
    """How a launch ended.

    Args:
        how: done, out_of_memory, timed_out, killed (SIGKILL or a crash, and nothing says for want of memory),
            too_small (a process takes more than a limit before there is a model), refused (a mistake in the recipe),
            or failed.
        where: device or host, of memory that ran out.
        phase: in which it did.
        text: what there is to say.
    """

    how: str
    where: str = ""
    phase: str = ""
    text: str = ""


class TrialLaunch:
    """A launch of a contender: its orders are written, its answers go to the journal.

    Args:
        key: what the contender's trials are made with (journal.key_of).
        answered: called with each line of the main process.
        patience_s: without a new line for so long it has timed out.
        again: the launch before was killed, and had found nothing; a second time is no accident.
    """

    def __init__(
        self, trial: Trial, num_processes: int, orders: TrialRequest, candidate: Candidate, key: str, journal: Journal,
        machine: Machine, answered: Callable[[dict[str, Any]], None], patience_s: float, again: bool,
    ):  # fmt: skip
        self.command, self.num_processes = trial.command(num_processes), num_processes
        self.orders, self.candidate, self.key, self.journal = orders, candidate, key, journal
        self.machine, self.on_cpu = machine, not machine.devices
        self.answered, self.patience_s, self.again = answered, patience_s, again
        self.is_trying, self.has_found = False, False
        self.folder = trial.output.parent
        self.trying = orders.first
        self._news = Answers(self.folder / ANSWERS)
        self._words = Answers(self.folder / LAST_WORDS)

    def run(self) -> Ending:
        """Launch, and listen until it has ended. A size that does not fit is in the journal then."""
        number, mark = self.journal.launches + 1, uuid.uuid4().hex
        about = {"launch": number, "key": self.key}
        self.journal.add("launch", **about, candidate=self.candidate.name, mark=mark, folder=self.folder.name,
                         first=self.orders.first)  # fmt: skip
        run, log = self.folder / "run", self.folder / "log.txt"
        with launched(self.command, run, log, mark=mark, environment=self.machine.settings) as launch:
            ending = self._listen(launch, about)
            seconds = launch.seconds
        if ending.how == "killed" and self.again and not self.has_found:
            ending = Ending("out_of_memory", "host", text=f"{ending.text}, twice")
        if ending.how in ("out_of_memory", "timed_out"):
            self._give_up(ending, about)
        self.journal.add("end", **about, how=ending.how, seconds=round(seconds, 1))
        return ending

    def _give_up(self, ending: Ending, about: dict[str, Any]) -> None:
        """Note that the size which was being tried does not fit."""
        patience = {"patience_s": self.patience_s} if ending.how == "timed_out" else {}
        self.journal.add("size", **about, size=self.trying, fresh=self.trying == self.orders.first,
                         outcome=ending.how, where=ending.where, phase=ending.phase, **patience)  # fmt: skip

    def _listen(self, launch: Launch, about: dict[str, Any]) -> Ending:
        heard_at = looked_at = launch.seconds
        while True:
            how = launch.wait(launch.seconds + LISTEN_S)
            words = self._words.news()  # before the others' news: what the main process said by then is heard
            for line in self._news.news():
                heard_at = launch.seconds
                self._take(line, about)
                if line["event"] == "done":
                    return Ending("done")
            if words:
                return self._last(words[0])
            if how == "ended":
                return self._explained(launch)
            if launch.seconds - heard_at > self.patience_s:
                said = f"nothing new for {self.patience_s / 60:.3g} minutes"
                before = f"{said}, before the first batch. More --trial_minutes may help"
                return Ending("timed_out", text=said) if self.is_trying else Ending("failed", text=before)
            if self.orders.host_memory_limit and not self.on_cpu and launch.seconds - looked_at > LOOK_S:
                looked_at, over = launch.seconds, self._over_the_host_limit(launch)
                if over:
                    return Ending("out_of_memory", "host", text=over)

    def _take(self, line: dict[str, Any], about: dict[str, Any]) -> None:
        if line["event"] == "trying":
            self.trying, self.is_trying = line["size"], True
        if line["event"] == "fits":
            self.has_found = True
            self.journal.add("size", **about, outcome="fits", **_without_event(line))
        if line["event"] == "ready":
            self.journal.add("ready", **about, about=_without_event(line))
        self.answered(line)

    def _last(self, words: dict[str, Any]) -> Ending:
        """A rank's last words. The others are not waited for."""
        self.trying = words["size"]
        if words["event"] == "too_small":
            return Ending("too_small", text=words["text"])
        return Ending("out_of_memory", words["where"], words["phase"], f"rank {words['rank']}")

    def _explained(self, launch: Launch) -> Ending:
        """Why a launch has ended whose ranks have said nothing."""
        if not launch.process.returncode:
            return Ending("failed", text="it ended before it had said what it found")
        refused = mistake(launch)
        if refused:
            return Ending("refused", text=refused)
        text = launch.text
        if KERNEL.search(text):
            return Ending("out_of_memory", "host", text="ended by the kernel")
        where = memory_in(text)
        if self.on_cpu and (where or any(words in text for words in AT_A_CAP)):
            where = "device"  # a CPU has no other
        if where:
            return Ending("out_of_memory", where, text="in native code")
        if launch.process.returncode == -signal.SIGKILL or KILLED.search(text):
            return Ending("killed", text="a process was killed (SIGKILL), or crashed")
        return Ending("failed", text=failure(launch, "ended") or "")

    def _over_the_host_limit(self, launch: Launch) -> str:
        """What to say if the processes have more than they may together; their caps do not count what is pinned."""
        resident, limit = 0, self.num_processes * self.orders.host_memory_limit
        for process in launch.members():
            with suppress(psutil.Error):
                memory = process.memory_info()
                resident += memory.rss - memory.shared if "RANK" in process.environ() else 0  # not the launcher
        return f"{size(resident)} resident" if resident > 1.05 * limit else ""


def _without_event(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "event"}
