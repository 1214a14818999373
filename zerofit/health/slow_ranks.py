"""Finds a rank that is slow, in which part of an update, and since when.

Ranks wait for each other, so an update takes the same time on all of them. A slow rank is found by its own seconds:
what it takes where it waits for nobody. They travel with what ranks exchange in each update, and are compared between
the ranks that do the same work: those of one pipeline stage.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from zerofit.strategy.engine import Engine
from zerofit.strategy.layout import ParallelLayout

MIN_SLOWDOWN = 1.2  # times the others
MIN_INTERVAL = 10  # updates that are compared together: fewer are noise
MIN_SLOW_INTERVALS = 3  # intervals, until something is said


class RankSeconds(NamedTuple):
    """A rank's seconds in an update."""

    total: float = 0.0  # from its first forward pass until all had met for the decision about the update
    data: float = 0.0  # in which nothing was computed, since the next micro-batches were not there
    forward: float = 0.0  # on a CPU without the time of waiting for others, on a device with it
    backward: float = 0.0  # likewise
    waiting: float = 0.0  # for others, on a CPU; of a device it is not known, and 0
    own: float = 0.0  # of forward and backward, or the part of them in which nobody is waited for; 0: there is none
    positions: float = 0.0  # tokens and padding of its micro-batches: the work


class RankClock:
    """Takes this rank's seconds; nothing here waits for a device.

    On a CPU a thread that waits for a collective computes nothing, so the thread's own time is that without waiting. A
    device's stream is measured between events, which are read when the host has waited for the device anyway.
    """

    def __init__(self, engine: Engine):
        gathers = engine.strategy.shards_parameters or engine.strategy.fully_shards
        self.device = engine.device
        self.latest = RankSeconds()
        self.forward_is_local = not gathers and engine.layout.replica_size == 1  # it waits for no other rank
        self.enabled = engine.layout.world_size > 1  # else nothing is measured
        # The part of an update over which `own` is measured, in words.
        self.measures = "forward and backward" if self.device.type == "cpu" else "forward"
        self._marks: list[tuple[str, float, Any]] = []

    def phase(self, name: str) -> None:
        """Note that the rank enters a phase: forward, backward, data or update."""
        if not self.enabled:
            return
        now: Any = time.thread_time()
        if self.device.type != "cpu":
            now = torch.Event(device=self.device, enable_timing=True)
            now.record()
        self._marks.append((name, time.perf_counter(), now))

    def finish_update(self, positions: int) -> None:
        """Compute this rank's seconds of the update (`latest`); the device must have done its backward pass."""
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
            own = forward + backward
            waiting = total - data - own - busy["update"]
        else:
            data = busy["data"]
            own = forward if self.forward_is_local else 0.0
            waiting = 0.0
        self.latest = RankSeconds(total, data, forward, backward, waiting, own, positions)


class SlowRanks:
    """Compares the seconds of the ranks, interval after interval."""

    def __init__(self, layout: ParallelLayout, interval: int, place_of: Callable[[int], str], measures: str):
        self.measures = measures
        self.interval = max(interval, MIN_INTERVAL)
        self.place_of = place_of
        stages = np.array([layout.stage_of(rank) for rank in range(layout.world_size)])
        self._others = [
            np.flatnonzero((stages == stage) & (np.arange(len(stages)) != rank)) for rank, stage in enumerate(stages)
        ]
        self._updates: list[np.ndarray] = []  # (ranks, parts)
        self._slow: set[tuple[int, str]] = set()  # of which was said that they are
        self._changed: dict[tuple[int, str], list[int]] = {}  # otherwise since: the first updates of intervals
        self._notes: list[str] = []

    def add(self, update: int, ranks: Sequence[RankSeconds]) -> dict[str, float] | None:
        """Take in what the ranks told of the update before this one. Returns what metrics.jsonl has at the end of an
        interval: the slowest rank's mean seconds, and the median of the others that do the same work."""
        if not ranks or not ranks[0].total or not self._others[0].size:
            return None
        self._updates.append(np.array(ranks))
        if len(self._updates) < self.interval:
            return None
        means = np.mean(self._updates, axis=0)
        self._updates = []
        own = [RankSeconds(*row.tolist()) for row in means]
        others = [RankSeconds(*np.median(means[peers], axis=0).tolist()) for peers in self._others]
        factors: list[dict[str, float]] = []  # by which a rank takes longer than the others
        for rank, (mine, theirs) in enumerate(zip(own, others)):
            late = mine.data - theirs.data
            computing = mine.own / theirs.own if theirs.own else 0.0
            of_parts = {
                "data": mine.total / (mine.total - late),
                "passes": min(computing, computing * theirs.positions / mine.positions),  # longer samples: more work
            }
            factors.append(of_parts)
            for part, factor in of_parts.items():
                self._judge(rank, part, factor, update - self.interval, mine, others=theirs)
        slowest = max(range(len(own)), key=lambda rank: max(factors[rank].values()))
        figures: dict[str, float] = {"slowest_rank": slowest}
        for who, seconds in (("slowest", own[slowest]), ("others", others[slowest])):
            for part in ("data", "forward", "backward", *(["waiting"] if own[0].waiting else [])):
                figures[f"{who}_{part}"] = round(getattr(seconds, part), 6)
        return figures

    def messages(self) -> list[str]:
        """Lines for the log since the last call."""
        notes = self._notes
        self._notes = []
        return notes

    def _judge(
        self, rank: int, part: str, factor: float, began: int, own: RankSeconds, *, others: RankSeconds
    ) -> None:
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
        waited = others.waiting - own.waiting
        computing = f"computing ({self.measures})"
        if not is_slow:
            what = f"{'loading data' if part == 'data' else computing} is as fast as on other ranks"
        elif part == "data":
            what = f"an update waits {own.data:.3g} s for its data, {others.data:.3g} s on other ranks"
        else:
            what = f"{computing} takes {factor:.2f} times as long as on other ranks"
        waits = f", which wait {waited:.3g} s an update for it" if is_slow and waited > 0 else ""
        self._notes.append(f"slow      rank {rank} on {self.place_of(rank)}: since update {since[0]} {what}{waits}")
