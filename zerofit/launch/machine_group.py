"""The launchers of all machines of a run agree here, from the first start of their processes to the end.

They meet before each start (rendezvous.py): in round 0, and in one more for each restart. A launcher whose processes
have failed comes to the next round; the others see it, end their processes and come too. One that does not restart
says so there, and all end. A machine that a scheduler has started again takes part from the next round on. At the end
all agree on one exit code.

torch's own dynamic rendezvous (c10d) restarts as well. It is not used because it numbers machines by their host names,
so rank 0 may move to another machine; it does not name the machine that it waits for; and a machine that is started
twice makes it restart a healthy run (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py, torch 2.13).
"""

import atexit
import json
import platform
import sys
import threading
import time
from typing import Any

from torch.distributed import PrefixStore

from zerofit.launch.exit_code import code_of_run
from zerofit.launch.rendezvous import BEAT_S, Ended, Heartbeats, Rendezvous, asking_machine_0, open_store, serve_store
from zerofit.recipe.errors import UserError

SILENT_S = 10.0  # a launcher that gives no sign of life for so long is gone
GRACE_S = 15.0  # processes of this machine end by themselves within it, and say why, when others have


class MachineGroup:
    """The launcher of one machine, among those of all. Raises UserError: machine 0 cannot be reached; this machine
    takes part already. A machine without a sign of life for `limit_s` ends a rendezvous."""

    def __init__(self, address: str, port: int, number: int, count: int, limit_s: float):
        self.address, self.number, self.count, self.limit_s = address, number, count, limit_s
        self._servers = [serve_store(port, everywhere=True)] if number == 0 else []
        store = open_store(address, port, limit_s)
        self._store = PrefixStore("zerofit", store)
        with asking_machine_0():
            self._take_part()
        self._looked_at = self._waiting_since = 0.0
        self._beat_ends = threading.Event()
        self._beats = threading.Thread(
            target=self._beat, args=(Heartbeats(PrefixStore("zerofit", store.clone())),), daemon=True
        )
        self._beats.start()
        atexit.register(self.fall_silent)

    def fall_silent(self) -> None:
        """Give no more signs of life. A thread that is in the store's C++ as Python ends would abort the process."""
        self._beat_ends.set()
        self._beats.join(SILENT_S)

    def _take_part(self) -> None:
        number, beats = self.number, Heartbeats(self._store)
        self.round = self._store.add("rounds", 0)  # how often all have met
        first = beats.beat(number)
        self._replaces = first > 1
        while self._replaces and not beats.silent([number], SILENT_S):
            if beats.beat(number, 0) > first:
                raise UserError(
                    f"machine {number} takes part in this run already, and {platform.node()} has the same number. "
                    "Give each machine its own --machine_rank"
                )
            time.sleep(BEAT_S / 4)
        if self._replaces:
            log(f"machine {number} ({platform.node()}) has been lost and started again: all machines restart")

    def meet(self) -> Any:
        """Wait until all machines have come. Returns the store of this round's ranks. Raises Ended: a machine has
        stopped or is missing."""
        rendezvous = self._next_rendezvous()
        rendezvous.come()
        rendezvous.ready()
        while not rendezvous.poll():
            time.sleep(BEAT_S / 4)
        key = f"port{self.round}"
        if self.number == 0:
            if self.round:  # gloo would find addresses of the processes before in the old one
                self._servers.append(serve_store(0, everywhere=True))
            self._store.set(key, str(self._servers[-1].port))
            self._store.add("rounds", 1)
        port = int(self._store.get(key))
        self.round, self._waiting_since = self.round + 1, 0.0
        return self._servers[-1] if self.number == 0 else open_store(self.address, port, self.limit_s)

    def num_waiting(self) -> int:
        """Count the machines that have come to the next rendezvous. Asks the store once a second. Raises Ended: a
        machine does not restart; machine 0 is gone."""
        now = time.monotonic()
        if now < self._looked_at + BEAT_S:
            return 0
        self._looked_at = now
        store = self._next_rendezvous().store
        with asking_machine_0():
            end = json.loads(store.get("end")) if store.check(["end"]) else None
            waiting = store.add("ready", 0)
        if end is None and not waiting:
            return 0
        self._waiting_since = self._waiting_since or now
        if now < self._waiting_since + GRACE_S:
            return 0
        if end is not None:
            raise Ended(**end)
        came = [json.loads(store.get(key)) for key in self._keys("{}/machine", store)]
        hosts = [f"machine {each['machine']} ({each['host']})" for each in came if each["machine"] != self.number]
        log(f"restart with {', '.join(hosts)}: the processes there have failed or were lost")
        return waiting

    def failures(self, failed: bool = False) -> int:
        """Count the rounds after which processes have failed."""
        if failed:
            self._store.set(f"failed{self.round}", "")
        return sum(self._store.check([f"failed{number}"]) for number in range(1, self.round + 1))

    def has_finished(self) -> bool:
        """Return whether the processes of some machine have come to their end."""
        return any(self._store.get(key) == b"0" for key in self._keys("code{}"))

    def end(self, message: str, code: int) -> None:
        """Tell all that this machine does not restart."""
        self._next_rendezvous().stop(message, code)

    def settle(self, code: int, recorded: int | None) -> int:
        """Wait for the codes of the other machines, as long as they give signs of life. Returns that of the run, on
        all machines the same: `recorded` of machine 0, where its folder has it."""
        store, beats = self._store, Heartbeats(self._store)
        try:
            if self.number == 0 and recorded is not None:
                store.set("recorded", str(recorded))
            store.set(f"code{self.number}", str(code))
            self._wait_for_all("code{}", beats)
            codes = [int(store.get(key)) for key in self._keys("code{}")]
            if store.check(["recorded"]):
                codes = [int(store.get("recorded"))]
            store.set(f"left{self.number}", "")
            if self.number == 0:  # it has the store
                self._wait_for_all("left{}", beats)
        except RuntimeError:  # machine 0 is gone
            return code
        return code_of_run(codes)

    def _wait_for_all(self, key: str, beats: Heartbeats) -> None:
        """Wait until all machines that give signs of life have set a key."""
        while missing := [number for number in range(self.count) if not self._store.check([key.format(number)])]:
            if len(beats.silent(missing, SILENT_S)) == len(missing):
                return
            time.sleep(BEAT_S / 4)

    def _keys(self, key: str, store: Any = None) -> list[str]:
        """Return those of the machines' keys that are set."""
        keys = [key.format(number) for number in range(self.count)]
        return [key for key in keys if (store or self._store).check([key])]

    def _beat(self, beats: Heartbeats) -> None:
        try:
            while not self._beat_ends.wait(BEAT_S):
                beats.beat(self.number)
        except RuntimeError:  # machine 0 is gone; who needs it will say so
            return

    def _next_rendezvous(self) -> Rendezvous:
        """Return the rendezvous of the machines before the next start of their processes."""
        store = PrefixStore(f"machines{self.round}", self._store)
        again = self._replaces or self.round > 0
        return Rendezvous(store, "machine", self.number, self.count, limit_s=self.limit_s, again=again)


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
