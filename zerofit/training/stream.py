"""The length of a run, this rank's micro-batches of each update, and the state of the current update."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zerofit.data.collate import Batch, TokenUpdates
from zerofit.data.order import SampleOrder, make_loader, rank_batches, samples_of_run
from zerofit.health.shutdown import StopReason
from zerofit.health.slow_ranks import RankSeconds
from zerofit.recipe.errors import UserError
from zerofit.recipe.options import TrainingRecipe
from zerofit.strategy.batches import BatchSizes
from zerofit.strategy.devices import pins_memory

if TYPE_CHECKING:
    from zerofit.training.run import Run


@dataclass(frozen=True)
class RunLength:
    """The length of a run in samples and updates."""

    num_samples: int  # in the training set
    total_samples: int  # seen over the whole run
    num_updates: int
    batches: BatchSizes
    by_tokens: TokenUpdates | None = None  # set if tokens, not samples, limit an update

    def consumed(self, updates: int) -> int:
        """Return the number of samples seen after this many updates."""
        return min((self.by_tokens or self.batches).consumed(updates), self.total_samples)

    def epoch(self, updates: int) -> float:
        """Return the number of epochs done after this many updates."""
        return self.consumed(updates) / self.num_samples

    def is_last(self, update: int) -> bool:
        return update == self.num_updates

    def is_due(self, strategy: str | None, steps: int | None, update: int) -> bool:
        """Return True if an action is due after this update: at the end of each epoch if `strategy` is "epoch", else
        every `steps` updates."""
        if strategy == "epoch":
            return self.consumed(update) // self.num_samples > self.consumed(update - 1) // self.num_samples
        return update % steps == 0 if steps else False


def run_length(
    recipe: TrainingRecipe, num_samples: int, batches: BatchSizes, by_tokens: TokenUpdates | None = None
) -> RunLength:
    """Return the length of the run in samples and updates. Raises UserError: there are fewer samples than one global
    batch takes; `profile` names an update beyond the last."""
    if num_samples < batches.global_batch:
        raise UserError(
            f"the training data gives {num_samples} samples, fewer than one global batch of {batches.global_batch} "
            f"= {batches.micro_batch} x {batches.accumulation} x {batches.replicas} (per_device_train_batch_size x "
            "accumulation x processes). Make the batch smaller, or train on more data (or, of text, on a shorter "
            "block_size)"
        )
    sizes = by_tokens or batches
    total = samples_of_run(recipe.num_train_epochs, recipe.max_train_steps, num_samples, sizes.consumed)
    length = RunLength(num_samples, total, sizes.num_updates(total), batches, by_tokens)
    last = recipe.profiled_updates[-1:]
    if last and last[0] > length.num_updates:
        raise UserError(
            f"profile = {recipe.profile}: the run has {length.num_updates} updates. Choose an M within them"
        )
    return length


class Totals(NamedTuple):
    """The counts of a whole global batch, summed over all replicas."""

    targets: float  # trained tokens (examples; of weighted classes the sum of their weights)
    tokens: float  # tokens without padding
    positions: float  # tokens and padding


NO_COUNTS = Totals(0, 0, 0)


class RankReport(NamedTuple):
    """The numbers that a rank sends to all others at the end of an update, together with the loss."""

    peak_memory_bytes: float
    stop_reason: float  # a StopReason
    checkpoint_is_due: float  # 1 if due by the clock
    checkpoint_failed: float
    seconds: RankSeconds
    next_counts: Sequence[float]  # Totals of this rank's micro-batches of the next update; empty: it is the last

    def numbers(self) -> list[float]:
        return [*self[:4], *self.seconds, *self.next_counts]

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> "RankReport":
        end = 4 + len(RankSeconds._fields)
        peak, reason, is_due, has_failed = numbers[:4]
        return cls(peak, reason, is_due, has_failed, RankSeconds(*numbers[4:end]), numbers[end:])


@dataclass(frozen=True)
class Update:
    """One step of the optimizer: this rank's micro-batches of one global batch.

    Args:
        scale: the factor of loss sums before the backward pass: replicas / targets. Since engines average gradients
            over the replicas, they are those of the mean over the global batch's targets.
    """

    number: int  # counted from 1
    micro_batches: list[Batch]  # empty if the update is skipped after a rewind
    totals: Totals = NO_COUNTS  # counts of the whole global batch
    scale: float = 1.0

    @property
    def samples(self) -> list[int]:
        """Return the indices of this rank's samples in the training set."""
        return [index for batch in self.micro_batches for index in batch.samples]


@dataclass
class Progress:
    """The state of the current update of the loop.

    Attributes:
        began: the time when its micro-batches were loaded, by time.perf_counter.
        is_abandoned: it was refused, and the run goes back to a checkpoint, or stops.
        metrics: its line of the record, an UpdateMetrics, until it is written.
        held_out: the figures of the evaluation after it.
        is_best: this evaluation is the best so far.
    """

    began: float = 0.0
    is_abandoned: bool = False
    metrics: Any = None
    held_out: dict[str, float] = field(default_factory=dict)
    is_best: bool = False
    stop_reason: StopReason = StopReason.NONE
    checkpoint_is_due: bool = False
    checkpoint_failed: bool = False


def number_of(name: str, figure: Any) -> float:
    """Return a figure of the script as a float. Raises UserError: it is not a number or a tensor with one element."""
    try:
        return float(figure)
    except (TypeError, ValueError):
        raise UserError(f"run.log: the figure {name!r} is {figure!r}, which is no number") from None


def dropout_seed(seed: int, update: int, key: tuple[int, ...]) -> int:
    """Return the seed of an update's dropout: equal in every run and after every resume, different for every key."""
    return int(np.random.SeedSequence([seed, update, *key]).generate_state(1)[0])


def counts_of(micro_batches: list[Batch]) -> list[float]:
    """Return the sums of targets, tokens and positions over these micro-batches, in the order of Totals."""
    counts = ((batch.num_targets, batch.num_tokens, batch.num_positions) for batch in micro_batches)
    return [float(sum(column)) for column in zip(*counts)]


def update_batches(run: "Run") -> Iterator[list[Batch]]:
    """Yield this rank's micro-batches of each remaining update; the ranks of one replica get the same."""
    length = run.length
    recipe = run.recipe
    layout = run.engine.layout
    samples = run.data.train
    done = run.state.updates
    sizes = length.batches
    grouping = "none" if length.by_tokens else getattr(recipe, "length_grouping", "none")
    lengths_to_group = samples.lengths if grouping == "window" else None
    lengths = None  # the row length of each micro-batch
    if run.warmup is not None:
        numbers = itertools.count(done + 1)
        lengths = (run.warmup(number) for number in numbers for _ in range(sizes.accumulation_of(number)))
    micro = rank_batches(
        length.by_tokens
        or run.data.order
        or SampleOrder(length.num_samples, recipe.seed, lengths_to_group, sizes.global_batch),
        length.total_samples,
        length.consumed(done),
        sizes.micro_batch,
        sizes.accumulation,
        num_replicas=layout.data_size,
        rank=layout.data_rank,
        sort_key=samples.sort_key if grouping != "none" else None,
        warmup=[sizes.accumulation_of(update) for update in range(done + 1, sizes.warmup_updates + 1)],
        lengths=lengths,
        ends=map(length.consumed, itertools.count(done + 1)) if length.by_tokens else None,
    )
    workers = recipe.dataloader_num_workers or 0
    pin = pins_memory(run.engine.device)
    batches = make_loader(samples, micro, run.collate, workers, pin)
    for update in range(done + 1, length.num_updates + 1):
        yield [next(batches) for _ in range(sizes.accumulation_of(update))]
