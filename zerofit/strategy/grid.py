"""DeepSpeed's process groups of a layout in which several ranks hold one copy of the model."""

import contextlib
import functools
import io
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from zerofit.strategy.layout import ParallelLayout


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
def replaced(module: Any, name: str, function: Any) -> Iterator[None]:
    """The context in which a module has another function, or class, of this name."""
    before = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)
