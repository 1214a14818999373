"""Machines, and then ranks, meet before there is a process group, and say who is missing, or who stopped and why.

A process group waits for its members for hours, and names none. So each member says in the store of the rendezvous
that it is there, and again every second; one that ends before all are ready says why, and all end with it. The first
member watches all others, these watch the first. `zerofit launch` lets machines meet (agent.py), a run on
several machines its ranks.

The launcher of a machine ends its ranks when one of them has failed, and under torchrun it knows nothing of the other
machines. While a rank prepares its data, a thread of it gives signs of life, and ends the rank when one on another
machine has ended.
"""

import contextlib
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from zerofit.health.flight import listed
from zerofit.recipe.errors import (
    EXIT_FAILED,
    EXIT_USER_ERROR,
    UserError,
    escape_controls,
    first_line,
    leave,
    print_last,
    record_code,
)
from zerofit.recipe.files import digest_of_code
from zerofit.strategy.launch import SINGLE_ENV

BEAT_S = 1.0
RENDEZVOUS_LIMIT_S = 600.0  # without a sign of life; `zerofit launch --rendezvous_minutes` sets another
RENDEZVOUS_LIMIT_VARIABLE = "ZEROFIT_RENDEZVOUS_S"  # what it tells its ranks
KNOWN_S = 30.0  # the machine with the store waits so long until others know why it ends: they may still be importing
STORE_TIMEOUT_S = 60.0  # for an answer of the store


class Ended(UserError):
    """A member has ended before all had met."""

    def __init__(self, message: str, code: int = EXIT_USER_ERROR, machine: int | None = None):
        super().__init__(message)
        self.code = code  # of all others
        self.machine = machine  # of the member; None: a machine cannot be reached


@contextlib.contextmanager
def asking_machine_0() -> Iterator[None]:
    """Raises Ended where the store of machine 0 does not answer in this block."""
    try:
        yield
    except RuntimeError as error:  # of torch: DistNetworkError, DistStoreError
        said = f"machine 0, which has the rendezvous store, is gone ({first_line(error)}). Look at its output"
        raise Ended(said, EXIT_FAILED) from error


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
    """

    def __init__(
        self, store: Any, kind: str, number: int, count: int, *, limit_s: float, here: int = 1, again: bool = False
    ) -> None:
        self.store = store
        self.kind = kind
        self.number = number
        self.count = count
        self.here = here
        self.machine = number // here
        self.limit_s = limit_s
        self.again = again
        self.machines: dict[str, dict[str, Any]] = {}  # {number: its number, host and code}, when all have met
        self.is_ready = False
        self._has_left = False
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
        with asking_machine_0():
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
            watched = range(1, self.count) if self.number == 0 else [0]
            missing = self._beats.silent(watched, self.limit_s)
            if not missing:
                return False
            # A machine that was never there may be a mistake; one that was may be there again for the same command.
            have_come = store.check([f"{number}/machine" for number in missing])
            is_lost = self.kind == "rank" or self.again or have_come
            silent = listed([self._described(number) for number in missing])
            message = (
                f"no sign of life within {self.limit_s / 60:g} minutes from {silent}. Start all machines, each with "
                "the same --num_machines, its own --machine_rank and the address of machine 0, and look at the output "
                "of the one that is silent"
            )
            code = EXIT_FAILED if is_lost else EXIT_USER_ERROR
            self._tell(message, code)
            raise Ended(message, code)

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
        until = time.monotonic() + KNOWN_S
        others = self.count - self.here
        while self.store.add("left", 0) < others and time.monotonic() < until:
            time.sleep(0.1)

    def _described(self, number: int) -> str:
        if self.store.check([f"{number}/machine"]):
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
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S))
    except RuntimeError as error:
        raise UserError(
            f"what listens at {address}:{port} is not the store of machine 0 ({first_line(error)}). Check "
            "--main_process_ip and --main_process_port"
        ) from error


def serve_store(port: int, everywhere: bool) -> Any:
    """Serve a store in this process, which the next TCPStore of this process and port uses as well. Raises UserError:
    the port is in use. Port 0 is any free one. `everywhere`: on all interfaces, else on the loopback only."""
    from torch.distributed import TCPStore

    both = everywhere and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    host = "" if everywhere else "127.0.0.1"
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
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
    )


def store_of_one_process() -> Any:
    """The rendezvous store of a process that nobody has launched, and that others cannot reach; None: there is no such
    store, or it is another's."""
    environment = os.environ
    alone = environment.get("WORLD_SIZE") == "1" and "TORCHELASTIC_RUN_ID" not in environment
    if not alone or environment.get("MASTER_ADDR") != SINGLE_ENV["MASTER_ADDR"]:
        return None
    return serve_store(int(environment["MASTER_PORT"]), everywhere=False)


T = TypeVar("T")
CONNECT_TIMEOUT_S = 20.0  # to say why this rank ends before it has come
LAUNCHER_STOP_S = 40.0  # within which a launcher ends the ranks of its machine


def _read_number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return the number in a variable that a launcher sets. Raises UserError: it is not a number."""
    try:
        return int(environment.get(name, default))
    except ValueError:
        raise UserError(
            f"{name} = {environment[name]!r} in the environment: expected a number. Unset it, since a launcher sets it"
        ) from None


class RankRendezvous:
    """This rank's part in the rendezvous of all ranks; nothing happens where all ranks are on one machine. Raises
    UserError: a variable of the launcher is not a number."""

    def __init__(self, environment: Mapping[str, str] = os.environ):
        self.rank = _read_number(environment, "RANK", 0)
        self.count = _read_number(environment, "WORLD_SIZE", 1)
        self.local_rank = _read_number(environment, "LOCAL_RANK", 0)
        self.here = _read_number(environment, "LOCAL_WORLD_SIZE", self.count)
        self.machine = self.rank // self.here
        self.address = environment.get("MASTER_ADDR", "")
        self.port = _read_number(environment, "MASTER_PORT", 0)
        self.serves = self.rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.limit_s = float(environment.get(RENDEZVOUS_LIMIT_VARIABLE, RENDEZVOUS_LIMIT_S))
        self.attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.is_open = self.count > self.here and bool(self.address)  # nobody has ended, and not all have met
        self.rendezvous: Rendezvous | None = None
        self.store: Any = None  # a torch.distributed.Store
        self._met = threading.Event()
        self._server = None

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
                (self.rendezvous or self._come(CONNECT_TIMEOUT_S)).stop(message, code)

    def first_on_rank_0(self, name: str, action: Callable[[], T]) -> T | None:
        """Let rank 0 do something before all others go on. Returns its result there, None on other ranks. Raises
        UserError: of rank 0, on all ranks."""
        if self.count == 1:
            return action()
        store = self.store or self._connect(CONNECT_TIMEOUT_S)
        key = f"zerofit/first{self.attempt}/{name}"
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

    def _connect(self, limit_s: float) -> Any:
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
                time.sleep(LAUNCHER_STOP_S)  # it ends this rank when the one that speaks has ended
            else:
                record_code(end.code, end.report())
                print_last(escape_controls(end.report()))
            leave(end.code)
        if self.is_open:
            self.is_open = False
            self._met.set()
