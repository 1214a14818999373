"""`accelerate launch` with torchrun's agent, whose machines meet and say who is missing.

torchrun lets machines wait 15 minutes for each other and then prints a traceback; here they meet in machine_group.py.
On one machine the store listens on the loopback interface only. With `--max_restarts` the processes are started again
where exit_code.py allows that.

When a process fails, torchrun's log and traceback are left out, and the exit code is that of the first that has.
"""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from zerofit.compat.torch_elastic import AskingAgent
from zerofit.launch.exit_code import Restarts, code_of_run, have_saved
from zerofit.launch.machine_group import MachineGroup
from zerofit.launch.rendezvous import Ended, serve_store
from zerofit.recipe.errors import EXIT_USER_ERROR, OUR_LAUNCHER, UserError, first_line


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
    command, threads = ["accelerate", "launch", *words], "OMP_NUM_THREADS" in os.environ
    about = {"command": command, "started": psutil.Process().create_time(), "has_threads": threads}
    os.environ[OUR_LAUNCHER] = json.dumps(about)  # for the ranks: zerofit/strategy/launch.py
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
