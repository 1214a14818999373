"""What the launchers of all machines of a run tell each other, from the first start of their processes to the end.

They meet before each start (zerofit/launch/rendezvous.py): in round 0, and in one more for each restart. A launcher
whose processes have failed comes to the next round; the others see it, end their processes and come too. One that does
not restart says so there, and all end. A machine that a scheduler has started again takes part from the next round on.
At the end all agree on one exit code.

torch's own dynamic rendezvous (c10d) restarts as well. It is not used because it numbers machines by their host names,
so rank 0 may move to another machine; it does not name the machine that it waits for; and a machine that is started
twice makes it restart a healthy run (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py, torch 2.13).
"""

import json
import platform
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore

from zerofit.launch.rendezvous import BEAT_S, Ended, Meeting, open_store, reach, serve_store
from zerofit.launch.restart_rule import code_of_run
from zerofit.recipe.errors import EXIT_FAILED, UserError, first_line

SILENT_S = 10.0  # a launcher that gives no sign of life for so long is gone
GRACE_S = 15.0  # processes of this machine end by themselves within it, and say why, when others have


class MachineGroup:
    """The launcher of one machine, among those of all.

    Args:
        address, port: of the store, which machine 0 serves.
        number: of this machine.
        limit_s: a machine without a sign of life for so long ends a meeting.

    Attributes:
        round: meetings that are over.

    Raises:
        UserError: machine 0 cannot be reached; this machine takes part already.
    """

    def __init__(self, address: str, port: int, number: int, count: int, limit_s: float):
        self.address, self.number, self.count, self.limit_s = address, number, count, limit_s
        self._server = serve_store(port, everywhere=True) if number == 0 else None
        reach(address, port, limit_s)
        self._store = open_store(address, port)
        try:
            self._take_part()
        except RuntimeError as error:
            raise Ended(
                f"machine 0 has ended: its rendezvous store does not answer ({first_line(error)})", EXIT_FAILED
            ) from error
        self._machines: dict[str, dict[str, Any]] = {}
        self._looked_at = self._waiting_since = 0.0
        self._beat_ends = threading.Event()
        self._beats = threading.Thread(target=self._beat, args=(self._store.clone(),), daemon=True)
        self._beats.start()

    def _take_part(self) -> None:
        number = self.number
        self.round = self._store.add("zerofit/rounds", 0)
        self._replaces = self._store.add(f"zerofit/alive{number}", 1) > 1
        if self._replaces and self._is_alive(number):
            raise UserError(
                f"machine {number} takes part in this run already, and {platform.node()} has the same number. Give "
                "each machine its own --machine_rank"
            )
        if self._replaces:
            say(f"machine {number} ({platform.node()}) has been lost and started again: all machines restart")

    def meet(self) -> Any:
        """Wait until all machines have come. Returns the store of this round's ranks.

        Raises:
            Ended: a machine has stopped or is missing.
        """
        meeting = self._next_meeting()
        meeting.come(again=self._replaces or self.round > 0)
        meeting.ready()
        while not meeting.poll():
            time.sleep(BEAT_S / 4)
        key = f"zerofit/port{self.round}"
        if self.number == 0:
            if self.round or self._server is None:  # gloo would find addresses of the processes before in the old one
                self._server_of_ranks = serve_store(0, everywhere=True)
            else:
                self._server_of_ranks = self._server
            self._store.set(key, str(self._server_of_ranks.port))
            self._store.add("zerofit/rounds", 1)
        port = int(self._store.get(key))
        self.round, self._machines, self._waiting_since = self.round + 1, meeting.machines, 0.0
        return self._server_of_ranks if self.number == 0 else open_store(self.address, port)

    def num_waiting(self) -> int:
        """How many machines have come to the next meeting. Asks the store once a second.

        Raises:
            Ended: a machine does not restart; machine 0 is gone.
        """
        now = time.monotonic()
        if now < self._looked_at + BEAT_S:
            return 0
        self._looked_at = now
        store = self._next_store()
        try:
            end = json.loads(store.get("end")) if store.check(["end"]) else None
            waiting = store.add("ready", 0)
        except RuntimeError as error:
            raise Ended(
                f"machine 0 is gone: its rendezvous store does not answer ({first_line(error)})", EXIT_FAILED
            ) from error
        if end is None and not waiting:
            return 0
        self._waiting_since = self._waiting_since or now
        if now < self._waiting_since + GRACE_S:
            return 0
        if end is not None:
            raise Ended(**end)
        came = [number for number in range(self.count) if number != self.number and store.check([f"{number}/card"])]
        hosts = [f"machine {number} ({json.loads(store.get(f'{number}/card'))['host']})" for number in came]
        say(f"restart with {', '.join(hosts)}: the processes there have failed or were lost")
        return waiting

    def failures(self, failed: bool = False) -> int:
        """After how many rounds processes have failed.

        Args:
            failed: they have, after the last one.
        """
        if failed:
            self._store.set(f"zerofit/failed{self.round}", "")
        return sum(self._store.check([f"zerofit/failed{number}"]) for number in range(1, self.round + 1))

    def has_finished(self) -> bool:
        """Whether the processes of some machine have come to their end."""
        keys = [f"zerofit/code{number}" for number in range(self.count)]
        return any(self._store.check([key]) and self._store.get(key) == b"0" for key in keys)

    def end(self, message: str, code: int) -> None:
        """Tell all that this machine does not restart."""
        self._next_meeting().stop(message, code)

    def settle(self, code: int, recorded: int | None) -> int:
        """Wait for the codes of the other machines, as long as they give signs of life. Returns that of the run, on
        all machines the same.

        Args:
            code: of this machine.
            recorded: of the run, where its folder has it; counts on machine 0.
        """
        store = self._store
        try:
            if self.number == 0 and recorded is not None:
                store.set("zerofit/recorded", str(recorded))
            store.set(f"zerofit/code{self.number}", str(code))
            others = [number for number in range(self.count) if number != self.number]
            silent = self._wait(lambda number: store.check([f"zerofit/code{number}"]), others)
            known = [number for number in range(self.count) if number not in silent]
            codes = [int(store.get(f"zerofit/code{number}")) for number in known]
            if store.check(["zerofit/recorded"]):
                codes = [int(store.get("zerofit/recorded"))]
            store.set(f"zerofit/left{self.number}", "")
            if self.number == 0:  # it has the store
                self._wait(lambda number: store.check([f"zerofit/left{number}"]), known[1:])
        except RuntimeError:  # machine 0 is gone
            return code
        return code_of_run(codes)

    def _wait(self, is_known: Callable[[int], bool], numbers: list[int]) -> set[int]:
        """Wait for machines. Returns those that give no sign of life any more."""
        seen: dict[int, tuple[int, float]] = {}  # {machine: its last beat, and when that was new}
        while True:
            now = time.monotonic()
            rest = [number for number in numbers if not is_known(number)]
            for number in rest:
                beats = self._store.add(f"zerofit/alive{number}", 0)
                if seen.get(number, (None, now))[0] != beats:
                    seen[number] = beats, now
            silent = {number for number in rest if now > seen[number][1] + SILENT_S}
            if len(silent) == len(rest):
                return silent
            time.sleep(BEAT_S / 4)

    def _is_alive(self, number: int) -> bool:
        """Whether a machine gives a sign of life within SILENT_S."""
        key, until = f"zerofit/alive{number}", time.monotonic() + SILENT_S
        before = self._store.add(key, 0)
        while time.monotonic() < until:
            if self._store.add(key, 0) != before:
                return True
            time.sleep(BEAT_S / 4)
        return False

    def _beat(self, store: Any) -> None:
        try:
            while not self._beat_ends.wait(BEAT_S):
                store.add(f"zerofit/alive{self.number}", 1)
        except RuntimeError:  # machine 0 is gone; who needs it will say so
            return

    def _next_store(self) -> PrefixStore:
        return PrefixStore(f"zerofit/machines{self.round}", self._store)

    def _next_meeting(self) -> Meeting:
        return Meeting(
            self._next_store(), "machine", self.number, self.count, 1, self.number, self.limit_s, self._machines
        )


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
