"""The environment of a rank, without a launcher and without processes: to resolve a strategy as a run would."""

import contextlib
import os
from collections.abc import Iterator, Mapping

LAUNCHER = ("ACCELERATE_", "DEEPSPEED_", "TORCHELASTIC_")  # variables that a launcher above this process has set
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@contextlib.contextmanager
def environment_of_a_rank(world_size: int, local_world_size: int, base: Mapping[str, str]) -> Iterator[None]:
    """`base`, and what torchrun adds for rank 0; this process' own environment is put back afterwards."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(base)
        os.environ.update(zip(RANKS, ("0", "0", str(world_size), str(local_world_size))))
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what a launcher has put into it."""
    return {name: value for name, value in environment.items() if not name.startswith(LAUNCHER)}
