"""The ranks of a run on several machines meet before they have a process group (zerofit/launch/rendezvous.py).

The launcher of a machine ends its ranks when one of them has failed, and knows nothing of the other machines. While a
rank prepares its data, a thread of it gives signs of life, and ends the rank when one on another machine has ended.
"""

import contextlib
import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from zerofit.launch.rendezvous import BEAT_S, Ended, Meeting, open_store, reach, serve_store
from zerofit.recipe.errors import UserError, leave, print_last, printable, record_code

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
LAUNCHER = os.getppid()
CONNECT_S = 20.0  # to say why this rank ends before it has come
ADDRESS = re.compile(r"\[(?:::ffff:)?([^\]\s]+)\]:\d+")  # as gloo and TCPStore print them
LAUNCHER_S = 40.0  # within which a launcher ends the ranks of its machine


class RankRendezvous:
    """This rank's part; nothing happens where all ranks are on one machine."""

    def __init__(self, environment: Mapping[str, str] = os.environ):
        def number(name: str, default: int) -> int:
            return int(environment.get(name, default))

        self.rank, self.count = number("RANK", 0), number("WORLD_SIZE", 1)
        self.local_rank, self.here = number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", self.count)
        self.machine = number("GROUP_RANK", self.rank // self.here)
        self.address, self.port = environment.get("MASTER_ADDR", ""), number("MASTER_PORT", 0)
        self.served_by_launcher = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.run_id = environment.get("TORCHELASTIC_RUN_ID", "")
        self.num_machines = number("GROUP_WORLD_SIZE", 1)
        self.attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.is_open = self.count > self.here and bool(self.address)  # nobody has ended, and not all have met
        self.meeting: Meeting | None = None
        self.store: Store | None = None
        self._met, self._server = threading.Event(), None

    def start(self, limit_s: float) -> None:
        """Come to the meeting, and give signs of life from now on.

        Raises:
            UserError: machine 0 cannot be reached; another rank has the same number.
        """
        if not self.is_open:
            return
        self._come(limit_s)
        threading.Thread(target=self._watch, daemon=True).start()

    def first_on_rank_0(self, name: str, action: Callable[[], T]) -> T | None:
        """Let rank 0 do something before all others go on. Returns its result there, None on other ranks.

        Raises:
            UserError: of rank 0, on all ranks.
        """
        if self.count == 1:
            return action()
        store, key = self.store or self._connect(CONNECT_S), f"zerofit/first{self.attempt}/{name}"
        if self.rank:
            while not store.check([key]):
                time.sleep(0.2)
            if problems := json.loads(store.get(key)):
                raise UserError(problems)
            return None
        problems = []
        try:
            return action()
        except UserError as error:
            problems = error.problems
            raise
        finally:
            store.set(key, json.dumps(problems))

    def wait(self) -> list[str]:
        """Wait until all ranks have come so far. Returns notes for the log."""
        if not self.is_open:
            return []
        meeting = self._opened
        meeting.ready()
        self._met.wait()
        return meeting.notes

    def stop(self, message: str, code: int) -> None:
        """Tell the other machines that this rank ends, and why; called at any end. Never fails."""
        if not self.is_open:
            self._stand_in_for_launcher()
            return
        self.is_open = False
        with contextlib.suppress(Exception):
            if self.meeting is None:
                self._come(CONNECT_S)
            self._opened.stop(message, code)

    def _stand_in_for_launcher(self) -> None:
        """At the end, where the launcher of this machine was killed: those of other machines wait 5 minutes for it."""
        if self.store is None or self.local_rank or not self.served_by_launcher or os.getppid() == LAUNCHER:
            return
        from torch.distributed import PrefixStore
        from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
        from torch.distributed.elastic.utils.store import _barrier_nonblocking

        store = PrefixStore(self.run_id, self.store)
        with contextlib.suppress(RuntimeError):  # it is gone with the launcher of machine 0
            _barrier_nonblocking(store, self.num_machines, _TERMINAL_STATE_SYNC_ID)

    def named(self, text: str) -> str:
        """A text with addresses of machines, which are named."""
        meeting = self.meeting
        return text if meeting is None else ADDRESS.sub(lambda found: meeting.machine_at(found[1]) or found[0], text)

    @property
    def _opened(self) -> Meeting:
        assert self.meeting is not None, "start comes first"
        return self.meeting

    @property
    def machines(self) -> list[str]:
        """All machines, in words; where they have not met, this one."""
        cards = {} if self.meeting is None else self.meeting.machines
        hosts = {card["machine"]: card["host"] for card in cards.values()} or {self.machine: platform.node()}
        return [f"machine {number} ({hosts[number]})" for number in sorted(hosts)]

    def place_of(self, rank: int, device: str) -> str:
        """Where a rank runs, in words."""
        machine, index = divmod(rank, self.here)
        return self.machines[machine] if device == "cpu" else f"{self.machines[machine]}, GPU {index}"

    def _connect(self, limit_s: float) -> "Store":
        if not self.served_by_launcher and self.rank == 0:
            self._server = serve_store(self.port, everywhere=True)
        reach(self.address, self.port, limit_s)
        self.store = open_store(self.address, self.port)
        return self.store

    def _come(self, limit_s: float) -> None:
        from torch.distributed import PrefixStore

        prefix = f"zerofit/ranks{self.attempt}"
        self.meeting = Meeting(
            PrefixStore(prefix, self._connect(limit_s)),
            "rank",
            self.rank,
            self.count,
            self.here,
            self.machine,
            limit_s,
        )
        self._opened.come()

    def _watch(self) -> None:
        try:
            while self.is_open and not self._opened.poll():
                time.sleep(BEAT_S / 10 if self._opened.is_ready else BEAT_S)
        except Ended as end:
            if self.is_open:
                self.is_open = False
                self._end(end)
        if self.is_open:
            self.is_open = False
            self._met.set()

    def _end(self, end: Ended) -> None:
        if self.local_rank or end.machine == self.machine:
            time.sleep(LAUNCHER_S)  # it ends this rank when the one that speaks has ended
        else:
            record_code(end.code, end.report())
            print_last(printable(end.report()))
        leave(end.code)


RANKS = RankRendezvous()
