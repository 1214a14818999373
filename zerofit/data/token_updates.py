"""Batches by tokens: a micro-batch has as many rows of similar length as fit into so many positions.

An epoch is a permutation drawn from (seed, epoch), cut into windows of some 16 updates. A window's samples are sorted
by length and laid into micro-batches, each as full as its positions allow; K neighbours are an update, and the updates
are put into random order. Micro-batches that fill no update wait, chosen at random, for the next window; those left at
the end of the epoch are its last update, which is smaller. So each sample is seen once an epoch, with the same chance
of each place in it, whatever its length. All of this depends on the lengths, the seed, K and a micro-batch's positions
alone, not on who trains which micro-batch; and the position in the data stays one number, the consumed samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from zerofit.data.order import FILLER
from zerofit.data.pack import SampleSet
from zerofit.recipe.errors import UserError
from zerofit.record.terminal import rounded
from zerofit.strategy.batches import BatchSizes

WINDOW = 16  # updates whose samples are sorted together


@dataclass(frozen=True)
class _Epoch:
    """An epoch, laid out.

    Args:
        samples: (samples,) in the order in which they are trained on.
        ends: (micro-batches,) where each ends in it.
    """

    samples: np.ndarray
    ends: np.ndarray


class TokenUpdates:
    """Which samples each update has, and each of its micro-batches.

    Args:
        widths: (samples, 1) tokens of each row; (samples, 2) of source and target, which are padded by themselves.
        positions: of a micro-batch, padding included; no row has more.
        micro_batches: K, of an update, on all ranks together.
    """

    def __init__(self, widths: np.ndarray, positions: int, micro_batches: int, seed: int):
        self.widths, self.positions, self.micro_batches, self.seed = widths, positions, micro_batches, seed
        self._key = widths[:, 0] * (1 + widths[:, -1].max()) + widths[:, -1]
        self._laid_out: dict[int, _Epoch] = {}  # the latest two
        self._updates_before = [0]  # each epoch

    def __len__(self) -> int:
        return len(self.widths)

    def consumed(self, updates: int) -> int:
        """Samples of so many updates, the first ones, together."""
        while self._updates_before[-1] < updates:
            self._epoch(len(self._updates_before) - 1)
        epoch = int(np.searchsorted(self._updates_before, updates, side="right")) - 1
        done = updates - self._updates_before[epoch]
        return epoch * len(self) + (int(self._epoch(epoch).ends[done * self.micro_batches - 1]) if done else 0)

    def num_updates(self, samples: int) -> int:
        """The updates in which so many samples are consumed; the last may have fewer than its share."""
        epochs, rest = divmod(samples, len(self))
        for epoch in range(len(self._updates_before) - 1, epochs):
            self._epoch(epoch)
        begun = np.searchsorted(self._epoch(epochs).ends, rest) + 1 if rest else 0  # micro-batches
        return self._updates_before[epochs] - int(-begun // self.micro_batches)

    def update(self, number: int, total: int) -> list[np.ndarray]:
        """The samples of each micro-batch of an update, counted from 1; of K, those that have any.

        Args:
            total: samples of the run, after which none follow.
        """
        start, stop = self.consumed(number - 1), self.consumed(number)
        epoch, offset = divmod(start, len(self))
        laid_out, last = self._epoch(epoch), min(stop, total) - start + offset
        ends = laid_out.ends[np.searchsorted(laid_out.ends, offset, side="right") :][: self.micro_batches]
        pieces = np.split(laid_out.samples[offset:last], np.minimum(ends, last)[:-1] - offset)
        return [piece for piece in pieces if len(piece)]

    def padding(self, epoch: int) -> float:
        """The fraction of an epoch's positions that are padding."""
        laid_out = self._epoch(epoch)
        positions = sum(
            len(rows) * int(self.widths[rows].max(axis=0).sum())
            for rows in np.split(laid_out.samples, laid_out.ends[:-1])
        )
        return 1 - int(self.widths.sum()) / positions

    def describe(self) -> str:
        """For the log, of the first epoch."""
        rows = np.diff(self._epoch(0).ends, prepend=0)
        return (
            f"batch     micro-batches of up to {self.positions:,} tokens: {rows.min()} to {rows.max()} rows, "
            f"{self.padding(0):.1%} padding; {rounded(len(rows) / self.micro_batches)} updates an epoch"
        )

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._laid_out:
            laid_out = self._lay_out(number)
            self._laid_out = {old: self._laid_out[old] for old in sorted(self._laid_out)[-1:]} | {number: laid_out}
            if number == len(self._updates_before) - 1:
                updates = -(-len(laid_out.ends) // self.micro_batches)
                self._updates_before.append(self._updates_before[-1] + updates)
        return self._laid_out[number]

    def _lay_out(self, number: int) -> _Epoch:
        rng = np.random.default_rng([self.seed, number])
        drawn, size = rng.permutation(len(self)), self._window_samples
        done, waiting = [], [np.zeros(0, dtype=np.int64)]
        for start in range(0, len(self), size):
            pool = np.concatenate([*waiting, drawn[start : start + size]])
            filled = self._fill(pool[np.argsort(-self._key[pool], kind="stable")])
            waits = set(rng.choice(len(filled), len(filled) % self.micro_batches, replace=False).tolist())
            kept = [rows for place, rows in enumerate(filled) if place not in waits]
            waiting = [filled[place] for place in sorted(waits)]
            for update in rng.permutation(len(kept) // self.micro_batches):
                done += kept[update * self.micro_batches :][: self.micro_batches]
        micro_batches = [*done, *filter(len, waiting)]
        return _Epoch(np.concatenate(micro_batches), np.cumsum([len(rows) for rows in micro_batches]))

    @property
    def _window_samples(self) -> int:
        positions = WINDOW * self.micro_batches * self.positions
        return max(1, int(positions / self.widths.sum(axis=1).mean()))

    def _fill(self, samples: np.ndarray) -> list[np.ndarray]:
        """Samples, the longest first, as micro-batches."""
        widths, micro_batches, start = self.widths[samples], [], 0
        while start < len(samples):
            most = max(1, self.positions // max(1, int(widths[start, 0])))
            padded = np.maximum.accumulate(widths[start : start + most], axis=0).sum(axis=1)  # (rows,)
            needed = padded * np.arange(1, len(padded) + 1)
            rows = max(1, int(np.searchsorted(needed, self.positions, side="right")))
            micro_batches.append(samples[start : start + rows])
            start += rows
        return micro_batches


class TokenMicroBatches(torch.utils.data.Sampler):
    """This rank's micro-batches, as many for each update: lists of sample indices, or of one FILLER. At each step the
    ranks have neighbours, of similar length.

    Args:
        updates: that are done, and that the run has.
        total: samples of the run.
    """

    def __init__(self, by_tokens: TokenUpdates, updates: tuple[int, int], total: int, world: int, rank: int):
        super().__init__()
        self.by_tokens, self.updates, self.total, self.world, self.rank = by_tokens, updates, total, world, rank

    def __len__(self) -> int:
        return (self.updates[1] - self.updates[0]) * self.by_tokens.micro_batches // self.world

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.updates[0] + 1, self.updates[1] + 1):
            micro_batches = self.by_tokens.update(number, self.total)
            for place in range(self.rank, self.by_tokens.micro_batches, self.world):
                yield micro_batches[place].tolist() if place < len(micro_batches) else [FILLER]


def updates_by_tokens(samples: SampleSet | None, batches: BatchSizes, seed: int) -> TokenUpdates | None:
    """What tokens_per_batch makes of the training samples; None without it.

    Raises:
        UserError: all rows have the same length.
    """
    if batches.row_tokens is None or samples is None:
        return None
    if samples.lengths is None:
        raise UserError("tokens_per_batch: all rows have the same length here. Set global_batch_size")
    widths = getattr(samples, "widths", samples.lengths[:, None])
    return TokenUpdates(
        widths, batches.micro_batch * batches.row_tokens, batches.accumulation * batches.replicas, seed
    )
