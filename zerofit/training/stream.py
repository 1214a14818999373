"""How long a run is, and its training data as the loop takes it: this rank's micro-batches, update after update."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zerofit.data.collate import Batch
from zerofit.data.order import LengthGroups, MicroBatches, SampleOrder, Shortened, loader, samples_of_run
from zerofit.data.token_updates import TokenMicroBatches, TokenUpdates
from zerofit.recipe.batch_options import Growth
from zerofit.recipe.options import TrainingRecipe
from zerofit.recipe.parsing import counted
from zerofit.record.terminal import rounded
from zerofit.strategy.batches import BatchSizes
from zerofit.strategy.devices import pins_memory
from zerofit.strategy.engine import Engine
from zerofit.training.task import Task


@dataclass(frozen=True)
class RunLength:
    """Counts are samples and updates."""

    num_samples: int  # in the training set
    total_samples: int  # seen over the whole run
    num_updates: int
    batches: BatchSizes
    by_tokens: TokenUpdates | None = None  # where the samples of an update are as many as its tokens allow

    def consumed(self, updates: int) -> int:
        """Samples seen after this many updates."""
        return min((self.by_tokens or self.batches).consumed(updates), self.total_samples)

    def epoch(self, updates: int) -> float:
        """Epochs done after this many updates."""
        return self.consumed(updates) / self.num_samples

    def ends_an_epoch(self, update: int) -> bool:
        """Whether some epoch was completed by this update (counted from 1)."""
        return self.consumed(update) // self.num_samples > self.consumed(update - 1) // self.num_samples

    @property
    def describe(self) -> str:
        """For the log."""
        epochs = counted(rounded(self.epoch(self.num_updates)), "epoch")
        return f"{counted(self.num_updates, 'update')}, {epochs}"

    def is_last(self, update: int) -> bool:
        return update == self.num_updates

    def is_due(self, strategy: str | None, steps: int | None, update: int) -> bool:
        """Whether what happens at the end of each epoch (`strategy` is epoch), or every `steps` updates, happens
        after this one."""
        if strategy == "epoch":
            return self.ends_an_epoch(update)
        return update % steps == 0 if steps else False


def run_length(
    recipe: TrainingRecipe, num_samples: int, batches: BatchSizes, by_tokens: TokenUpdates | None = None
) -> RunLength:
    """The length of the run in samples and updates."""
    sizes = by_tokens or batches
    total = samples_of_run(recipe.num_train_epochs, recipe.max_train_steps, num_samples, sizes.consumed)
    return RunLength(num_samples, total, sizes.num_updates(total), batches, by_tokens)


class Totals(NamedTuple):
    """Counts of a whole global batch."""

    targets: float  # trained tokens (examples; of weighted classes the sum of their weights)
    tokens: float  # without padding
    positions: float  # tokens and padding

    @classmethod
    def sum(cls, replicas: Iterable[Sequence[float]]) -> "Totals":
        return cls(*(sum(column) for column in zip(*replicas)))


@dataclass(frozen=True)
class UpdateBatches:
    """This rank's micro-batches of one update."""

    micro_batches: list[Batch]

    @property
    def samples(self) -> list[int]:
        """The indices of the samples."""
        return [index for batch in self.micro_batches for index in batch.samples]

    @property
    def counts(self) -> list[float]:
        """Trained tokens, tokens and positions of this rank alone."""
        counts = ((batch.num_targets, batch.num_tokens, batch.num_positions) for batch in self.micro_batches)
        return [sum(column) for column in zip(*counts)]


class UpdateStream:
    """The micro-batches of one update after another.

    Args:
        updates: updates that are done: the stream begins behind them.
    """

    def __init__(self, task: Task, engine: Engine, length: RunLength, updates: int):
        self._micro_batches = micro_batches(task, engine, length, updates)
        self._length, self._loaded = length, updates
        self._prefetched: UpdateBatches | None = None

    def next(self) -> UpdateBatches:
        """The micro-batches of the next update."""
        batches = self.prefetch()
        assert batches is not None, "the loop ends with the last update"
        self._prefetched = None
        return batches

    def prefetch(self) -> UpdateBatches | None:
        """Load the micro-batches of the next update ahead; `next` gives them later. None after the last update."""
        if self._prefetched is None and self._loaded < self._length.num_updates:
            self._loaded += 1
            accumulation = self._length.batches.accumulation_of(self._loaded)
            self._prefetched = UpdateBatches([next(self._micro_batches) for _ in range(accumulation)])
        return self._prefetched


def micro_batches(task: Task, engine: Engine, length: RunLength, updates: int) -> Iterator[Batch]:
    """This rank's micro-batches after so many updates; ranks of one replica get the same."""
    recipe, sizes, samples = task.recipe, length.batches, task.samples
    workers, pin = recipe.dataloader_num_workers or 0, pins_memory(engine.device)
    if length.by_tokens is not None:
        shape, span = (sizes.accumulation, sizes.replicas, sizes.micro_batch), (updates, length.num_updates)
        tokens = TokenMicroBatches(length.by_tokens, shape, span, length.total_samples, engine.layout.data_rank)
        return iter(loader(samples, tokens, task.collate, workers, pin))
    groups = None
    if task.grouping == "window" and samples.lengths is not None:
        groups = LengthGroups(samples.lengths, sizes.global_batch)
    sort_key = samples.sort_key if task.grouping != "none" else None
    order = task.order or SampleOrder(length.num_samples, recipe.seed, groups)
    micro = MicroBatches(
        order,
        length.total_samples,
        length.consumed(updates),
        sizes.micro_batch,
        sizes.accumulation,
        engine.layout.data_size,
        engine.layout.data_rank,
        sort_key,
        [sizes.accumulation_of(update) for update in range(updates + 1, sizes.growing + 1)],
    )
    sampler = micro if task.lengths is None else Shortened(micro, _lengths(task.lengths, sizes, updates))
    return iter(loader(samples, sampler, task.collate, workers, pin))


def _lengths(growth: Growth, sizes: BatchSizes, updates: int) -> Iterator[int]:
    """The length of each micro-batch's samples, without end."""
    for update in itertools.count(updates + 1):
        yield from itertools.repeat(growth(update), sizes.accumulation_of(update))
