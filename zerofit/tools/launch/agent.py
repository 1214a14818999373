"""`accelerate launch`, as `zerofit launch` starts it: torchrun's agent, whose machines meet and say who is missing.

    python -P zerofit/tools/launch/agent.py --config_file accelerate_configs/zero3.yaml ... train/clm.py ...

torchrun lets machines wait 15 minutes for each other and then prints a traceback; here the store is opened by
zerofit/strategy/meeting.py. On one machine it listens on the loopback interface only.

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
import time
from pathlib import Path

if __name__ == "__main__":  # started alone: the package's folder is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import psutil
import yaml
from accelerate.commands import launch
from torch.distributed import PrefixStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
from torch.distributed.launcher import api as launcher

from zerofit.recipe.errors import EXIT_USER_ERROR, UserError, first_line
from zerofit.strategy.meeting import BEAT_S, Meeting, open_store, reach, serve_store
from zerofit.tools.launch.restart_rule import Restarts
from zerofit.tools.launch.restarts import RestartingAgent, folder_of_run

PARENT = os.getppid()
PR_SET_PDEATHSIG = 1  # prctl(2)
STOP = signal.SIGUSR2  # no restart from here on
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class MeetingRendezvous(static_tcp_rendezvous.StaticTCPRendezvous):
    """torchrun's static rendezvous, over a store in which the machines have met. A restart gets a new one: gloo would
    find the addresses of the processes before in the old one."""

    def next_rendezvous(self):
        if self.world_size == 1 and self.master_addr in LOOPBACK:
            port = 0 if self._store else self.master_port
            self._store = serve_store(port, everywhere=False)
            self.master_port = self._store.port
        elif self._store is None and self.world_size > 1:
            self._store = meet(
                self.master_addr, self.master_port, self.rank, self.world_size, self.timeout.total_seconds()
            )
        return super().next_rendezvous()


def meet(address: str, port: int, rank: int, count: int, limit_s: float):
    """The store of machine 0, when all machines have come.

    Raises:
        UserError: machine 0 cannot be reached; a machine is missing or there twice.
    """
    server = serve_store(port, everywhere=True) if rank == 0 else None
    reach(address, port, limit_s)
    store = open_store(address, port)
    meeting = Meeting(PrefixStore("zerofit/machines", store), "machine", rank, count, 1, rank, limit_s)
    meeting.come()
    meeting.ready()
    while not meeting.poll():
        time.sleep(BEAT_S / 4)
    return server or store


def main() -> int:
    """Launch, and return the exit code."""
    end_with_parent()
    if "LOGLEVEL" not in os.environ:  # torchrun's variable
        logging.disable(logging.ERROR)
    static_tcp_rendezvous.StaticTCPRendezvous = MeetingRendezvous
    RestartingAgent.restarts = restarts = Restarts(folder_of_run())
    launcher.LocalElasticAgent = RestartingAgent
    signal.signal(STOP, lambda number, frame: restarts.stop())
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
    except SignalException as error:
        return 128 + error.sigval
    print(problem.report(), file=sys.stderr, flush=True)
    return EXIT_USER_ERROR


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
