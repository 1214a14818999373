"""Starts the processes of one machine again: torch's elastic agent does it, and is told after which failures
(restart_rule.py)."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from zerofit.tools.launch.restart_rule import Restarts, have_saved

RUN = "ZEROFIT_RUN"  # the run's folder, for the agent


class RestartingAgent(LocalElasticAgent):
    """torch's agent, which is told after each failure whether another restart is left."""

    restarts = Restarts(None)

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        allowed = worker_group.spec.max_restarts
        if not result.is_failed() or not allowed:
            return result
        codes = {failure.exitcode for failure in result.failures.values()}
        refused = self.restarts.refused(codes)
        if refused:
            self._remaining_restarts = 0
        elif have_saved(codes):
            self._remaining_restarts += 1
        left, after = self._remaining_restarts, f"after update {self.restarts.updates()}"
        what = f"restart {allowed - left + 1} of {allowed}" if left else f"no restart ({refused or 'none is left'})"
        ends = (f"rank {rank} {_end(failure.exitcode)}" for rank, failure in sorted(result.failures.items()))
        print(f"{', '.join(ends)} {after}: {what}", file=sys.stderr, flush=True)
        return result

    def _restart_workers(self, worker_group: Any) -> None:
        worker_group.spec.master_port = None  # the rendezvous has a new store (agent.py)
        super()._restart_workers(worker_group)


def _end(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def folder_of_run() -> Path | None:
    return Path(os.environ[RUN]) if RUN in os.environ else None
