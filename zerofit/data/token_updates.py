"""Batches by tokens: where rows are short, r times as many of them take the place of rows of full length.

An epoch is a permutation drawn from (seed, epoch), cut into windows of some 16 updates. A window's samples are sorted
by length and cut into updates of r x G rows: G is the global batch in rows of full length, and r as large as fits, so
that r rows of the update's longest are no longer than a full row. The updates are put into random order. The rows that
fill no update, at a random place among the sorted ones, wait for the next window or the end of the epoch.

A micro-batch of m full rows becomes one of r x m rows, which takes no more memory: lengths count as GPUs pad them
(round_up in collate.py). So an update depends on the lengths, the seed and G alone.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from zerofit.data.collate import GPU_MULTIPLE, round_up
from zerofit.data.order import FILLER
from zerofit.data.pack import SampleSet
from zerofit.recipe.errors import UserError

WINDOW = 16  # updates whose samples are sorted together


class _Epoch(NamedTuple):
    samples: np.ndarray  # (samples,) in the order in which they are trained on
    ends: np.ndarray  # (updates,) where each ends in it


class TokenUpdates:
    """The samples of each update. `widths`: (samples, 1) tokens of each row; (samples, 2) of source and target,
    which are padded by themselves. `row_tokens`: of a full row; no row has more. `full_rows`: G, of an update."""

    def __init__(self, widths: np.ndarray, row_tokens: int, full_rows: int, seed: int):
        self.widths, self.row_tokens, self.full_rows, self.seed = widths, row_tokens, full_rows, seed
        self._padded = round_up(widths, GPU_MULTIPLE)
        self._laid_out: dict[int, _Epoch] = {}  # the latest two
        self._updates_before = [0]  # each epoch

    @property
    def num_samples(self) -> int:
        return len(self.widths)

    def consumed(self, updates: int) -> int:
        """The number of samples in the first `updates` updates."""
        while self._updates_before[-1] < updates:
            self._epoch(len(self._updates_before) - 1)
        epoch = int(np.searchsorted(self._updates_before, updates, side="right")) - 1
        done = updates - self._updates_before[epoch]
        return epoch * self.num_samples + (int(self._epoch(epoch).ends[done - 1]) if done else 0)

    def num_updates(self, samples: int) -> int:
        """The number of updates that consume this number of samples; the last may have fewer than its share."""
        epochs, rest = divmod(samples, self.num_samples)
        for epoch in range(len(self._updates_before) - 1, epochs):
            self._epoch(epoch)
        begun = int(np.searchsorted(self._epoch(epochs).ends, rest)) + 1 if rest else 0
        return self._updates_before[epochs] + begun

    def samples(self, start: int, stop: int) -> np.ndarray:
        """The sample indices at places [start, stop) of the run, of one update."""
        epoch, offset = divmod(start, self.num_samples)
        return self._epoch(epoch).samples[offset : offset + stop - start]

    def describe(self) -> str:
        """Describe the updates of the first epoch, for the log."""
        laid_out = self._epoch(0)
        updates = np.split(laid_out.samples, laid_out.ends[:-1])
        tokens = np.array([self.widths[rows].sum() for rows in updates])
        positions = sum(len(rows) * int(self._padded[rows].max(axis=0).sum()) for rows in updates)
        most = self.row_tokens * self.full_rows
        return (
            f"batch     {min(map(len, updates)):,} to {max(map(len, updates)):,} samples of similar length, at most "
            f"{most:,} tokens (the median update has {int(np.median(tokens)):,}); {len(updates):,} updates an epoch, "
            f"padding at most {1 - tokens.sum() / positions:.1%}"
        )

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._laid_out:
            laid_out = self._lay_out(number)
            self._laid_out = {old: self._laid_out[old] for old in sorted(self._laid_out)[-1:]} | {number: laid_out}
            if number == len(self._updates_before) - 1:
                self._updates_before.append(self._updates_before[-1] + len(laid_out.ends))
        return self._laid_out[number]

    def _lay_out(self, number: int) -> _Epoch:
        rng = np.random.default_rng([self.seed, number])
        drawn, updates, waiting = rng.permutation(self.num_samples), [], np.zeros(0, dtype=np.int64)
        size = max(1, int(WINDOW * self.full_rows * self.row_tokens / self.widths.sum(axis=1).mean()))
        for start in range(0, self.num_samples, size):
            pool = np.concatenate([waiting, drawn[start : start + size]])
            longest_first = pool[np.lexsort(-self.widths[pool].T[::-1])]  # by the first column, then the second
            from_above = self._cut(longest_first)
            kept = from_above[: rng.integers(len(from_above) + 1)]
            rest = longest_first[sum(map(len, kept)) :]
            kept += [rows[::-1] for rows in self._cut(rest[::-1])]
            waiting = rest[: len(longest_first) - sum(map(len, kept))]
            updates += [kept[place] for place in rng.permutation(len(kept))]
        updates += self._last(waiting)
        return _Epoch(np.concatenate(updates), np.cumsum([len(rows) for rows in updates]))

    def _cut(self, samples: np.ndarray) -> list[np.ndarray]:
        """The updates that sorted samples make, one after another; the rest is left out."""
        widths, updates, start = self._padded[samples], [], 0
        while start + self.full_rows <= len(samples):
            most = self.full_rows * max(1, self.row_tokens // max(1, int(widths[start, 0])))
            longest = np.maximum.accumulate(widths[start : start + most], axis=0).sum(axis=1)  # (rows,)
            needed = longest[self.full_rows - 1 :: self.full_rows]  # of an update of 1, 2, ... times G rows
            fits = needed * np.arange(1, len(needed) + 1) <= self.row_tokens
            times = max(1, int(fits.sum()))
            if times == len(fits) and len(longest) < most:
                break  # all that are left fit: with more samples it would be larger
            updates.append(samples[start : start + times * self.full_rows])
            start += times * self.full_rows
        return updates

    def _last(self, samples: np.ndarray) -> list[np.ndarray]:
        """The updates of those that are left at the end of an epoch, the longest first."""
        times = -(-len(samples) // self.full_rows)
        if times <= 1 or int(self._padded[samples].max(axis=0).sum()) * times <= self.row_tokens:
            return [samples] if times else []
        whole = (times - 1) * self.full_rows
        return [samples[-whole:], samples[:-whole]]


class TokenMicroBatches(torch.utils.data.Sampler[list[int]]):
    """This rank's micro-batches, `accumulation` for each update, each a list of sample indices (or FILLER). `shape`:
    of an update of full rows: (accumulation, replicas, micro-batch). `updates`: that are done, and that the run has.
    `total`: samples of the run."""

    def __init__(
        self, by_tokens: TokenUpdates, shape: tuple[int, int, int], updates: tuple[int, int], total: int, rank: int
    ):
        super().__init__()
        self.by_tokens, self.shape, self.updates, self.total, self.rank = by_tokens, shape, updates, total, rank

    def __len__(self) -> int:
        return (self.updates[1] - self.updates[0]) * self.shape[0]

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(*self.updates):
            start, stop = (min(self.by_tokens.consumed(done), self.total) for done in (number, number + 1))
            samples = self.by_tokens.samples(start, stop)
            times = -(-len(samples) // self.by_tokens.full_rows)
            places = np.full(times * self.by_tokens.full_rows, FILLER)
            places[: len(samples)] = samples
            for micro_batch in places.reshape((*self.shape[:2], -1))[:, self.rank]:
                yield micro_batch.tolist()


def updates_by_tokens(
    samples: SampleSet | None, row_tokens: int | None, full_rows: int | None, seed: int
) -> TokenUpdates | None:
    """Return the updates that tokens_per_batch makes of the training samples; None without that option. Raises
    UserError: all rows have the same length. `row_tokens`: of a full row. `full_rows`: of an update."""
    if samples is None or row_tokens is None or full_rows is None:
        return None
    if samples.lengths is None:
        raise UserError("tokens_per_batch: all rows have the same length here. Set global_batch_size")
    widths = getattr(samples, "widths", samples.lengths[:, None])
    return TokenUpdates(widths, row_tokens, full_rows, seed)
