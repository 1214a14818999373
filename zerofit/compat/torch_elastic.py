"""Private parts of torchrun's agent (torch.distributed.elastic). Tried with torch 2.13 and accelerate 1.15."""

from contextlib import AbstractContextManager
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from zerofit.compat import replaced


class AskingAgent(LocalElasticAgent):
    """torchrun's agent, which asks whether it starts the processes again, and whether it waits for other agents.
    torchrun counts each machine's own restarts, lets an agent end others only by a timeout, and has no option for
    another agent. Without it: `zerofit launch` restarts whatever has failed, and a machine that has finished waits for
    one that is gone."""

    @classmethod
    def launching(cls) -> AbstractContextManager[None]:
        """Within this context torchrun, and so `accelerate launch`, makes this agent."""
        return replaced(api, "LocalElasticAgent", cls)

    def restarts_left(self, allowed: int) -> int:
        """Return how many restarts are left, as processes start. allowed: --max_restarts."""
        raise NotImplementedError

    def starts_again(self, failures: dict[int, Any], allowed: int) -> bool:
        """Return whether the processes are started again. failures: {rank: torch's ProcessFailure}."""
        raise NotImplementedError

    def waits_for_others(self) -> bool:
        """Return whether this agent, whose processes have finished, waits for those of other machines."""
        raise NotImplementedError

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._remaining_restarts = int(self.starts_again(result.failures, worker_group.spec.max_restarts))
        return result

    def _start_workers(self, worker_group: Any) -> Any:
        self._remaining_restarts = self.restarts_left(worker_group.spec.max_restarts)  # which the processes read
        return super()._start_workers(worker_group)

    def _exit_barrier(self) -> None:
        if self.waits_for_others():
            super()._exit_barrier()
