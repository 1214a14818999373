"""Private parts of torchrun's agent (torch.distributed.elastic). Tried with torch 2.13 and accelerate 1.15."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as statics
from torch.distributed.launcher import api

from zerofit.compat import replaced


class AskingAgent(LocalElasticAgent):
    """torchrun's agent, which asks whether it starts the processes again. torchrun counts each machine's own restarts,
    lets an agent end others only by a timeout, and has no option for another agent. Without it: `zerofit launch`
    restarts whatever has failed, and a finished machine waits for one that is gone."""

    waits_for_others = True  # this agent, whose processes have finished, waits for those of other machines

    @classmethod
    @contextmanager
    def launching(cls, rendezvous: type) -> Iterator[None]:
        """Within this context torchrun, and so `accelerate launch`, makes this agent, and such a static rendezvous."""
        with replaced(api, "LocalElasticAgent", cls), replaced(statics, "StaticTCPRendezvous", rendezvous):
            yield

    def restarts_left(self, allowed: int) -> int:
        """Return how many restarts are left, as processes start. allowed: --max_restarts."""
        raise NotImplementedError

    def starts_again(self, failures: dict[int, Any], allowed: int) -> bool:
        """Return whether the processes are started again. failures: {rank: torch's ProcessFailure}."""
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
        if self.waits_for_others:
            super()._exit_barrier()
