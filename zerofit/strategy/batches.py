"""Micro-batch, accumulation and global batch: two of them and the number of processes determine the third."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from zerofit.recipe.data_options import BatchOptions, Warmup, read_warmup
from zerofit.recipe.errors import UserError

RESUMED_RUN = "the run that resumes"  # the source, in messages, of a size that follows from its global batch
MAX_SHOWN_NUMBERS = 12  # numbers of processes in a message


@dataclass(frozen=True)
class BatchSizes:
    """Sizes in samples. global_batch = micro_batch * accumulation * replicas."""

    micro_batch: int
    accumulation: int
    replicas: int  # data-parallel
    warmup: Warmup | None = None  # batch-size warm-up; None: every update takes the global batch
    row_tokens: int | None = None  # tokens of a full row, if batches are by tokens: sizes then count such rows

    @property
    def global_batch(self) -> int:
        return self.samples_per_micro_step * self.accumulation

    @property
    def samples_per_micro_step(self) -> int:
        return self.micro_batch * self.replicas

    def samples_in_update(self, update: int) -> int:
        """Return the number of samples of an update; updates are counted from 1."""
        return self.warmup(update) if self.warmup else self.global_batch

    @property
    def warmup_updates(self) -> int:
        """The number of updates before the first that takes the global batch."""
        return self.warmup.updates if self.warmup else 0

    def accumulation_of(self, update: int) -> int:
        """Return the number of micro-batches of an update; updates are counted from 1."""
        return self.samples_in_update(update) // self.samples_per_micro_step

    def consumed(self, updates: int) -> int:
        """Return the number of samples in the first `updates` updates."""
        warm = min(updates, self.warmup_updates)
        return int(self._while_warming_up[warm]) + (updates - warm) * self.global_batch

    def num_updates(self, samples: int) -> int:
        """Return the number of updates that consume `samples` samples; the last may have fewer than its size."""
        if samples <= self._while_warming_up[-1]:
            return int(np.searchsorted(self._while_warming_up, samples))
        return self.warmup_updates - int(self._while_warming_up[-1] - samples) // self.global_batch

    @cached_property
    def _while_warming_up(self) -> np.ndarray:
        """Samples consumed by 0, 1, ... `warmup_updates` updates."""
        return np.cumsum([0, *(self.samples_in_update(update) for update in range(1, self.warmup_updates + 1))])


def resolve_batches(
    recipe: BatchOptions, replicas: int, replica_size: int = 1, total_stays: bool = False
) -> BatchSizes:
    """Return the recipe's batch sizes, checked against each other. `replica_size`: the processes of each replica.
    `total_stays`: the global batch is that of the run that resumes; if it is not a multiple of the samples of a
    micro-step, the recipe adopts the largest micro-batch, below its own, with which it is. Raises UserError where
    global_batch_size is not a multiple of the samples of a micro-step, or contradicts the accumulation, or where a
    warm-up does not begin with whole micro-steps."""
    if total_stays:
        _fit_micro_batch(recipe, replicas, replica_size)
    micro = recipe.per_device_train_batch_size
    accumulation = recipe.gradient_accumulation_steps
    total = recipe.global_batch_size
    samples_per_micro_step = micro * replicas
    what = "processes" if replica_size == 1 else f"replicas (of {replica_size} processes)"
    if total is not None and total % samples_per_micro_step:
        raise UserError(
            f"global_batch_size = {total} ({recipe.source('global_batch_size')}) is not a multiple of "
            f"per_device_train_batch_size * {what} = {micro} * {replicas} = {samples_per_micro_step}: "
            f"make it a multiple of {samples_per_micro_step}, or change one of the two"
        )
    if total is not None and accumulation not in (None, total // samples_per_micro_step):
        raise UserError(
            f"gradient_accumulation_steps = {accumulation} ({recipe.source('gradient_accumulation_steps')}) and "
            f"global_batch_size = {total} ({recipe.source('global_batch_size')}) disagree: with "
            f"per_device_train_batch_size = {micro} and {replicas} {what} the accumulation is "
            f"{total // samples_per_micro_step}. Set one of the two"
        )
    steps = (accumulation or 1) if total is None else total // samples_per_micro_step
    sizes = BatchSizes(micro, steps, replicas, row_tokens=recipe.row_tokens)
    if recipe.global_batch_warmup is None:
        return sizes
    warmup = read_warmup(recipe.global_batch_warmup)
    assert warmup is not None  # the recipe's own check has read it
    first, updates = warmup
    total = sizes.global_batch
    possible = [size for size in range(samples_per_micro_step, total, samples_per_micro_step) if total % size == 0]
    if first not in possible:
        stated = f"global_batch_warmup = {recipe.global_batch_warmup} ({recipe.source('global_batch_warmup')})"
        remedy = (
            f"Begin with {', '.join(map(str, possible))}" if possible else "Leave it out: an update takes one pass"
        )
        raise UserError(
            f"{stated}: updates cannot begin with {first} samples and grow in steps of {first} to {total}, of passes "
            f"of per_device_train_batch_size * {what} = {samples_per_micro_step}. {remedy}"
        )
    return replace(sizes, warmup=Warmup(first, total, updates))


def _fit_micro_batch(recipe: BatchOptions, replicas: int, replica_size: int) -> None:
    """Let the recipe adopt a micro-batch whose micro-steps divide the global batch, and the first batch of a warm-up.
    Raises UserError where the replicas cannot share the samples evenly."""
    total = recipe.global_batch_size
    warmup = read_warmup(recipe.global_batch_warmup or "")
    assert total is not None, "of the run that resumes"
    smallest = math.gcd(total, warmup[0]) if warmup else total
    if smallest % replicas:
        possible = [number for number in range(1, smallest + 1) if smallest % number == 0]
        nearest = sorted(sorted(possible, key=lambda number: abs(number - replicas))[:MAX_SHOWN_NUMBERS])
        numbers = ", ".join(str(number * replica_size) for number in nearest)
        begins = f", and begins with {warmup[0]}" if warmup else ""
        of = f" ({replicas} replicas of {replica_size})" if replica_size > 1 else ""
        raise UserError(
            f"the run that resumes has global_batch_size = {total}{begins}, which {replicas * replica_size} "
            f"processes{of} cannot share evenly, and it stays as it was. These numbers of processes can: {numbers}"
        )
    fitting = [size for size in range(1, recipe.per_device_train_batch_size + 1) if smallest // replicas % size == 0]
    if fitting[-1] != recipe.per_device_train_batch_size:
        recipe.adopt("per_device_train_batch_size", fitting[-1], RESUMED_RUN)
