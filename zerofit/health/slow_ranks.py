"""The search for slow ranks: which rank is slow, in which part of an update, and since when.

Ranks wait for each other, so an update takes the same time on all of them. A slow rank is found by its local seconds,
in which it waits for no other rank. Ranks exchange them in each update with other figures. They are compared between
the ranks that do the same work: those of one pipeline stage.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from zerofit.strategy.engine import Engine
from zerofit.strategy.layout import ParallelLayout

MIN_SLOWDOWN = 1.2  # a slow rank takes this many times as long as the others
MIN_INTERVAL = 10  # updates that are compared together: fewer are noise
MIN_SLOW_INTERVALS = 3  # consecutive intervals until a rank is reported


class RankSeconds(NamedTuple):
    """The seconds of a rank in an update."""

    total: float = 0.0  # from its first forward pass until all ranks have decided about the update
    data: float = 0.0  # in which the rank waits for its next micro-batches
    forward: float = 0.0  # on a CPU without waiting for other ranks, on a device with it
    backward: float = 0.0  # likewise
    waiting: float = 0.0  # for other ranks, on a CPU; on a device it is not known, and 0
    local: float = 0.0  # of forward and backward, without waiting for other ranks; 0: it is not known
    positions: float = 0.0  # not seconds, but the work: tokens and padding of its micro-batches


class RankClock:
    """The clock of this rank's seconds; it never waits for a device.

    On a CPU a thread that waits for a collective computes nothing, so the thread's CPU time does not include waiting.
    A device's stream is measured between events, which are read when the host has waited for the device anyway.
    """

    def __init__(self, engine: Engine):
        gathers = engine.strategy.shards_parameters or engine.strategy.fully_shards
        self.device = engine.device
        self.latest = RankSeconds()
        self.forward_is_local = not gathers and engine.layout.replica_size == 1  # it waits for no other rank
        self.enabled = engine.layout.world_size > 1
        # The part of an update in which RankSeconds.local is measured, for messages.
        self.measures = "forward and backward" if self.device.type == "cpu" else "forward"
        self._marks: list[tuple[str, float, Any]] = []

    def phase(self, name: str) -> None:
        """Record that the rank enters a phase: forward, backward, data or update."""
        if not self.enabled:
            return
        now: Any = time.thread_time()
        if self.device.type != "cpu":
            now = torch.Event(device=self.device, enable_timing=True)
            now.record()
        self._marks.append((name, time.perf_counter(), now))

    def finish_update(self, positions: int) -> None:
        """Compute this rank's seconds of the update (`latest`). The device must have finished the backward pass.
        `positions`: tokens and padding of the update's micro-batches."""
        if not self.enabled:
            return
        self.phase("")
        wall: dict[str, float] = {}
        busy: dict[str, float] = {}
        for (name, began, start), (_, ended, end) in zip(self._marks, self._marks[1:]):
            wall[name] = wall.get(name, 0.0) + ended - began
            if self.device.type == "cpu":
                busy[name] = busy.get(name, 0.0) + (end - start)
            elif name != "update":
                busy[name] = busy.get(name, 0.0) + start.elapsed_time(end) / 1000
        total = sum(wall.values())
        self._marks = []
        forward = busy.get("forward", 0.0)
        backward = busy.get("backward", 0.0)
        if self.device.type == "cpu":
            data = wall["data"]
            local = forward + backward
            waiting = total - data - local - busy["update"]
        else:
            data = busy["data"]
            local = forward if self.forward_is_local else 0.0
            waiting = 0.0
        self.latest = RankSeconds(total, data, forward, backward, waiting, local, positions)


class SlowRanks:
    """The comparison of the ranks' seconds in intervals of updates. `place_of` returns where a rank runs; `measures`
    is the part of an update in which RankSeconds.local is measured."""

    def __init__(self, layout: ParallelLayout, interval: int, place_of: Callable[[int], str], measures: str):
        self.measures = measures
        self.interval = max(interval, MIN_INTERVAL)
        self.place_of = place_of
        stages = np.array([layout.stage_of(rank) for rank in range(layout.world_size)])
        self._peers = [  # of each rank: the other ranks that do the same work
            np.flatnonzero((stages == stage) & (np.arange(len(stages)) != rank)) for rank, stage in enumerate(stages)
        ]
        self._updates: list[np.ndarray] = []  # (ranks, fields of RankSeconds)
        self._slow: set[tuple[int, str]] = set()  # the (rank, part) that are reported as slow
        self._changed: dict[
            tuple[int, str], list[int]
        ] = {}  # {not as reported: since the intervals with these updates}
        self._messages: list[str] = []

    def add(self, update: int, ranks: Sequence[RankSeconds]) -> dict[str, float] | None:
        """Take the seconds of all ranks in the previous update into account. Returns figures for metrics.jsonl at the
        end of an interval: the slowest rank's mean seconds, and the median of the others that do the same work."""
        if not ranks or not ranks[0].total or not self._peers[0].size:
            return None
        self._updates.append(np.array(ranks))
        if len(self._updates) < self.interval:
            return None
        means = np.mean(self._updates, axis=0)
        self._updates = []
        of_ranks = [RankSeconds(*row.tolist()) for row in means]
        of_peers = [RankSeconds(*np.median(means[peers], axis=0).tolist()) for peers in self._peers]
        slowdowns: list[dict[str, float]] = []  # of each rank: {part of an update: how many times as long it takes}
        for rank, (mine, others) in enumerate(zip(of_ranks, of_peers)):
            computing = mine.local / others.local if others.local else 0.0
            slowdown = {
                "data": mine.total / (mine.total - mine.data + others.data),
                "passes": min(computing, computing * others.positions / mine.positions),  # longer samples: more work
            }
            slowdowns.append(slowdown)
            for part, factor in slowdown.items():
                self._check(rank, part, factor, update - self.interval, mine, others=others)
        slowest = max(range(len(of_ranks)), key=lambda rank: max(slowdowns[rank].values()))
        figures: dict[str, float] = {"slowest_rank": slowest}
        for prefix, seconds in (("slowest", of_ranks[slowest]), ("others", of_peers[slowest])):
            for part in ("data", "forward", "backward", *(["waiting"] if of_ranks[0].waiting else [])):
                figures[f"{prefix}_{part}"] = round(getattr(seconds, part), 6)
        return figures

    def messages(self) -> list[str]:
        """Return lines for the log since the last call."""
        messages = self._messages
        self._messages = []
        return messages

    def _check(
        self, rank: int, part: str, factor: float, began: int, mine: RankSeconds, *, others: RankSeconds
    ) -> None:
        """Add a message if a rank has become slow in a part of an update, or is no longer slow."""
        key = (rank, part)
        is_slow = factor > MIN_SLOWDOWN
        if is_slow == (key in self._slow):
            self._changed.pop(key, None)
            return
        since = self._changed.setdefault(key, [])
        since.append(began)
        if len(since) < MIN_SLOW_INTERVALS:
            return
        del self._changed[key]
        self._slow ^= {key}
        waited = others.waiting - mine.waiting
        computing = f"computing ({self.measures})"
        if not is_slow:
            fact = f"{'loading data' if part == 'data' else computing} is as fast as on other ranks"
        elif part == "data":
            fact = f"an update waits {mine.data:.3g} s for its data, {others.data:.3g} s on other ranks"
        else:
            fact = f"{computing} takes {factor:.2f} times as long as on other ranks"
        waits = f", which wait {waited:.3g} s an update for it" if is_slow and waited > 0 else ""
        self._messages.append(f"slow      rank {rank} on {self.place_of(rank)}: since update {since[0]} {fact}{waits}")
