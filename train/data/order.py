"""The global order: which samples update k sees, whatever the number of processes, the strategy or the accumulation.

The run is one endless row of samples: epoch after epoch, each a permutation drawn from (seed, epoch). Update k takes
places k * G to (k + 1) * G of that row, G being the global batch size; a batch may span two epochs, so that no sample
is dropped or repeated at the seam. The position in the data is therefore one number, the consumed samples, and seeking
to it costs nothing. The last update of a run is filled up with places that do not count.
"""

from collections.abc import Iterator

import numpy as np
import torch

from train.data.pack import Sample, SampleSet

FILLER = -1  # a place in a batch that holds no sample


class SampleOrder:
    """Places in the run's row of samples -> sample indices."""

    def __init__(self, num_samples: int, seed: int, shuffle: bool = True):
        self.num_samples, self.seed, self.shuffle = num_samples, seed, shuffle
        self._epoch, self._permutation = -1, np.zeros(0, dtype=np.int64)

    def epoch(self, number: int) -> np.ndarray:
        """The permutation of epoch `number`, from (seed, number) alone."""
        if number != self._epoch:
            rng = np.random.default_rng([self.seed, number])
            self._permutation = rng.permutation(self.num_samples) if self.shuffle else np.arange(self.num_samples)
            self._epoch = number
        return self._permutation

    def places(self, start: int, stop: int) -> np.ndarray:
        """The sample indices at places [start, stop) of the run."""
        pieces = []
        while start < stop:
            epoch, offset = divmod(start, self.num_samples)
            piece = self.epoch(epoch)[offset : offset + stop - start]
            pieces.append(piece)
            start += len(piece)
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)


class MicroBatches(torch.utils.data.Sampler):
    """This rank's micro-batches: `accumulation` for each update, each a list of sample indices (or FILLER).

    Of a global batch, rank r's m-th micro-batch is row m, column r of its places laid out as
    (accumulation, world size, micro-batch).
    """

    def __init__(
        self, order: SampleOrder, total: int, consumed: int, micro: int, accumulation: int, world: int, rank: int
    ):
        super().__init__()
        self.order, self.total, self.consumed = order, total, consumed
        self.shape, self.rank = (accumulation, world, micro), rank

    def __len__(self) -> int:
        return -(-(self.total - self.consumed) // int(np.prod(self.shape))) * self.shape[0]

    def __iter__(self) -> Iterator[list[int]]:
        size = int(np.prod(self.shape))
        for start in range(self.consumed, self.total, size):
            places = np.full(size, FILLER)
            samples = self.order.places(start, min(start + size, self.total))
            places[: len(samples)] = samples
            for micro_batch in places.reshape(self.shape)[:, self.rank]:
                yield micro_batch.tolist()


class _Counted(torch.utils.data.Dataset):
    """(sample, counts) by index; a FILLER place borrows sample 0 and does not count."""

    def __init__(self, samples: SampleSet):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Sample, bool]:
        return self.samples[max(index, 0)], index != FILLER


def loader(samples: SampleSet, sampler: MicroBatches, collate, workers: int, pin: bool) -> torch.utils.data.DataLoader:
    """A DataLoader over this rank's micro-batches."""
    return torch.utils.data.DataLoader(
        _Counted(samples), batch_sampler=sampler, collate_fn=collate, num_workers=workers, pin_memory=pin
    )
