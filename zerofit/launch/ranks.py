"""The ranks of a run on several machines meet before they have a process group (rendezvous.py).

The launcher of a machine ends its ranks when one of them has failed, and under torchrun it knows nothing of the other
machines. While a rank prepares its data, a thread of it gives signs of life, and ends the rank when one on another
machine has ended.
"""

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from zerofit.launch.rendezvous import BEAT_S, LIMIT_S, LIMIT_VARIABLE, Ended, Rendezvous, open_store, serve_store
from zerofit.recipe.errors import UserError, leave, print_last, printable, record_code

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
CONNECT_S = 20.0  # to say why this rank ends before it has come
LAUNCHER_S = 40.0  # within which a launcher ends the ranks of its machine


class RankRendezvous:
    """This rank's part in the rendezvous of all; nothing happens where all ranks are on one machine."""

    def __init__(self, environment: Mapping[str, str] = os.environ):
        def number(name: str, default: int) -> int:
            return int(environment.get(name, default))

        self.rank, self.count = number("RANK", 0), number("WORLD_SIZE", 1)
        self.local_rank = number("LOCAL_RANK", 0)
        self.here = number("LOCAL_WORLD_SIZE", self.count)
        self.machine = self.rank // self.here
        self.address, self.port = environment.get("MASTER_ADDR", ""), number("MASTER_PORT", 0)
        self.serves = self.rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.limit_s = float(environment.get(LIMIT_VARIABLE, LIMIT_S))
        self.attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.is_open = self.count > self.here and bool(self.address)  # nobody has ended, and not all have met
        self.rendezvous: Rendezvous | None = None
        self.store: Store | None = None
        self._met, self._server = threading.Event(), None

    def start(self) -> None:
        """Come to the rendezvous, and give signs of life from now on. Raises UserError: machine 0 cannot be reached;
        another rank has the same number."""
        if self.is_open:
            rendezvous = self._come(self.limit_s)
            threading.Thread(target=self._watch, args=(rendezvous,), daemon=True).start()

    def wait(self) -> list[str]:
        """Wait until all ranks have come so far. Returns notes for the log."""
        if not self.is_open or self.rendezvous is None:
            return []
        self.rendezvous.ready()
        self._met.wait()
        first, *others = self.rendezvous.machines.values()
        return [
            f"machine {each['machine']} ({each['host']}) runs other code than machine 0 ({first['host']}). Check out "
            "the same commit"
            for each in others
            if each["code"] != first["code"]
        ]

    def stop(self, message: str, code: int) -> None:
        """Tell the other machines that this rank ends, and why; called at any end. Never fails."""
        if self.is_open:
            self.is_open = False
            with contextlib.suppress(Exception):
                (self.rendezvous or self._come(CONNECT_S)).stop(message, code)

    def first_on_rank_0(self, name: str, action: Callable[[], T]) -> T | None:
        """Let rank 0 do something before all others go on. Returns its result there, None on other ranks. Raises
        UserError: of rank 0, on all ranks."""
        if self.count == 1:
            return action()
        store, key = self.store or self._connect(CONNECT_S), f"zerofit/first{self.attempt}/{name}"
        if self.rank:
            while not store.check([key]):  # not `wait`, which would keep the signs of life from the store
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

    @property
    def machines(self) -> list[str]:
        """All machines, in words; where they have not met, this one."""
        met = {} if self.rendezvous is None else self.rendezvous.machines
        hosts = {each["machine"]: each["host"] for each in met.values()} or {self.machine: platform.node()}
        return [f"machine {number} ({hosts[number]})" for number in sorted(hosts)]

    def place_of(self, rank: int, device: str) -> str:
        """Say where a rank runs."""
        machine, index = divmod(rank, self.here)
        return self.machines[machine] if device == "cpu" else f"{self.machines[machine]}, GPU {index}"

    def _connect(self, limit_s: float) -> "Store":
        if self.serves:
            self._server = serve_store(self.port, everywhere=True)
        self.store = open_store(self.address, self.port, limit_s)
        return self.store

    def _come(self, limit_s: float) -> Rendezvous:
        from torch.distributed import PrefixStore

        store = PrefixStore(f"zerofit/ranks{self.attempt}", self._connect(limit_s))
        self.rendezvous = Rendezvous(store, "rank", self.rank, self.count, limit_s=limit_s, here=self.here)
        self.rendezvous.come()
        return self.rendezvous

    def _watch(self, rendezvous: Rendezvous) -> None:
        try:
            while self.is_open and not rendezvous.poll():
                time.sleep(BEAT_S / 10 if rendezvous.is_ready else BEAT_S)
        except Ended as end:
            if not self.is_open:
                return
            self.is_open = False
            if self.local_rank or end.machine == self.machine:
                time.sleep(LAUNCHER_S)  # it ends this rank when the one that speaks has ended
            else:
                record_code(end.code, end.report())
                print_last(printable(end.report()))
            leave(end.code)
        if self.is_open:
            self.is_open = False
            self._met.set()
