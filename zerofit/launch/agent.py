"""`accelerate launch` with torchrun's agent, extended: machines meet, name those that are missing, and restart.

torchrun lets machines wait 15 minutes for each other and then prints a traceback; here they meet in a `MachineGroup`.
On one machine the store listens on the loopback interface only. With `--max_restarts` the processes are started again
where exit_code.py allows that. When a process fails, torchrun's log and traceback are omitted, and the exit code is
that of the process that failed first.
"""

import atexit
import json
import logging
import os
import platform
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

SILENT_S = 10.0  # a launcher without a sign of life for this long is gone
GRACE_S = 15.0  # within which processes of this machine end by themselves, and say why, after others have ended


class MachineGroup:
    """The launcher of one machine as a member of the group of all launchers. Raises UserError: machine 0 cannot be
    reached; a machine with this number takes part already. A machine without a sign of life for `limit_s` ends a
    rendezvous.

    The launchers meet before each start (rendezvous.py): in round 0, and in one more round for each restart. A
    launcher whose processes have failed comes to the next round; the others see it, end their processes and come too.
    A launcher that does not restart says so there, and all end. A machine that a scheduler has started again takes
    part from the next round on. At the end all agree on one exit code.

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
            self._beats = Heartbeats(self._store)
            self.round = self._store.add("rounds", 0)  # how often all have met
            first_beat = self._beats.beat(number)
            self._replaces_another = first_beat > 1
            while self._replaces_another and not self._beats.silent([number], SILENT_S):
                if self._beats.beat(number, 0) > first_beat:
                    raise UserError(
                        f"machine {number} takes part in this run already, and {platform.node()} has the same number. "
                        "Give each machine its own --machine_rank"
                    )
                time.sleep(BEAT_S / 4)
        if self._replaces_another:
            log(f"machine {number} ({platform.node()}) has been lost and started again: all machines restart")
        self._polled_at = 0.0
        self._waiting_since = 0.0  # when another machine was first seen to wait in the next round, or not to restart
        self._beats_end = threading.Event()
        beats_of_thread = Heartbeats(PrefixStore("zerofit", store.clone()))
        self._thread = threading.Thread(target=self._beat, args=(beats_of_thread,), daemon=True)
        self._thread.start()
        atexit.register(self.stop_beats)

    def stop_beats(self) -> None:
        """Give no more signs of life. A thread that is in the store's C++ as Python ends would abort the process."""
        self._beats_end.set()
        self._thread.join(SILENT_S)

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
            if self.round:  # gloo would find addresses of the earlier processes in the old store
                self._servers.append(serve_store(0, everywhere=True))
            self._store.set(key, str(self._servers[-1].port))
            self._store.add("rounds", 1)
        port = int(self._store.get(key))
        self.round += 1
        self._waiting_since = 0.0
        return self._servers[-1] if self.number == 0 else open_store(self.address, port, self.limit_s)

    def num_waiting(self) -> int:
        """Count the machines that have come to the next rendezvous. The store is asked once a second. Raises Ended: a
        machine does not restart; machine 0 is gone."""
        now = time.monotonic()
        if now < self._polled_at + BEAT_S:
            return 0
        self._polled_at = now
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
        came = map(json.loads, self._values("{}/machine", store))
        names = [f"machine {each['machine']} ({each['host']})" for each in came if each["machine"] != self.number]
        log(f"restart with {', '.join(names)}: the processes there have failed or were lost")
        return waiting

    def count_failures(self, has_failed: bool) -> int:
        """Count the rounds after which processes have failed; `has_failed`: those of this machine have in this one."""
        if has_failed:
            self._store.set(f"failed{self.round}", "")
        return sum(self._store.check([f"failed{number}"]) for number in range(1, self.round + 1))

    def has_finished(self) -> bool:
        """Return whether the processes of any machine have finished their work."""
        return b"0" in self._values("code{}", self._store)

    def end(self, message: str, code: int) -> None:
        """Tell all that this machine does not restart."""
        self._next_rendezvous().stop(message, code)

    def settle(self, code: int, recorded: int | None) -> int:
        """Wait for the exit codes of the other machines, as long as they give signs of life. Returns the exit code of
        the run, the same on all machines: `recorded` of machine 0, unless its folder has none."""
        store = self._store
        try:
            if self.number == 0 and recorded is not None:
                store.set("recorded", str(recorded))
            store.set(f"code{self.number}", str(code))
            self._wait_for_all("code{}")
            codes = [store.get("recorded")] if store.check(["recorded"]) else self._values("code{}", store)
            store.set(f"left{self.number}", "")
            if self.number == 0:  # it has the store
                self._wait_for_all("left{}")
        except RuntimeError:  # machine 0 is gone
            return code
        return code_of_run(list(map(int, codes)))

    def _wait_for_all(self, key: str) -> None:
        """Wait until all machines that give signs of life have set a key."""
        while missing := [number for number in range(self.count) if not self._store.check([key.format(number)])]:
            if self._beats.silent(missing, SILENT_S) == missing:
                return
            time.sleep(BEAT_S / 4)

    def _values(self, key: str, store: Any) -> list[bytes]:
        """Return the values of those machines that have set this key."""
        keys = [key.format(number) for number in range(self.count)]
        return [store.get(key) for key in keys if store.check([key])]

    def _beat(self, beats: Heartbeats) -> None:
        try:
            while not self._beats_end.wait(BEAT_S):
                beats.beat(self.number)
        except RuntimeError:  # machine 0 is gone, which the next call in the main thread reports
            return

    def _next_rendezvous(self) -> Rendezvous:
        """Return the rendezvous of the machines before the next start of their processes."""
        store = PrefixStore(f"machines{self.round}", self._store)
        again = self._replaces_another or self.round > 0
        return Rendezvous(store, "machine", self.number, self.count, limit_s=self.limit_s, again=again)


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


class RestartingAgent(AskingAgent):
    """torch's agent, which decides after each failure whether it starts the processes again."""

    restarts = Restarts(None)
    group: MachineGroup | None = None
    _failures = 0

    def __init__(self, spec: WorkerSpec, *args: Any, **kwargs: Any) -> None:
        spec.master_addr = spec.master_port = None  # the rendezvous has them, since a restart has a new store
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the supervisor handles all others
        super().__init__(spec, *args, **kwargs)

    def starts_again(self, failures: dict[int, Any], allowed: int) -> bool:
        ends = ", ".join(f"rank {rank} {_describe_end(failure)}" for rank, failure in sorted(failures.items()))
        message = f"{ends} after update {self.restarts.updates()}"
        codes = {failure.exitcode for failure in failures.values()}
        refused = self.restarts.record_failure(codes) if allowed else "--max_restarts 0"
        if allowed and self.group is not None and self.group.has_finished():
            refused = "another machine has finished"
        used = self._count_failures(not have_saved(codes))
        if not refused and used > allowed:
            refused = "none is left"
        if allowed:
            log(f"{message}: {f'no restart ({refused})' if refused else f'restart {used} of {allowed}'}")
        if refused and self.group is not None:
            self.group.end(message, code_of_run([_shell_code(code) for code in codes]))
        return not refused

    def restarts_left(self, allowed: int) -> int:
        """Return how many restarts are left: the same number on all machines, since ranks read it."""
        return max(0, allowed - self._count_failures(False))

    def _count_failures(self, has_failed: bool) -> int:
        """Count the failures of all machines so far; `has_failed`: this machine has failed now."""
        if self.group is not None:
            return self.group.count_failures(has_failed)
        self._failures += has_failed
        return self._failures


class MachineRendezvous(StaticTCPRendezvous):
    """torchrun's static rendezvous, over a store in which the machines have met; a restart gets a new store."""

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
    """Run `accelerate launch` in this process, and print a user's mistake. Returns the exit code of this machine's
    processes, or of several machines that of the run. `recorded`: returns the exit code on record, once the processes
    have ended."""
    about = {
        "command": ["accelerate", "launch", *words],
        "started": psutil.Process().create_time(),
        "has_threads": "OMP_NUM_THREADS" in os.environ,
    }
    os.environ[LAUNCHER_VARIABLE] = json.dumps(about)  # the ranks read it: zerofit/strategy/launch.py
    if "LOGLEVEL" not in os.environ:  # torchrun's variable
        logging.disable(logging.ERROR)
    RestartingAgent.restarts = restarts
    code = 0
    try:
        with RestartingAgent.launching(MachineRendezvous):
            launch_command(launch_command_parser().parse_args(words))
    except (UserError, ConnectionError) as error:  # a ConnectionError of accelerate: the port is in use
        problem = error if isinstance(error, UserError) else UserError(first_line(error))
        log(problem.report())
        code = problem.code if isinstance(problem, Ended) else EXIT_USER_ERROR
    except ChildFailedError as error:
        code = _shell_code(error.get_first_failure()[1].exitcode)
    except subprocess.CalledProcessError as error:
        code = _shell_code(error.returncode)
    return code if (group := RestartingAgent.group) is None else group.settle(code, recorded())


def _shell_code(code: int) -> int:
    """Return an exit code as a shell shows it: 128 plus the number of the signal that killed the process."""
    return code if code >= 0 else 128 - code


def _describe_end(failure: Any) -> str:
    """Say how a process ended. `failure`: torch's ProcessFailure."""
    code = failure.exitcode
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {failure.signal_name()}"
