"""`accelerate launch`, as `zerofit launch` starts it: torchrun's agent, whose machines meet and say who is missing.

    python -P zerofit/launch/agent.py --config_file accelerate_configs/zero3.yaml ... train/clm.py ...

torchrun lets machines wait 15 minutes for each other and then prints a traceback; here they meet in machine_group.py.
On one machine the store listens on the loopback interface only. With `--max_restarts` the processes are started again
where restart_rule.py allows that.

When a process fails, torchrun's log and traceback are left out, and the exit code is that of the first that has. The
processes end when the one that has started the agent is gone.
"""

import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # started alone: the package's folder is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
from accelerate.commands import launch
from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from zerofit.compat.torch_elastic import AskingAgent
from zerofit.launch.machine_group import MachineGroup
from zerofit.launch.rendezvous import Ended, serve_store
from zerofit.launch.restart_rule import Restarts, code_of_run, have_saved
from zerofit.recipe.errors import EXIT_USER_ERROR, OUR_LAUNCHER, UserError, first_line
from zerofit.record.run_folder import RunFolder
from zerofit.record.terminal import outlive_the_terminal

RUN = "ZEROFIT_RUN"  # the run's folder, which the supervisor names
PARENT = os.getppid()
PR_SET_PDEATHSIG = 1  # prctl(2)
STOP = signal.SIGUSR2  # no restart from here on


class RestartingAgent(AskingAgent):
    """torch's agent, which is told after each failure whether another restart is left.

    Attributes:
        restarts: decides.
        group: of the machines; None: there is one.
    """

    restarts = Restarts(None)
    group: MachineGroup | None = None
    _failures = 0

    def __init__(self, spec: WorkerSpec, *args: Any, **kwargs: Any) -> None:
        if isinstance(spec.rdzv_handler, StaticTCPRendezvous):
            given = spec.rdzv_handler
            spec.rdzv_handler = MachineRendezvous(
                given.master_addr,
                given.master_port,
                given.rank,
                given.world_size,
                given.run_id,
                int(given.timeout.total_seconds()),
            )
        spec.master_addr = spec.master_port = None  # those of the rendezvous hold: a restart has a new store
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

    def waits_for_others(self) -> bool:
        """Return False for several machines: MachineGroup.settle waits, as long as the others are alive."""
        return self.group is None


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
            self.store = RestartingAgent.group.meet()
        bootstrap = RendezvousStoreInfo(address, self.store.port)
        return RendezvousInfo(PrefixStore(self.run_id, self.store), self.rank, self.world_size, bootstrap)

    def num_nodes_waiting(self) -> int:
        return 0 if RestartingAgent.group is None else RestartingAgent.group.num_waiting()


def main() -> int:
    """Launch, and return the exit code: of several machines, that of the run."""
    command, threads = ["accelerate", "launch", *sys.argv[1:]], "OMP_NUM_THREADS" in os.environ
    about = {"command": command, "started": psutil.Process().create_time(), "has_threads": threads}
    os.environ[OUR_LAUNCHER] = json.dumps(about)  # for the ranks: zerofit/strategy/launch.py
    end_with_parent()
    outlive_the_terminal()
    if "LOGLEVEL" not in os.environ:  # torchrun's variable
        logging.disable(logging.ERROR)
    folder = Path(os.environ[RUN]) if RUN in os.environ else None
    RestartingAgent.restarts = restarts = Restarts(folder)
    signal.signal(STOP, lambda number, frame: restarts.stop())
    try:
        with RestartingAgent.launching():
            code = run_launcher()
    except SignalException as error:  # the others may restart without this machine: they are not waited for
        return 128 + error.sigval
    if (group := RestartingAgent.group) is None:
        return code
    return group.settle(code, None if folder is None else RunFolder(folder).environment().get("exit_code"))


def run_launcher() -> int:
    """`accelerate launch`. Returns the exit code of this machine's processes; prints a mistake.

    Raises:
        SignalException: this process was told to end.
    """
    try:
        launch.main()
        return 0
    except UserError as error:
        problem = error
    except ConnectionError as error:  # accelerate: the port is in use
        problem = UserError(first_line(error))
    except ChildFailedError as error:
        return _positive(error.get_first_failure()[1].exitcode)
    except subprocess.CalledProcessError as error:
        return _positive(error.returncode)
    print(problem.report(), file=sys.stderr, flush=True)
    return problem.code if isinstance(problem, Ended) else EXIT_USER_ERROR


def end_with_parent() -> None:
    """Get SIGTERM when the parent is gone, and pass it on where accelerate does not: to the process of a launch of
    one. (Of several, torchrun takes care.)"""

    def pass_on(number: int, frame: Any) -> None:
        processes = psutil.Process().children()
        for process in processes:
            process.send_signal(number)
        if not processes:
            raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, pass_on)
    with contextlib.suppress(OSError, AttributeError):  # Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != PARENT:
            raise SystemExit(128 + signal.SIGTERM)


def _positive(code: int) -> int:
    """An exit code as a shell shows it: 128 and the number of a signal."""
    return code if code >= 0 else 128 - code


def _end(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


if __name__ == "__main__":
    sys.exit(main())
