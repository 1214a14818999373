"""The global order: which samples update k sees, whatever the number of processes, the strategy or the accumulation.

A run is one endless sequence of samples: epoch after epoch, each a permutation drawn from (seed, epoch). Update k
takes the next G of them, the global batch size, which may grow in the first updates; a batch may span two epochs. The
position in the data is therefore one number, the consumed samples. The last update of a run is filled up with places
that do not count.

If samples differ in length, the permutation is rearranged so that the samples of one update are of similar length,
and each micro-batch has those nearest in length. Both depend on (seed, epoch, G) alone.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from zerofit.data.pack import Sample, SampleSet
from zerofit.recipe.errors import UserError

if TYPE_CHECKING:
    from zerofit.data.collate import Batch, IndexedSamples

FILLER = -1  # a place in a batch without a sample


def samples_of_run(
    num_train_epochs: float, max_train_steps: int | None, num_samples: int, consumed: Callable[[int], int]
) -> int:
    """Return the number of samples in the whole run: num_train_epochs times `num_samples`, or max_train_steps, which
    overrides it. `consumed`: (number of updates) -> their samples."""
    if max_train_steps is not None:
        return consumed(max_train_steps)
    return max(1, round(num_train_epochs * num_samples))


class Order(Protocol):
    """The sample indices at places [start, stop) of a run's sequence of samples."""

    def indices(self, start: int, stop: int) -> np.ndarray: ...


class SampleOrder:
    """The order of a training run.

    With `lengths` (of all samples, in tokens) an epoch is rearranged so that the samples of an update are of similar
    length. The shuffle stays unbiased: the permutation is cut into windows of `window` updates, a window's samples are
    sorted by length and cut into batches of G, and the batches are put into random order. The permutation decides
    which samples share a window, and any batch may come first: so each sample has the same chance of each place in the
    epoch, whatever its length, and is seen once. Which samples share an update is no longer random: if the loss is a
    mean over tokens, the grouping must not correlate with their number. `global_batch`: G.
    """

    def __init__(
        self, num_samples: int, seed: int, lengths: np.ndarray | None = None, global_batch: int = 1, window: int = 16
    ):
        self.num_samples = num_samples
        self.seed = seed
        self.lengths = lengths
        self.global_batch = global_batch
        self.window = window
        self._epoch = -1
        self._permutation = np.zeros(0, dtype=np.int64)

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Return the sample indices at places [start, stop) of the run."""
        pieces = [np.zeros(0, dtype=np.int64)]
        while start < stop:
            epoch, offset = divmod(start, self.num_samples)
            pieces.append(self.epoch(epoch)[offset : offset + stop - start])
            start += len(pieces[-1])
        return np.concatenate(pieces)

    def epoch(self, number: int) -> np.ndarray:
        """Return the permutation of an epoch, from (seed, epoch) alone (and G, if samples are grouped by length)."""
        if number != self._epoch:
            rng = np.random.default_rng([self.seed, number])
            permutation = rng.permutation(self.num_samples)
            if self.lengths is not None:
                # The first samples, which complete the last update of the previous epoch, stay as drawn.
                head = min(-number * self.num_samples % self.global_batch, self.num_samples)
                pieces = [permutation[:head]]
                size = self.window * self.global_batch
                for start in range(head, self.num_samples, size):
                    drawn = permutation[start : start + size]
                    full = len(drawn) // self.global_batch * self.global_batch  # an incomplete batch stays as drawn
                    ordered = drawn[:full][np.argsort(self.lengths[drawn[:full]], kind="stable")]
                    batches = rng.permuted(ordered.reshape(-1, self.global_batch), axis=1)
                    pieces += [batches[rng.permutation(len(batches))].reshape(-1), drawn[full:]]
                permutation = np.concatenate(pieces)
            self._epoch = number
            self._permutation = permutation
        return self._permutation


class FixedOrder:
    """The order of an evaluation, and of samples that are already shuffled: unchanged, or the longest first with a
    key to sort by."""

    def __init__(self, num_samples: int, sort_key: np.ndarray | None = None):
        self.num_samples = num_samples
        self._sorted = None if sort_key is None else np.argsort(-sort_key, kind="stable")

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Return the sample indices at places [start, stop)."""
        if self._sorted is None:
            return np.arange(start, min(stop, self.num_samples))
        return self._sorted[start:stop]


def rank_batches(
    order: Order,
    total_samples: int,
    consumed: int,
    micro_batch: int,
    accumulation: int,
    *,
    num_replicas: int,
    rank: int,
    sort_key: np.ndarray | None = None,  # (samples,)
    warmup: Sequence[int] = (),  # the accumulation of each of the first updates, where the global batch grows
    lengths: Iterable[int] | None = None,  # tokens to which the samples of each micro-batch are cut
    ends: Iterable[int] | None = None,  # the update's last sample, if updates grow beyond `micro_batch` samples
) -> Iterator[list[Any]]:
    """Yield this rank's micro-batches: `accumulation` for each update, each a list of sample indices (or FILLER).

    A global batch is laid out as (accumulation, replicas, micro-batch): data-parallel rank r's m-th micro-batch is
    [m, r]. With a `sort_key` the batch is first sorted, the largest first, so that micro-batches that are computed at
    the same time have similar lengths. With `lengths` the list has (index, length) instead of each index.
    """
    length = iter(lengths or ())
    end = iter(ends or ())
    start = consumed
    for passes in itertools.chain(warmup, itertools.repeat(accumulation)):
        if start >= total_samples:
            return
        size = passes * num_replicas * micro_batch
        stop = start + size if ends is None else next(end)
        drawn = order.indices(start, min(stop, total_samples))
        if sort_key is not None:
            drawn = drawn[np.argsort(-sort_key[drawn], kind="stable")]
        indices = np.full(-(-len(drawn) // size) * size, FILLER)
        indices[: len(drawn)] = drawn
        for row in indices.reshape(passes, num_replicas, -1)[:, rank].tolist():
            yield row if lengths is None else list(zip(row, itertools.repeat(next(length))))
        start = stop


def first_tokens(sample: Sample, length: int) -> Sample:
    """Return the first `length` tokens of a sample."""
    return {
        name: np.minimum(value, length) if name == "num_tokens" else value[:length] for name, value in sample.items()
    }


class _Indexed(torch.utils.data.Dataset[tuple[Sample, int]]):
    """Looks up (sample, index) by index, or by (index, length) cut to that length; FILLER gives sample 0."""

    def __init__(self, samples: SampleSet):
        self.samples = samples

    def __getitem__(self, place: int | tuple[int, int]) -> tuple[Sample, int]:
        if isinstance(place, tuple):
            index, length = place
            return first_tokens(self.samples[max(index, 0)], length), index
        return self.samples[max(place, 0)], place


def _unwrap_user_errors(batches: "Iterator[Batch]") -> "Iterator[Batch]":
    """Re-raise the UserError of a worker process without the traceback that torch adds to its message."""
    try:
        yield from batches
    except UserError as error:
        raise UserError(str(error).rpartition(f"{UserError.__name__}: ")[2].strip()) from None


def make_loader(
    samples: SampleSet,
    batches: Iterable[list[Any]],
    collate: "Callable[[IndexedSamples], Batch]",
    workers: int,
    pin: bool,
) -> "Iterator[Batch]":
    """Return this rank's micro-batches. The DataLoader's iterator is created at once: it draws a seed from torch's
    generator."""
    loaded = torch.utils.data.DataLoader(
        _Indexed(samples), batch_sampler=batches, collate_fn=collate, num_workers=workers, pin_memory=pin
    )
    return _unwrap_user_errors(iter(loaded))
