"""`accelerate launch`, as `zerofit launch` starts it: torchrun's agent, whose machines meet and say who is missing.

    python -P train/tools/launch/agent.py --config_file accelerate_configs/zero3.yaml ... train/clm.py ...

torchrun lets machines wait 15 minutes for each other and then prints a traceback; here the store is opened by
train/strategy/meeting.py. On one machine it listens on the loopback interface only.
"""

import sys
import time
from pathlib import Path

if __name__ == "__main__":  # started alone: the package's folder is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from accelerate.commands import launch
from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

from train.recipe.errors import EXIT_USER_ERROR, UserError, first_line
from train.strategy.meeting import BEAT_S, Meeting, open_store, reach, serve_store

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class MeetingRendezvous(static_tcp_rendezvous.StaticTCPRendezvous):
    """torchrun's static rendezvous, over a store in which the machines have met."""

    def next_rendezvous(self):
        if self._store is None and self.world_size == 1 and self.master_addr in LOOPBACK:
            self._store = serve_store(self.master_port, everywhere=False)
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
    static_tcp_rendezvous.StaticTCPRendezvous = MeetingRendezvous
    try:
        launch.main()
    except UserError as error:
        problem = error
    except ConnectionError as error:  # accelerate: the port is in use
        problem = UserError(first_line(error))
    else:
        return 0
    print(problem.report(), file=sys.stderr, flush=True)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
