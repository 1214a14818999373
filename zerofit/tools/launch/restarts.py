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

from zerofit.health.shutdown import EXIT_TO_BE_RESUMED
from zerofit.recipe.errors import EXIT_TERMINATED
from zerofit.record.run_folder import RunFolder
from zerofit.tools.launch.machine_group import FINAL, MachineGroup, code_of_run

RUN = "ZEROFIT_RUN"  # the run's folder, for the agent


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

    def recorded_code(self) -> int | None:
        """The exit code that the run has left in its folder."""
        return None if self.folder is None else RunFolder(self.folder).environment().get("exit_code")


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


def have_saved(codes: set[int]) -> bool:
    """Whether the processes have left in order."""
    return EXIT_TO_BE_RESUMED in codes and codes <= {EXIT_TO_BE_RESUMED, EXIT_TERMINATED}


def _end(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def folder_of_run() -> Path | None:
    return Path(os.environ[RUN]) if RUN in os.environ else None
