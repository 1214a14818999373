"""What a rank has told its watchdog process (watchdog.py writes the lines). Python's own library alone."""

import math
from typing import NamedTuple


class RankMessages(NamedTuple):
    """What the rank has told its watchdog."""

    phase: str = "start"
    update: str = ""
    patience: float = math.inf  # nobody can say how long imports take
    stop_requested: str = ""  # the signal that asked it to stop, and that it has handled
    was_terminated: bool = False  # by SIGTERM, before it had a handler
    advice: tuple[str, ...] = ()
    flight: str = ""  # the folder of records of collectives
    world_size: int = 1
    backend: str = ""
    machine: str = ""  # of the rank, in words
    machines: tuple[str, ...] = ()  # all of them

    def after(self, line: str) -> "RankMessages":
        """The same with one more message."""
        kind, *words = line.split("\t")
        if kind == "phase":
            return self._replace(phase=words[0], update=words[1], patience=float(words[2]))
        if kind == "group":
            return self._replace(flight=words[0], world_size=int(words[1]), backend=words[2])
        if kind == "machine":
            return self._replace(machines=(*self.machines, words[0]))
        if kind == "stop_requested":
            return self._replace(stop_requested=words[0])
        if kind == "advice":
            return self._replace(advice=(*self.advice, words[0]) if words[0] else ())
        return self._replace(was_terminated=self.was_terminated or kind.startswith("Stack ("))  # faulthandler's

    def named(self, rank: int, pid: int) -> str:
        """The rank, and where it runs."""
        return f"rank {rank} (pid {pid})" + (f" on {self.machine}" if self.machine else "")

    @property
    def others(self) -> str:
        """The other machines; of many the first eight."""
        others = [machine for machine in self.machines if machine != self.machine]
        return ", ".join(others[:8]) + (f" and {len(others) - 8} more" if len(others) > 8 else "")

    @property
    def where(self) -> str:
        return f"phase {self.phase}" + (f" of update {self.update}" if self.update else "")
