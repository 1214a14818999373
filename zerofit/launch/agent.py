"""`accelerate launch`, as `zerofit launch` starts it: torchrun's agent, whose machines meet and say who is missing.

    python -P zerofit/launch/agent.py --config_file accelerate_configs/zero3.yaml ... train/clm.py ...

torchrun lets machines wait 15 minutes for each other and then prints a traceback; here they meet in machine_group.py.
On one machine the store listens on the loopback interface only.

With `--max_restarts` it starts the processes again (restarts.py).

When a process fails, torchrun's log and traceback are left out, and the exit code is that of the first that has. The
processes end when the one that has started the agent is gone.
"""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":  # started alone: the package's folder is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import yaml
from accelerate.commands import launch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
from torch.distributed.launcher import api as launcher

from zerofit.launch.machine_group import MachineGroup
from zerofit.launch.rendezvous import Ended, serve_store
from zerofit.launch.restart_rule import Restarts
from zerofit.launch.restarts import RestartingAgent, folder_of_run, recorded_code
from zerofit.recipe.errors import EXIT_USER_ERROR, OUR_LAUNCHER, UserError, first_line
from zerofit.record.terminal import outlive_the_terminal

PARENT = os.getppid()
PR_SET_PDEATHSIG = 1  # prctl(2)
STOP = signal.SIGUSR2  # no restart from here on
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class MeetingRendezvous(static_tcp_rendezvous.StaticTCPRendezvous):
    """torchrun's static rendezvous, over a store in which the machines have met; a restart gets a new one."""

    def next_rendezvous(self):
        if self.world_size == 1 and self.master_addr in LOOPBACK:
            self._store = serve_store(0 if self._store else self.master_port, everywhere=False)
            self.master_port = self._store.port
        elif self.world_size > 1:
            if RestartingAgent.group is None:
                RestartingAgent.group = MachineGroup(
                    self.master_addr, self.master_port, self.rank, self.world_size, self.timeout.total_seconds()
                )
            self._store = RestartingAgent.group.meet()
            self.master_port = self._store.port
        return super().next_rendezvous()

    def num_nodes_waiting(self):
        return 0 if RestartingAgent.group is None else RestartingAgent.group.num_waiting()


def main() -> int:
    """Launch, and return the exit code: of several machines, that of the run."""
    os.environ[OUR_LAUNCHER] = "1"
    end_with_parent()
    outlive_the_terminal()
    if "LOGLEVEL" not in os.environ:  # torchrun's variable
        logging.disable(logging.ERROR)
    static_tcp_rendezvous.StaticTCPRendezvous = MeetingRendezvous
    RestartingAgent.restarts = restarts = Restarts(folder_of_run())
    launcher.LocalElasticAgent = RestartingAgent
    signal.signal(STOP, lambda number, frame: restarts.stop())
    try:
        code = run_launcher()
    except SignalException as error:  # the others may restart without this machine: they are not waited for
        return 128 + error.sigval
    group = RestartingAgent.group
    return code if group is None else group.settle(code, recorded_code())


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

    def pass_on(number: int, frame) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
