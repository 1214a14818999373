"""The rendezvous of the machines of a run, and then of its ranks, before there is a process group.

A process group waits for its members for hours and does not name those that are missing. So each member registers in
the store of the rendezvous, and then gives a sign of life every second. A member that ends before all are ready writes
why, and all others end with it. The first member watches all others, and they watch the first. `zerofit launch` holds
a rendezvous of machines (agent.py), and a run on several machines one of its ranks.

When a rank fails, its launcher ends the other ranks of its machine, but under torchrun it knows nothing of the other
machines. So while a rank prepares its data, a thread gives signs of life, and ends the rank when a rank on another
machine has ended.
"""

import contextlib
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from zerofit.health.flight import join_names
from zerofit.launch.machines import number_in
from zerofit.recipe.errors import EXIT_FAILED, EXIT_USER_ERROR, UserError, first_line, leave, print_last, record_code
from zerofit.recipe.files import digest_of_code
from zerofit.strategy.launch import SINGLE_ENV

BEAT_S = 1.0
RENDEZVOUS_LIMIT_S = 600.0  # without a sign of life; `zerofit launch --rendezvous_minutes` sets another limit
RENDEZVOUS_LIMIT_VARIABLE = "ZEROFIT_RENDEZVOUS_S"  # in which `zerofit launch` gives its ranks the limit
KNOWN_S = 30.0  # in which others read why the machine with the store ends: they may still be importing torch
STORE_TIMEOUT_S = 60.0  # for an answer of the store


class Ended(UserError):
    """A member has ended before all had met, or machine 0 cannot be reached."""

    def __init__(self, message: str, code: int = EXIT_USER_ERROR, machine: int | None = None):
        super().__init__(message)
        self.code = code  # the exit code of all other members
        self.machine = machine  # of the member that has ended; None: a machine cannot be reached


@contextlib.contextmanager
def asking_machine_0() -> Iterator[None]:
    """Run a block that uses the store of machine 0. Raises Ended: the store does not answer."""
    try:
        yield
    except RuntimeError as error:  # of torch: DistNetworkError, DistStoreError
        message = f"machine 0, which has the rendezvous store, is gone ({first_line(error)}). Look at its output"
        raise Ended(message, EXIT_FAILED) from error


class Heartbeats:
    """The signs of life of a group's members: a counter of each member in a store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._seen: dict[int, tuple[int, float]] = {}  # {member: (its counter, when the counter was first seen)}

    def beat(self, number: int, times: int = 1) -> int:
        """Give signs of life for a member. Returns the number of its signs of life so far."""
        return int(self._store.add(f"{number}/beats", times))

    def silent(self, numbers: list[int], limit_s: float) -> list[int]:
        """Return the members whose last sign of life, or the first call for them, is longer ago than the limit."""
        now = time.monotonic()
        for number in numbers:
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
        local_count: members on each machine.
        again: the members have met before, or this one has come before and died.
    """

    def __init__(
        self,
        store: Any,
        kind: str,
        number: int,
        count: int,
        *,
        limit_s: float,
        local_count: int = 1,
        again: bool = False,
    ) -> None:
        self.store = store
        self.kind = kind
        self.number = number
        self.count = count
        self.local_count = local_count
        self.machine = number // local_count
        self.limit_s = limit_s
        self.again = again
        self.machines: list[dict[str, Any]] = []  # the number, host and code of each machine, when all have met
        self.is_ready = False
        self._has_left = False
        self._beats = Heartbeats(store)

    def come(self) -> None:
        """Register this member. Raises Ended: another member has the same number."""
        if self.store.add(f"{self.number}/came", 1) > 1 and not self.again:
            raise self._end_all(
                f"{self.kind} {self.number} is there twice: {self._describe(self.number)}, and on host "
                f"{platform.node()}. Give each machine its own number (--machine_rank; torchrun: --node_rank)",
                EXIT_USER_ERROR,
            )
        about = {"machine": self.machine, "host": platform.node(), "code": digest_of_code()}
        self.store.set(f"{self.number}/machine", json.dumps(about))

    def ready(self) -> None:
        """Register that this member can go on as soon as all others can."""
        self.is_ready = True
        self.store.add("ready", 1)

    def poll(self) -> bool:
        """Give a sign of life, and return whether all members are ready. Raises Ended: a member has stopped or is
        missing, or the store is gone."""
        store = self.store
        with asking_machine_0():
            self._beats.beat(self.number)
            if store.check(["end"]):
                end = json.loads(store.get("end"))
                self._leave()
                raise Ended(**end)
            if self.is_ready and self.number == 0 and store.add("ready", 0) >= self.count:
                first_members = range(0, self.count, self.local_count)
                machines = store.multi_get([f"{number}/machine" for number in first_members])
                store.set("all", json.dumps(list(map(json.loads, machines))))
            if self.is_ready and store.check(["all"]):
                self.machines = json.loads(store.get("all"))
                return True
            watched = [0] if self.number else list(range(1, self.count))
            missing = self._beats.silent(watched, self.limit_s)
            if not missing:
                return False
            # A machine that never came may be a mistake. One that was there may come again with the same command.
            have_come = store.check([f"{number}/machine" for number in missing])
            is_lost = self.kind == "rank" or self.again or have_come
            names = join_names([self._describe(number) for number in missing])
            raise self._end_all(
                f"no sign of life within {self.limit_s / 60:g} minutes from {names}. Start all machines, each with "
                "the same --num_machines, its own --machine_rank and the address of machine 0, and look at the output "
                "of the one that is silent",
                EXIT_FAILED if is_lost else EXIT_USER_ERROR,
            )

    def stop(self, message: str, code: int) -> None:
        """Write why this member ends, unless another has ended before. Returns when the others can know it."""
        member = f"machine {self.machine} ({platform.node()})"
        member = f"rank {self.number} of {member}" if self.kind == "rank" else member
        self._end_all(f"{member} has stopped: {message.removeprefix('error: ')}", code, self.machine)

    def _end_all(self, message: str, code: int, machine: int | None = None) -> Ended:
        """Write why the rendezvous ends, unless it has ended already. Returns the error to raise."""
        self.store.compare_set("end", "", json.dumps({"message": message, "code": code, "machine": machine}))
        self._leave()
        return Ended(message, code, machine)

    def _leave(self) -> None:
        """Count this member as one that knows of the end. On the machine of the store: wait until the others know."""
        if self._has_left:
            return
        self._has_left = True
        if self.machine:
            self.store.add("left", 1)
            return
        until = time.monotonic() + KNOWN_S
        while self.store.add("left", 0) < self.count - self.local_count and time.monotonic() < until:
            time.sleep(0.1)

    def _describe(self, number: int) -> str:
        if self.store.check([f"{number}/machine"]):
            return f"{self.kind} {number} on host {json.loads(self.store.get(f'{number}/machine'))['host']}"
        return f"{self.kind} {number}, which has {'not come again' if self.again else 'never come'}"


# -------------------------------------------------------------------------------------------------------------- stores


def open_store(address: str, port: int, limit_s: float) -> Any:
    """Wait for the store of machine 0, and connect to it. Raises UserError: it cannot be reached within `limit_s`, or
    another program listens there."""
    from torch.distributed import TCPStore

    until = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((address, port), timeout=min(5.0, limit_s)).close()
            return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S))
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) or time.monotonic() > until:  # of TCPStore: another program listens
                cause = getattr(error, "strerror", None) or first_line(error)
                raise UserError(
                    f"{platform.node()} has not reached machine 0 at {address}:{port}: {cause}. Check that machine 0 "
                    "has been started, and that --main_process_ip and --main_process_port are its address and port "
                    "(MASTER_ADDR; torchrun: --master_addr)"
                ) from error
            time.sleep(min(1.0, limit_s / 10))


def serve_store(port: int, everywhere: bool) -> Any:
    """Serve a store in this process, which the next TCPStore of this process and port uses as well. Raises UserError:
    the port is in use. `port`: 0 is any free one. `everywhere`: on all interfaces, else on the loopback only."""
    from torch.distributed import TCPStore

    both = everywhere and socket.has_dualstack_ipv6()
    host = "" if everywhere else "127.0.0.1"
    family = socket.AF_INET6 if both else socket.AF_INET
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
    """Return the rendezvous store of a process that no launcher has started, on the loopback interface only; None: a
    launcher has started it."""
    environment = os.environ
    alone = environment.get("WORLD_SIZE") == "1" and "TORCHELASTIC_RUN_ID" not in environment
    if not alone or environment.get("MASTER_ADDR") != SINGLE_ENV["MASTER_ADDR"]:
        return None
    return serve_store(int(environment["MASTER_PORT"]), everywhere=False)


# --------------------------------------------------------------------------------------------------------------- ranks

T = TypeVar("T")
CONNECT_TIMEOUT_S = 20.0  # for a rank that ends before it has come, and connects to say why
LAUNCHER_STOP_S = 40.0  # within which a launcher ends the ranks of its machine


class RankRendezvous:
    """This rank's part in the rendezvous of all ranks; nothing happens where all ranks are on one machine. Raises
    UserError: a variable of the launcher is not a number."""

    def __init__(self, environment: Mapping[str, str] = os.environ):
        self.rank = number_in(environment, "RANK")
        self.count = number_in(environment, "WORLD_SIZE", default=1, minimum=1)
        self.local_rank = number_in(environment, "LOCAL_RANK", minimum=-1)
        self.local_count = number_in(environment, "LOCAL_WORLD_SIZE", default=self.count, minimum=1)
        self.machine = self.rank // self.local_count
        self.address = environment.get("MASTER_ADDR", "")
        self.port = number_in(environment, "MASTER_PORT")
        self.serves = self.rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.limit_s = float(environment.get(RENDEZVOUS_LIMIT_VARIABLE, RENDEZVOUS_LIMIT_S))
        self.attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.is_open = self.count > self.local_count and bool(self.address)  # no rank has ended, and not all have met
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
        codes = [machine["code"] for machine in self.rendezvous.machines]
        return [
            f"{name} runs other code than {self.machines[0]}. Check out the same commit"
            for name, code in zip(self.machines, codes)
            if code != codes[0]
        ]

    def stop(self, message: str, code: int) -> None:
        """Tell the other machines that this rank ends, and why. This is called at any end, and never fails."""
        if self.is_open:
            self.is_open = False
            with contextlib.suppress(Exception):
                (self.rendezvous or self._come(CONNECT_TIMEOUT_S)).stop(message, code)

    def first_on_rank_0(self, name: str, action: Callable[[], T]) -> T | None:
        """Run `action` on rank 0 while all others wait. Returns its result on rank 0, None on other ranks. Raises
        UserError on all ranks: the action has raised it on rank 0."""
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
        """The names of all machines; before they have met, that of this machine only."""
        met = [] if self.rendezvous is None else self.rendezvous.machines
        names = [f"machine {machine['machine']} ({machine['host']})" for machine in met]
        return names or [f"machine {self.machine} ({platform.node()})"]

    def place_of(self, rank: int, device: str) -> str:
        """Return where a rank runs: its machine, and there its GPU unless `device` is cpu."""
        machine, index = divmod(rank, self.local_count)
        return self.machines[machine] if device == "cpu" else f"{self.machines[machine]}, GPU {index}"

    def _connect(self, limit_s: float) -> Any:
        if self.serves:
            self._server = serve_store(self.port, everywhere=True)
        self.store = open_store(self.address, self.port, limit_s)
        return self.store

    def _come(self, limit_s: float) -> Rendezvous:
        from torch.distributed import PrefixStore

        store = PrefixStore(f"zerofit/ranks{self.attempt}", self._connect(limit_s))
        self.rendezvous = Rendezvous(
            store, "rank", self.rank, self.count, limit_s=limit_s, local_count=self.local_count
        )
        self.rendezvous.come()
        return self.rendezvous

    def _watch(self, rendezvous: Rendezvous) -> None:
        """Give signs of life until all ranks have met. End this rank when a rank on another machine has ended."""
        try:
            while self.is_open and not rendezvous.poll():
                time.sleep(BEAT_S / 10 if rendezvous.is_ready else BEAT_S)
        except Ended as end:
            if not self.is_open:
                return
            self.is_open = False
            if self.local_rank or end.machine == self.machine:
                time.sleep(LAUNCHER_STOP_S)  # the launcher ends this rank after the one that reports the end
            else:
                record_code(end.code, end.report())
                print_last(end.report())
            leave(end.code)
        if self.is_open:
            self.is_open = False
            self._met.set()
