"""DeepSpeed's process groups of a layout in which several ranks hold one copy of the model."""

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager

from train.strategy.layout import ParallelLayout


@functools.cache
def sequence_groups(layout: ParallelLayout):
    """DeepSpeed's module of the groups that split rows; the first call makes them, on all ranks together."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(layout.sequence)
    return parallel_state_sp


def initializing_deepspeed(layout: ParallelLayout) -> AbstractContextManager:
    """The context in which accelerate builds the engine: DeepSpeed learns there which ranks hold the same weights."""
    return contextlib.nullcontext() if layout.replica_size == 1 else _with_grid(sequence_groups(layout))


@contextlib.contextmanager
def _with_grid(grid) -> Iterator[None]:
    # accelerate 1.15 calls deepspeed.initialize without an mpu (accelerator.py, _prepare_deepspeed).
    import deepspeed

    initialize = deepspeed.initialize
    deepspeed.initialize = functools.partial(initialize, mpu=grid)
    try:
        yield
    finally:
        deepspeed.initialize = initialize
