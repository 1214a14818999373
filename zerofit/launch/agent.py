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
import yaml
from accelerate.commands import launch
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, static_tcp_rendezvous
from torch.distributed.launcher import api as launcher

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
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class RestartingAgent(LocalElasticAgent):
    """torch's agent, which is told after each failure whether another restart is left.

    Attributes:
        restarts: decides.
        group: of the machines; None: there is one.
    """

    restarts = Restarts(None)
    group: MachineGroup | None = None
    _failures = 0

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if not result.is_failed():
            return result
        ends = ", ".join(f"rank {rank} {_end(failure.exitcode)}" for rank, failure in sorted(result.failures.items()))
        ended = f"{ends} after update {self.restarts.updates()}"
        codes, allowed = {failure.exitcode for failure in result.failures.values()}, worker_group.spec.max_restarts
        refused = self.restarts.refused(codes) if allowed else "--max_restarts 0"
        if allowed and self.group is not None and self.group.has_finished():
            refused = "another machine has finished"
        used = self._count(not have_saved(codes))
        if not refused and used > allowed:
            refused = "none is left"
        self._remaining_restarts = int(not refused)
        if allowed:
            what = f"no restart ({refused})" if refused else f"restart {used} of {allowed}"
            print(f"{ended}: {what}", file=sys.stderr, flush=True)
        if refused and self.group is not None:
            self.group.end(ended, code_of_run([_positive(code) for code in codes]))
        return result

    def _count(self, failed: bool) -> int:
        """Failures so far, of all machines."""
        if self.group is not None:
            return self.group.failures(failed)
        self._failures += failed
        return self._failures

    def _rendezvous(self, worker_group: Any) -> None:
        worker_group.spec.master_port = None  # that of the rendezvous holds: a restart has a new store
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: Any) -> Any:
        """Ranks read the number of restarts, which has to be the same on all machines."""
        self._remaining_restarts = max(0, worker_group.spec.max_restarts - self._count(False))
        return super()._start_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Wait for other launchers: a group does so in MachineGroup.settle, as long as they are alive."""
        if self.group is None:
            super()._exit_barrier()


class MachineRendezvous(static_tcp_rendezvous.StaticTCPRendezvous):
    """torchrun's static rendezvous, over a store in which the machines have met; a restart gets a new one."""

    def next_rendezvous(self) -> RendezvousInfo:
        if self.world_size == 1 and self.master_addr in LOOPBACK:
            store = serve_store(0 if self._store else self.master_port, everywhere=False)
            self._store = store
            self.master_port = store.port
        elif self.world_size > 1:
            if RestartingAgent.group is None:
                RestartingAgent.group = MachineGroup(
                    self.master_addr, self.master_port, self.rank, self.world_size, self.timeout.total_seconds()
                )
            store = RestartingAgent.group.meet()
            self._store = store
            self.master_port = store.port
        return super().next_rendezvous()

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
    static_tcp_rendezvous.StaticTCPRendezvous = MachineRendezvous  # type: ignore[misc]
    RestartingAgent.restarts = restarts = Restarts(folder)
    launcher.LocalElasticAgent = RestartingAgent  # type: ignore[misc]
    signal.signal(STOP, lambda number, frame: restarts.stop())
    try:
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
    except yaml.YAMLError as error:  # with the file and the line
        problem = UserError(f"--config_file is not valid YAML: {' '.join(str(error).split())}")
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
