"""Machines, and then ranks, meet before there is a process group, and say who is missing, or who stopped and why.

A process group waits for its members for hours, and names none. So each member says in the store of the rendezvous
that it is there, and again every second; one that ends before all are ready says why, and all end with it. The first
member watches all others, these watch the first. `zerofit launch` lets machines meet (machine_group.py), a run on
several machines its ranks (ranks.py).
"""

import json
import os
import platform
import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from zerofit.recipe.errors import EXIT_FAILED, EXIT_USER_ERROR, UserError, first_line
from zerofit.recipe.places import digest_of_code
from zerofit.strategy.named import RENDEZVOUS

BEAT_S = 1.0
LIMIT_S = 600.0  # without a sign of life; `zerofit launch --rendezvous_minutes` sets another
LIMIT_VARIABLE = "ZEROFIT_RENDEZVOUS_S"  # what it tells its ranks
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


class Heartbeats:
    """Signs of life that the members of a group count up in a store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._seen: dict[int, tuple[int, float]] = {}  # {member: its last beat, and when that was new}

    def beat(self, number: int, times: int = 1) -> int:
        """Give signs of life for a member. Returns their number so far."""
        return int(self._store.add(f"{number}/beats", times))

    def silent(self, numbers: Iterable[int], limit_s: float) -> list[int]:
        """The members that have given no sign of life for so long, since they were looked at for the first time."""
        now = time.monotonic()
        for number in (numbers := list(numbers)):
            beats = self.beat(number, 0)
            if self._seen.get(number, (None, now))[0] != beats:
                self._seen[number] = beats, now
        return [number for number in numbers if now - self._seen[number][1] > limit_s]


class Rendezvous:
    """One member's view of a rendezvous.

    Args:
        store: a torch.distributed.Store; its server is on machine 0.
        kind: what the members are: machine or rank.
        limit_s: a member without a sign of life for so long ends the rendezvous.
        here: members on each machine.
        again: the members have met before, or this one has come before and died.

    Attributes:
        machines: when all have met, {number: the machine's number, host and code}.
    """

    def __init__(
        self, store: Any, kind: str, number: int, count: int, *, limit_s: float, here: int = 1, again: bool = False
    ) -> None:
        self.store, self.kind, self.number, self.count, self.here = store, kind, number, count, here
        self.machine, self.limit_s, self.again = number // here, limit_s, again
        self.machines: dict[str, dict[str, Any]] = {}
        self.is_ready, self._has_left = False, False
        self._beats = Heartbeats(store)

    def come(self) -> None:
        """Say that this member is there. Raises Ended: another has the same number."""
        if self.store.add(f"{self.number}/came", 1) > 1 and not self.again:
            first = self._described(self.number)
            message = (
                f"{self.kind} {self.number} is there twice: {first}, and on host {platform.node()}. Give each machine "
                "its own number (--machine_rank; torchrun: --node_rank)"
            )
            self._tell(message, EXIT_USER_ERROR)
            raise Ended(message)
        about = {"machine": self.machine, "host": platform.node(), "code": digest_of_code()}
        self.store.set(f"{self.number}/machine", json.dumps(about))

    def ready(self) -> None:
        """Say that this member can go on as soon as all others can."""
        self.is_ready = True
        self.store.add("ready", 1)

    def poll(self) -> bool:
        """Give a sign of life and look around. Returns whether all are ready. Raises Ended: a member has stopped, is
        missing, or the store is gone."""
        store = self.store
        try:
            self._beats.beat(self.number)
            if store.check(["end"]):
                end = json.loads(store.get("end"))
                self._leave()
                raise Ended(**end)
            if self.is_ready and self.number == 0 and store.add("ready", 0) >= self.count:
                found = map(json.loads, store.multi_get([f"{number}/machine" for number in range(self.count)]))
                store.set("all", json.dumps({machine["machine"]: machine for machine in found}))
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

    def stop(self, message: str, code: int) -> None:
        """Tell all others why this member ends, if nobody has ended before; returns when they can know it."""
        who = f"machine {self.machine} ({platform.node()})"
        who = f"rank {self.number} of {who}" if self.kind == "rank" else who
        self._tell(f"{who} has stopped: {message.removeprefix('error: ')}", code, self.machine)

    def _tell(self, message: str, code: int, machine: int | None = None) -> None:
        self.store.compare_set("end", "", json.dumps({"message": message, "code": code, "machine": machine}))
        self._leave()

    def _leave(self) -> None:
        """Say that this member knows of the end. On the machine of the store: wait until the others know as well."""
        if self._has_left:
            return
        self._has_left = True
        if self.machine:
            self.store.add("left", 1)
            return
        until, others = time.monotonic() + KNOWN_S, self.count - self.here
        while self.store.add("left", 0) < others and time.monotonic() < until:
            time.sleep(0.1)

    def _look_for_missing(self) -> None:
        watched = range(1, self.count) if self.number == 0 else [0]
        missing = self._beats.silent(watched, self.limit_s)
        if not missing:
            return
        # A machine that was never there may be a mistake; one that was may be there again for the same command.
        is_lost = self.kind == "rank" or self.again or all(map(self._has_come, missing))
        shown = [self._described(number) for number in missing[:8]]
        if len(missing) > 8:
            shown.append("...")
        message = (
            f"no sign of life within {self.limit_s / 60:g} minutes from {', '.join(shown)}. Start all "
            "machines, each with the same --num_machines, its own --machine_rank and the address of machine 0, and "
            "look at the output of the one that is silent"
        )
        code = EXIT_FAILED if is_lost else EXIT_USER_ERROR
        self._tell(message, code)
        raise Ended(message, code)

    def _has_come(self, number: int) -> bool:
        return bool(self.store.check([f"{number}/machine"]))

    def _described(self, number: int) -> str:
        if self._has_come(number):
            return f"{self.kind} {number} on host {json.loads(self.store.get(f'{number}/machine'))['host']}"
        return f"{self.kind} {number}, which has {'not come again' if self.again else 'never come'}"


# -------------------------------------------------------------------------------------------------------------- stores


def open_store(address: str, port: int, limit_s: float) -> Any:
    """Connect to the store of machine 0, and wait for it. Raises UserError: it cannot be reached for so long, or
    something else listens there."""
    from torch.distributed import TCPStore

    until = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((address, port), timeout=min(5.0, limit_s)).close()
            break
        except OSError as error:
            if time.monotonic() > until:
                raise UserError(
                    f"{platform.node()} has not reached machine 0 at {address}:{port} within "
                    f"{limit_s / 60:g} minutes: {error.strerror or error}. Check that machine 0 has been started, and "
                    "that --main_process_ip is its address (MASTER_ADDR; torchrun: --master_addr)"
                ) from error
            time.sleep(min(1.0, limit_s / 10))
    try:
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=STORE_S))
    except RuntimeError as error:
        raise UserError(
            f"what listens at {address}:{port} is not the store of machine 0 ({first_line(error)}). Check "
            "--main_process_ip and --main_process_port"
        ) from error


def serve_store(port: int, everywhere: bool) -> Any:
    """Serve a store in this process, which the next TCPStore of this process and port uses as well. Raises UserError:
    the port is in use.

    Args:
        port: 0: any free one.
        everywhere: on all interfaces; else on the loopback interface only.
    """
    from torch.distributed import TCPStore

    both = everywhere and socket.has_dualstack_ipv6()
    family, host = socket.AF_INET6 if both else socket.AF_INET, "" if everywhere else "127.0.0.1"
    try:
        server = socket.create_server((host, port), family=family, backlog=4096, dualstack_ipv6=both)
    except OSError as error:
        raise UserError(
            f"port {port} of {platform.node()}: {error.strerror}. Another run has it, or this machine was started "
            "twice. Use another --main_process_port on all machines (0 on one machine: any free one)"
        ) from error
    return TCPStore(
        host or "localhost",
        server.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=server.detach(),
        timeout=timedelta(seconds=STORE_S),
    )


def store_of_one_process() -> Any:
    """The rendezvous store of a process that nobody has launched, and that others cannot reach; None: there is no such
    store, or it is another's."""
    environment = os.environ
    alone = environment.get("WORLD_SIZE") == "1" and "TORCHELASTIC_RUN_ID" not in environment
    if not alone or environment.get("MASTER_ADDR") != RENDEZVOUS["MASTER_ADDR"]:
        return None
    return serve_store(int(environment["MASTER_PORT"]), everywhere=False)
