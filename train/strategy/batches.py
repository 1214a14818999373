"""Micro-batch, accumulation and global batch: any two and the number of processes give the third."""

from dataclasses import dataclass

from train.recipe.errors import UserError
from train.recipe.options import BatchOptions


@dataclass(frozen=True)
class BatchSizes:
    """Sizes in samples. global_batch = micro_batch * accumulation * replicas."""

    micro_batch: int
    accumulation: int
    replicas: int  # data-parallel

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.replicas


def resolve_batches(recipe: BatchOptions, replicas: int, replica_size: int = 1) -> BatchSizes:
    """The sizes that the recipe states, checked against each other.

    Args:
        replica_size: processes of each replica.

    Raises:
        UserError: global_batch_size is no multiple of what one pass over all processes takes, or contradicts the
            accumulation; the message says which values would work.
    """
    micro, accumulation, total = (
        recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps, recipe.global_batch_size,
    )  # fmt: skip
    one_pass, what = micro * replicas, "processes" if replica_size == 1 else f"replicas (of {replica_size} processes)"
    if total is None:
        return BatchSizes(micro, accumulation or 1, replicas)
    if total % one_pass:
        sizes = [size for size in range(1, total + 1) if total % (size * replicas) == 0]
        counts = [count for count in range(1, total + 1) if total % (micro * count) == 0]
        remedies = [f"per_device_train_batch_size could be {_listed(sizes)}"] if sizes else []
        processes = [count * replica_size for count in counts]
        remedies += [f"the number of processes could be {_listed(processes)}"] if counts else []
        remedies = remedies or [f"make it a multiple of {one_pass}"]
        raise UserError(
            f"global_batch_size = {total} ({recipe.source('global_batch_size')}) is no multiple of "
            f"per_device_train_batch_size * {what} = {micro} * {replicas} = {one_pass}: "
            f"{', or '.join(remedies)}"
        )
    if accumulation not in (None, total // one_pass):
        raise UserError(
            f"gradient_accumulation_steps = {accumulation} ({recipe.source('gradient_accumulation_steps')}) and "
            f"global_batch_size = {total} ({recipe.source('global_batch_size')}) disagree: with "
            f"per_device_train_batch_size = {micro} and {replicas} {what} the accumulation is "
            f"{total // one_pass}. Set one of the two"
        )
    return BatchSizes(micro, total // one_pass, replicas)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
