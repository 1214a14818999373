"""The parallel layout: on which part of the model, and on which samples, each process works; and DeepSpeed's process
groups of a layout in which several ranks hold one copy of the model."""

import contextlib
import functools
import io
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from zerofit.recipe.errors import UserError


@dataclass(frozen=True)
class ParallelLayout:
    """world_size = pipeline x data x sequence x tensor, and the place of `rank` in it.

    Ranks are numbered as DeepSpeed numbers them: tensor-parallel neighbours stand side by side, then come sequence,
    data and pipeline. The processes that hold one copy of the model together are a *replica*. All of them read the
    same samples, so whatever counts samples, sums a loss or draws a seed asks for `data_rank` and `data_size`, and
    whatever counts processes (files of a checkpoint, who prints) for `rank` and `world_size`.

    Args:
        tensor: ranks that split each layer.
        pipeline: stages, each with some of the layers.
        sequence: ranks that split each row.
        replicas: groups of ranks, each with a sharded copy of its own of what is sharded (HSDP); neighbours share.
    """

    world_size: int = 1
    rank: int = 0
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.world_size % self.replica_size:
            raise UserError(
                f"num_processes = {self.world_size} is not a multiple of tensor x pipeline x sequence = {self.tensor} "
                f"x {self.pipeline} x {self.sequence} = {self.replica_size}. Use --num_processes {self.replica_size}, "
                "or a multiple of it"
            )

    @property
    def replica_size(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.tensor * self.pipeline * self.sequence

    @property
    def model_size(self) -> int:
        """Ranks that share the layers: each has about one of so many parts of the weights."""
        return self.tensor * self.pipeline

    @property
    def data_size(self) -> int:
        """Replicas: each reads samples of its own."""
        return self.world_size // self.replica_size

    @property
    def data_rank(self) -> int:
        """The number of this rank's replica."""
        return self._data_rank_of(self.rank)

    @property
    def tensor_rank(self) -> int:
        """The place of this rank among those that split each layer."""
        return self.rank % self.tensor

    @property
    def stage(self) -> int:
        """The number of this rank's pipeline stage."""
        return self.stage_of(self.rank)

    @property
    def sequence_rank(self) -> int:
        """The place of this rank among those that split each row."""
        return self.rank // self.tensor % self.sequence

    @property
    def shard_rank(self) -> int:
        """The place of this rank among those that shard the same weights."""
        return self.rank // self.tensor % self.shard_size

    @property
    def shard_size(self) -> int:
        """Ranks that shard the same weights."""
        return self.data_size * self.sequence // self.replicas

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the run."""
        return self.rank == 0

    @property
    def loss_ranks(self) -> list[int]:
        """One rank of each replica, in the order of the replicas: the first of its last stage, which has the loss.
        What is counted or summed over the run is counted there, and so once."""
        last = [rank for rank in range(self.world_size) if self.stage_of(rank) == self.pipeline - 1]
        firsts = [rank for rank in last if rank % (self.tensor * self.sequence) == 0]
        return sorted(firsts, key=self._data_rank_of)

    @property
    def dropout_seed_key(self) -> tuple[int, ...]:
        """Tells this rank's random numbers (dropout) from those of others: another key for each replica, each stage,
        each part of a row, and each share of a layer, which has heads and tokens of its own."""
        shared = ((self.stage, self.pipeline), (self.sequence_rank, self.sequence), (self.tensor_rank, self.tensor))
        return (self.data_rank, *(place for place, size in shared if size > 1))

    def _data_rank_of(self, rank: int) -> int:
        return rank // (self.tensor * self.sequence) % self.data_size

    def stage_of(self, rank: int) -> int:
        """The number of a rank's pipeline stage."""
        return rank // (self.world_size // self.pipeline)


@functools.cache
def sequence_groups(layout: ParallelLayout) -> Any:
    """DeepSpeed's module of the groups that split rows; the first call makes them, on all ranks together."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(layout.sequence)
    return parallel_state_sp


@functools.cache
def layer_groups(layout: ParallelLayout) -> Any:
    """DeepSpeed's grid of the groups that share layers; the first call makes them, on all ranks together."""
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=layout.pipeline, num_mp=layout.tensor, num_dp=layout.data_size)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the topology
        return PipelineParallelGrid(topology=topology)


def initializing_deepspeed(layout: ParallelLayout) -> AbstractContextManager[Any]:
    """The context in which accelerate builds the engine: DeepSpeed learns there which ranks hold the same weights."""
    if layout.replica_size == 1 or layout.pipeline > 1:  # a pipeline's module brings the groups itself
        return contextlib.nullcontext()
    import deepspeed

    # accelerate 1.15 calls it without an mpu (accelerator.py, _prepare_deepspeed).
    groups = layer_groups(layout) if layout.tensor > 1 else sequence_groups(layout)
    return replaced(deepspeed, "initialize", functools.partial(deepspeed.initialize, mpu=groups))


@contextlib.contextmanager
def replaced(owner: Any, name: str, other: Any) -> Iterator[None]:
    """The context in which a module or an object has another function, class or value of this name."""
    before = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, before)
