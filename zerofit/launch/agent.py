"""`accelerate launch` with torchrun's agent, whose machines meet and say who is missing.

torchrun lets machines wait 15 minutes for each other and then prints a traceback; here they meet in a `MachineGroup`.
On one machine the store listens on the loopback interface only. With `--max_restarts` the processes are started again
where exit_code.py allows that.

When a process fails, torchrun's log and traceback are left out, and the exit code is that of the first that has.
"""

import atexit
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from zerofit.compat.torch import AskingAgent
from zerofit.launch.exit_code import Restarts, code_of_run, have_saved
from zerofit.launch.rendezvous import BEAT_S, Ended, Heartbeats, Rendezvous, asking_machine_0, open_store, serve_store
from zerofit.recipe.errors import EXIT_USER_ERROR, LAUNCHER_VARIABLE, UserError, first_line

SILENT_S = 10.0  # a launcher that gives no sign of life for so long is gone
GRACE_S = 15.0  # processes of this machine end by themselves within it, and say why, when others have


class MachineGroup:
    """The launcher of one machine, among those of all. Raises UserError: machine 0 cannot be reached; this machine
    takes part already. A machine without a sign of life for `limit_s` ends a rendezvous.

    They meet before each start (rendezvous.py): in round 0, and in one more for each restart. A launcher whose
    processes have failed comes to the next round; the others see it, end their processes and come too. One that does
    not restart says so there, and all end. A machine that a scheduler has started again takes part from the next round
    on. At the end all agree on one exit code.

    torch's own dynamic rendezvous (c10d) restarts as well. It is not used because it numbers machines by their host
    names, so rank 0 may move to another machine; it does not name the machine that it waits for; and a machine that is
    started twice makes it restart a healthy run (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py, 2.13).
    """

    def __init__(self, address: str, port: int, number: int, count: int, limit_s: float):
        self.address = address
        self.number = number
        self.count = count
        self.limit_s = limit_s
        self._servers = [serve_store(port, everywhere=True)] if number == 0 else []
        store = open_store(address, port, limit_s)
        self._store = PrefixStore("zerofit", store)
        with asking_machine_0():
            beats = Heartbeats(self._store)
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
        self.round = self.round + 1
        self._waiting_since = 0.0
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
        store = self._store
        beats = Heartbeats(self._store)
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


class RestartingAgent(AskingAgent):
    """torch's agent, which is told after each failure whether another restart is left."""

    restarts = Restarts(None)
    group: MachineGroup | None = None
    _failures = 0

    def __init__(self, spec: WorkerSpec, *args: Any, **kwargs: Any) -> None:
        spec.master_addr = spec.master_port = None  # those of the rendezvous hold: a restart has a new store
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the others are the supervisor's
        super().__init__(spec, *args, **kwargs)

    def starts_again(self, failures: dict[int, Any], allowed: int) -> bool:
        ends = ", ".join(f"rank {rank} {_end(failure.exitcode)}" for rank, failure in sorted(failures.items()))
        ended = f"{ends} after update {self.restarts.updates()}"
        codes = {failure.exitcode for failure in failures.values()}
        refused = self.restarts.record_failure(codes) if allowed else "--max_restarts 0"
        if allowed and self.group is not None and self.group.has_finished():
            refused = "another machine has finished"
        used = self._count(not have_saved(codes))
        if not refused and used > allowed:
            refused = "none is left"
        if allowed:
            what = f"no restart ({refused})" if refused else f"restart {used} of {allowed}"
            print(f"{ended}: {what}", file=sys.stderr, flush=True)
        if refused and self.group is not None:
            self.group.end(ended, code_of_run([_positive(code) for code in codes]))
        return not refused

    def _count(self, failed: bool) -> int:
        """Count the failures so far, of all machines."""
        if self.group is not None:
            return self.group.failures(failed)
        self._failures += failed
        return self._failures

    def restarts_left(self, allowed: int) -> int:
        """Return how many restarts are left: the same number on all machines, since ranks read it."""
        return max(0, allowed - self._count(False))


class MachineRendezvous(StaticTCPRendezvous):
    """torchrun's static rendezvous, over a store in which the machines have met; a restart gets a new one."""

    store: Any = None

    def next_rendezvous(self) -> RendezvousInfo:
        address = self.master_addr
        if self.world_size == 1:
            address = "127.0.0.1"
            self.store = serve_store(0 if self.store else self.master_port, everywhere=False)
        else:
            if RestartingAgent.group is None:
                limit_s = self.timeout.total_seconds()
                RestartingAgent.group = MachineGroup(address, self.master_port, self.rank, self.world_size, limit_s)
                RestartingAgent.waits_for_others = False  # MachineGroup.settle waits, as long as the others are alive
            self.store = RestartingAgent.group.meet()
        bootstrap = RendezvousStoreInfo(address, self.store.port)
        return RendezvousInfo(PrefixStore(self.run_id, self.store), self.rank, self.world_size, bootstrap)

    def num_nodes_waiting(self) -> int:
        return 0 if RestartingAgent.group is None else RestartingAgent.group.num_waiting()


def launch(words: list[str], restarts: Restarts, recorded: Callable[[], int | None]) -> int:
    """Run `accelerate launch` in this process. Returns the exit code of this machine's processes, or of several
    machines that of the run; prints a mistake. `recorded`: the exit code on record, once the processes have ended."""
    command = ["accelerate", "launch", *words]
    threads = "OMP_NUM_THREADS" in os.environ
    about = {"command": command, "started": psutil.Process().create_time(), "has_threads": threads}
    os.environ[LAUNCHER_VARIABLE] = json.dumps(about)  # for the ranks: zerofit/strategy/launch.py
    if "LOGLEVEL" not in os.environ:  # torchrun's variable
        logging.disable(logging.ERROR)
    RestartingAgent.restarts = restarts
    code = 0
    try:
        with RestartingAgent.launching(MachineRendezvous):
            launch_command(launch_command_parser().parse_args(words))
    except (UserError, ConnectionError) as error:  # a ConnectionError of accelerate: the port is in use
        problem = error if isinstance(error, UserError) else UserError(first_line(error))
        print(problem.report(), file=sys.stderr, flush=True)
        code = problem.code if isinstance(problem, Ended) else EXIT_USER_ERROR
    except ChildFailedError as error:
        code = _positive(error.get_first_failure()[1].exitcode)
    except subprocess.CalledProcessError as error:
        code = _positive(error.returncode)
    return code if (group := RestartingAgent.group) is None else group.settle(code, recorded())


def _positive(code: int) -> int:
    """An exit code as a shell shows it: 128 and the number of a signal."""
    return code if code >= 0 else 128 - code


def _end(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
