"""The environment of a rank, without a launcher and without processes: to resolve a strategy as a run would."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

LAUNCHER = ("ACCELERATE_", "DEEPSPEED_", "TORCHELASTIC_")  # variables that a launcher above this process has set
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@contextlib.contextmanager
def environment_replaced(environment: Mapping[str, str]) -> Iterator[None]:
    """Another environment in place of this process' own, which is put back afterwards."""
    before, made = dict(os.environ), dict(environment)
    try:
        os.environ.clear()
        os.environ.update(made)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def environment_of_a_rank(
    world_size: int, local_world_size: int, base: Mapping[str, str]
) -> AbstractContextManager[None]:
    """`base`, and what torchrun adds for rank 0."""
    ranks = dict(zip(RANKS, ("0", "0", str(world_size), str(local_world_size))))
    return environment_replaced({**base, **ranks})


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what a launcher has put into it."""
    return {name: value for name, value in environment.items() if not name.startswith(LAUNCHER)}
