"""Starts the processes of one machine again: torch's elastic agent does it, and is told after which failures
(restart_rule.py)."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from zerofit.launch.machine_group import MachineGroup
from zerofit.launch.restart_rule import Restarts, code_of_run, have_saved
from zerofit.record.run_folder import RunFolder

RUN = "ZEROFIT_RUN"  # the run's folder, for the agent


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
        said = f"{ends} after update {self.restarts.updates()}"
        codes, allowed = {failure.exitcode for failure in result.failures.values()}, worker_group.spec.max_restarts
        refused = self._refused(codes) if allowed else "--max_restarts 0"
        used = self._count(not have_saved(codes))
        if not refused and used > allowed:
            refused = "none is left"
        self._remaining_restarts = int(not refused)
        if allowed:
            what = f"no restart ({refused})" if refused else f"restart {used} of {allowed}"
            print(f"{said}: {what}", file=sys.stderr, flush=True)
        if refused and self.group is not None:
            self.group.end(said, code_of_run([code if code >= 0 else 128 - code for code in codes]))
        return result

    def _refused(self, codes: set[int]) -> str:
        if self.group is not None and self.group.has_finished():
            return "another machine has finished"
        return self.restarts.refused(codes)

    def _count(self, failed: bool) -> int:
        """Failures so far, of all machines."""
        if self.group is not None:
            return self.group.failures(failed)
        self._failures += failed
        return self._failures

    def _rendezvous(self, worker_group: Any) -> None:
        worker_group.spec.master_port = None  # that of the rendezvous holds: a restart has a new store (agent.py)
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: Any) -> Any:
        """Ranks read the number of restarts, which has to be the same on all machines."""
        self._remaining_restarts = max(0, worker_group.spec.max_restarts - self._count(False))
        return super()._start_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Of one machine; several wait for each other in MachineGroup.settle, as long as they are alive."""
        if self.group is None:
            super()._exit_barrier()


def _end(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def folder_of_run() -> Path | None:
    return Path(os.environ[RUN]) if RUN in os.environ else None


def recorded_code() -> int | None:
    """The exit code that the run has left in its folder."""
    folder = folder_of_run()
    return None if folder is None else RunFolder(folder).environment().get("exit_code")
