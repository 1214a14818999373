"""Before there is a process group, machines and then ranks meet: who is there, who is missing, who stopped and why.

A process group waits for its members for hours, and names none. So each member says in the store of the rendezvous
that it is there, and again every second; one that ends before all are ready says why, and all end with it. The first
member watches all others, these watch the first. `zerofit launch` lets machines meet (zerofit/launch/agent.py), a
run on several machines its ranks (zerofit/launch/ranks.py).
"""

import json
import os
import platform
import socket
import time
from datetime import timedelta
from typing import Any

from zerofit.recipe.errors import EXIT_FAILED, EXIT_USER_ERROR, UserError, first_line
from zerofit.recipe.places import digest_of_code
from zerofit.strategy.named import RENDEZVOUS

BEAT_S = 1.0
KNOWN_S = 30.0  # the machine with the store waits so long until others know why it ends: they may still be importing
STORE_S = 60.0  # for an answer of the store


class Ended(UserError):
    """A member has ended before all had met.

    Args:
        code: the exit code of all others.
        machine: of the member; None: a machine cannot be reached.
    """

    def __init__(self, message: str, code: int = EXIT_USER_ERROR, machine: int | None = None):
        super().__init__(message)
        self.code, self.machine = code, machine


class Meeting:
    """One member's view of a meeting.

    Args:
        store: a torch.distributed.Store; its server is on machine 0.
        kind: what the members are: machine or rank.
        number: of this member.
        count: of all members.
        here: members on this machine.
        machine: the number of this machine.
        limit_s: a member without a sign of life for so long ends the meeting.
        known: the machines of the meeting before, where members meet again.
    """

    def __init__(
        self,
        store: Any,
        kind: str,
        number: int,
        count: int,
        here: int,
        machine: int,
        limit_s: float,
        known: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        self.store, self.kind, self.number, self.count, self.here = store, kind, number, count, here
        self.machine, self.limit_s, self._known = machine, limit_s, known or {}
        self.machines: dict[str, dict[str, Any]] = {}  # when all have met: {number: what `_card` says}
        self.is_ready, self._has_left = False, False
        self._beats: dict[Any, Any] = {}

    def come(self, again: bool = False) -> None:
        """Say that this member is there.

        Args:
            again: it may have come before, and died.

        Raises:
            Ended: another has the same number.
        """
        store = self.store
        if store.add(f"{self.number}/came", 1) > 1 and not again:
            first = self._described(self.number)
            self._end(
                f"{self.kind} {self.number} is there twice: {first}, and on host {platform.node()}. Give each machine "
                f"its own number (--machine_rank; torchrun: --node_rank)"
            )
        store.set(f"{self.number}/card", json.dumps(_card(self.machine)))

    def ready(self) -> None:
        """Say that this member can go on as soon as all others can."""
        self.is_ready = True
        self.store.add("ready", 1)

    def poll(self) -> bool:
        """Give a sign of life and look around. Returns whether all are ready.

        Raises:
            Ended: a member has stopped, is missing, or the store is gone.
        """
        store = self.store
        try:
            store.add(f"{self.number}/beats", 1)
            if store.check(["end"]):
                end = json.loads(store.get("end"))
                self._leave()
                raise Ended(**end)
            if self.is_ready and self.number == 0 and store.add("ready", 0) >= self.count:
                cards = map(json.loads, store.multi_get([f"{number}/card" for number in range(self.count)]))
                store.set("all", json.dumps({card["machine"]: card for card in cards}))
            if self.is_ready and store.check(["all"]):
                self.machines = json.loads(store.get("all"))
                return True
            self._look_for_missing()
        except RuntimeError as error:  # of torch: DistNetworkError, DistStoreError
            raise Ended(
                f"machine 0, which has the rendezvous store, is gone before all {self.kind}s had met "
                f"({first_line(error)}). Look at its output",
                EXIT_FAILED,
            ) from error
        return False

    def stop(self, message: str, code: int = EXIT_USER_ERROR) -> None:
        """Tell all others why this member ends, if nobody has ended before; returns when they can know it."""
        who = f"{self.kind} {self.number} of " * (self.kind == "rank") + f"machine {self.machine} ({platform.node()})"
        end = {"message": f"{who} has stopped: {message.removeprefix('error: ')}", "code": code}
        self.store.compare_set("end", "", json.dumps({**end, "machine": self.machine}))
        self._leave()

    def _leave(self, missing: int = 0) -> None:
        """Say that this member knows of the end. On the machine of the store: wait until the others know as well."""
        if self._has_left:
            return
        self._has_left = True
        if self.machine:
            self.store.add("left", 1)
            return
        until, others = time.monotonic() + KNOWN_S, self.count - self.here - missing
        while self.store.add("left", 0) < others and time.monotonic() < until:
            time.sleep(0.1)

    def _look_for_missing(self) -> None:
        now, watched = time.monotonic(), range(1, self.count) if self.number == 0 else [0]
        for number in watched:
            beats, _ = self._beats.get(number, (0, None))
            if number not in self._beats or self.store.add(f"{number}/beats", 0) != beats:
                self._beats[number] = (self.store.add(f"{number}/beats", 0), now)
        missing = [number for number in watched if now - self._beats[number][1] > self.limit_s]
        if not missing:
            return
        # A machine that was never there may be a mistake; one that was may be there again for the same command.
        is_lost = self.kind == "rank" or bool(self._known) or all(map(self._has_come, missing))
        shown = [self._described(number) for number in missing[:8]] + ["..."] * (len(missing) > 8)
        self._end(
            f"no sign of life within --rendezvous_minutes {self.limit_s / 60:g} from {', '.join(shown)}. Start all "
            "machines, each with the same --num_machines, its own --machine_rank and the address of machine 0, and "
            "look at the output of the one that is silent",
            len(missing),
            EXIT_FAILED if is_lost else EXIT_USER_ERROR,
        )

    def _has_come(self, number: int) -> bool:
        return bool(self.store.check([f"{number}/card"]))

    def _described(self, number: int) -> str:
        if self._has_come(number):
            return f"{self.kind} {number} on host {json.loads(self.store.get(f'{number}/card'))['host']}"
        if before := self._known.get(str(number)):
            return f"{self.kind} {number} (on host {before['host']} before), which has not come again"
        return f"{self.kind} {number}, which has never come"

    def _end(self, message: str, missing: int = 0, code: int = EXIT_USER_ERROR) -> None:
        end: dict[str, Any] = {"message": message, "code": code, "machine": None}
        self.store.compare_set("end", "", json.dumps(end))
        self._leave(missing)
        raise Ended(**end)

    @property
    def notes(self) -> list[str]:
        """For the log: machines whose code differs from that of machine 0."""
        first, *others = self.machines.values() or [{}]
        return [
            f"machine {card['machine']} ({card['host']}) runs other code than machine 0 ({first['host']}): the files "
            f"of zerofit/ have the digest {card['code']} there, {first['code']} here. Check out the same commit"
            for card in others
            if card["code"] != first["code"]
        ]

    def machine_at(self, address: str) -> str | None:
        """The machine with an address, in words."""
        found = [card for card in self.machines.values() if address in (*card["addresses"], card["host"])]
        return f"machine {found[0]['machine']} ({found[0]['host']})" if len(found) == 1 else None


def _card(machine: int) -> dict[str, Any]:
    import psutil

    addresses = [
        address.address
        for of_one in psutil.net_if_addrs().values()
        for address in of_one
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return {"machine": machine, "host": platform.node(), "addresses": addresses, "code": digest_of_code()[:8]}


# -------------------------------------------------------------------------------------------------------------- stores


def reach(address: str, port: int, limit_s: float) -> None:
    """Wait until a port of machine 0 accepts connections.

    Raises:
        UserError: it has not, for so long.
    """
    until = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((address, port), timeout=min(5.0, limit_s)).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise UserError(
                    f"{platform.node()} has not reached machine 0 at {address}:{port} within --rendezvous_minutes "
                    f"{limit_s / 60:g}: {error.strerror or error}. Check that machine 0 has been started, and "
                    "that --main_process_ip is its address (MASTER_ADDR; torchrun: --master_addr)"
                ) from error
            time.sleep(min(1.0, limit_s / 10))


def open_store(address: str, port: int) -> Any:
    """A connection to the store of machine 0.

    Raises:
        UserError: something else listens there.
    """
    from torch.distributed import TCPStore

    try:
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=STORE_S))
    except RuntimeError as error:
        raise UserError(
            f"what listens at {address}:{port} is not the store of machine 0 ({first_line(error)}). Check "
            "--main_process_ip and --main_process_port"
        ) from error


def store_of_one_process() -> Any:
    """The rendezvous store of a process that nobody has launched, and that others cannot reach; None: there is no such
    store, or it is another's."""
    environment = os.environ
    alone = environment.get("WORLD_SIZE") == "1" and "TORCHELASTIC_RUN_ID" not in environment
    if not alone or environment.get("MASTER_ADDR") != RENDEZVOUS["MASTER_ADDR"]:
        return None
    return serve_store(int(environment["MASTER_PORT"]), everywhere=False)


def serve_store(port: int, everywhere: bool) -> Any:
    """Serve a store in this process, which the next TCPStore of this process and port uses as well.

    Args:
        port: 0: any free one.
        everywhere: on all interfaces; else on the loopback interface only.

    Raises:
        UserError: the port is in use.
    """
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if everywhere and socket.has_dualstack_ipv6() else socket.AF_INET
    host = "" if everywhere else "127.0.0.1"
    try:
        server = socket.create_server(
            (host, port), family=family, backlog=4096, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        raise UserError(
            f"port {port} of {platform.node()}: {error.strerror}. Another run has it, or this machine was started "
            "twice. Use another --main_process_port on all machines (0 on one machine: any free one)"
        ) from error
    port = server.getsockname()[1]
    return TCPStore(
        "localhost" if everywhere else host,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=server.detach(),
        timeout=timedelta(seconds=STORE_S),
    )
