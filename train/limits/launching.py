"""One launch of a comparison: started, listened to, and ended as soon as there is nothing more to learn from it."""

import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from train.limits.contenders import Contender
from train.limits.journal import Journal
from train.limits.machine import GIB
from train.limits.orders import ANSWERS, LAST_WORDS, Answers, Orders
from train.run.launches import Launch, Trial, failure, launched, mistake
from train.run.memory_report import OF_DEVICE, OF_HOST

LISTEN_S = 0.1
KERNEL = re.compile(r"^\s*cause +(the kernel's out-of-memory killer|killed, very likely for want of memory)", re.M)
KILLED = re.compile(r"exitcode\s*:\s*-9\b")


@dataclass
class Ending:
    """How a launch ended.

    Args:
        how: done, out_of_memory, timed_out, killed (SIGKILL, nothing says for want of memory), too_small (a process
            takes more than the limit before there is a model), refused (a mistake in the recipe), or failed.
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
        environment: variables of its processes.
        host_limit: bytes that all processes of the launch may have resident together; None: no limit.
    """

    def __init__(
        self, trial: Trial, num_processes: int, orders: Orders, contender: Contender, key: str, journal: Journal,
        answered: Callable[[dict[str, Any]], None], patience_s: float, environment: dict[str, str],
        host_limit: int | None = None,
    ):  # fmt: skip
        self.command = trial.command(num_processes)
        self.orders, self.contender, self.key, self.journal = orders, contender, key, journal
        self.answered, self.patience_s, self.host_limit = answered, patience_s, host_limit
        self.environment = environment
        self.folder = trial.output.parent
        self.trying = orders.first
        self._news = Answers(self.folder / ANSWERS)
        self._words = Answers(self.folder / LAST_WORDS)

    def run(self) -> Ending:
        """Launch, and listen until it has ended. A size that does not fit is in the journal then."""
        number, mark = self.journal.launches + 1, uuid.uuid4().hex
        about = {"launch": number, "key": self.key}
        self.journal.add("launch", **about, contender=self.contender.name, mark=mark, folder=self.folder.name,
                         first=self.orders.first)  # fmt: skip
        run, log = self.folder / "run", self.folder / "log.txt"
        with launched(self.command, run, log, mark=mark, environment=self.environment) as launch:
            ending = self._listen(launch, about)
            seconds = launch.seconds
        if ending.how in ("out_of_memory", "timed_out"):
            self.give_up(ending, about)
        self.journal.add("end", **about, how=ending.how, seconds=round(seconds, 1))
        return ending

    def give_up(self, ending: Ending, about: dict[str, Any]) -> None:
        """Note that the size which was being tried does not fit."""
        self.journal.add("size", **about, size=self.trying, fresh=self.trying == self.orders.first,
                         outcome=ending.how, where=ending.where, phase=ending.phase)  # fmt: skip

    def _listen(self, launch: Launch, about: dict[str, Any]) -> Ending:
        heard_at = launch.seconds
        while True:
            how = launch.wait(launch.seconds + LISTEN_S)
            for line in self._news.news():
                heard_at = launch.seconds
                self._take(line, about)
                if line["event"] == "done":
                    return Ending("done")
            words = self._words.news()
            if words:
                return self._last(words[0], launch)
            if how == "ended":
                return self._explained(launch)
            if launch.seconds - heard_at > self.patience_s:
                return Ending("timed_out", text=f"nothing new for {self.patience_s / 60:.3g} minutes")
            over = self._over_the_host_limit(launch)
            if over:
                return Ending("out_of_memory", "host", text=over)

    def _take(self, line: dict[str, Any], about: dict[str, Any]) -> None:
        if line["event"] == "trying":
            self.trying = line["size"]
        if line["event"] == "fits":
            found = {name: value for name, value in line.items() if name != "event"}
            self.journal.add("size", **about, outcome="fits", **found)
        self.answered(line)

    def _last(self, words: dict[str, Any], launch: Launch) -> Ending:
        """A rank's last words. The others are not waited for."""
        self.trying = words["size"]
        if words["event"] == "too_small":
            return Ending("too_small", text=str(words["needs"]))
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
        if any(words in text for words in (*OF_HOST, *OF_DEVICE)):
            on_device = any(words in text for words in OF_DEVICE) or not self.orders.host_memory_limit
            return Ending("out_of_memory", "device" if on_device else "host", text="in native code")
        if KILLED.search(text):
            return Ending("killed", text="a process was killed (SIGKILL)")
        return Ending("failed", text=failure(launch, "ended") or "")

    def _over_the_host_limit(self, launch: Launch) -> str:
        """What to say if the processes have more than they may together; their caps do not count what is pinned."""
        if self.host_limit is None:
            return ""
        resident = 0
        for process in launch.members():
            with suppress(psutil.Error):
                resident += process.memory_info().rss if "RANK" in process.environ() else 0  # not the launcher
        return f"{resident / GIB:.2f} GiB resident" if resident > 1.05 * self.host_limit else ""
