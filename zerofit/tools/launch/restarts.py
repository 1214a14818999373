"""After which failures `zerofit launch --max_restarts` lets torch's elastic agent start the processes again.

The agent restarts after every failure, as often as it is told. Here: never after a mistake of the user, an anomaly, an
out-of-memory or a signal, since the same command would end in the same way; always after processes that have saved and
left (85), which does not count; and not after two failures at the same update.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from zerofit.health.out_of_memory_errors import EXIT_OUT_OF_MEMORY
from zerofit.health.shutdown import EXIT_NEEDS_A_PERSON, EXIT_TO_BE_RESUMED
from zerofit.recipe.errors import EXIT_TERMINATED, EXIT_USER_ERROR

RUN = "ZEROFIT_RUN"  # the run's folder, for the agent
FINAL = {
    EXIT_USER_ERROR: "a mistake",
    EXIT_NEEDS_A_PERSON: "an anomaly, or a full disk",
    EXIT_OUT_OF_MEMORY: "out of memory",
}


class Restarts:
    """Decides after each failure.

    Attributes:
        is_stopped: somebody has asked the launch to end.
    """

    def __init__(self, folder: Path | None):
        self.folder, self.is_stopped = folder, False
        self._failed_after: int | None = None

    def stop(self) -> None:
        self.is_stopped = True

    def refused(self, codes: set[int]) -> str:
        """Why the processes are not started again; empty where they are.

        Args:
            codes: of the processes that have failed; negative: the signal that killed one. Those that the agent has
                ended since have EXIT_TERMINATED.
        """
        if self.is_stopped:
            return "it was asked to end"
        if final := codes & FINAL.keys():
            return f"the same command would end in the same way: {FINAL[min(final)]}"
        if not have_saved(codes):
            before, self._failed_after = self._failed_after, self.updates()
            if self._failed_after == before:
                return f"it has failed twice after update {before}"
        return ""

    def updates(self) -> int:
        """The last update in metrics.jsonl; 0 where there is none."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:  # type: ignore[operator]
                lines = file.read().splitlines()
        except (OSError, TypeError):
            return 0
        for line in reversed(lines):
            try:
                return int(json.loads(line)["update"])
            except (ValueError, KeyError, TypeError):  # cut off, or of an evaluation
                continue
        return 0


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


def have_saved(codes: set[int]) -> bool:
    """Whether the processes have left in order."""
    return EXIT_TO_BE_RESUMED in codes and codes <= {EXIT_TO_BE_RESUMED, EXIT_TERMINATED}


def _end(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def folder_of_run() -> Path | None:
    return Path(os.environ[RUN]) if RUN in os.environ else None
