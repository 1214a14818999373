"""The parallel layout: the part of the model and the samples that each process works on; its degrees in a DeepSpeed
JSON; and DeepSpeed's process groups where several ranks hold one copy of the model."""

import contextlib
import functools
import io
import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from zerofit.compat.deepspeed import initializing_with
from zerofit.recipe.errors import UserError

OFFLOAD_KEYS = ("offload_optimizer", "offload_param")
SEQUENCE_KEY = "sequence_parallel_size"
TENSOR_KEY = "tensor_parallel"
PIPELINE_KEY = "pipeline"
PIPELINE_VALUES = {  # keys of the pipeline section, and the only supported value
    "use_reentrant": False,  # transformers recomputes activations: --gradient_checkpointing
    "pipe_partitioned": False,  # DeepSpeed remembers the shape of the first micro-batch, and rows differ in length
    "grad_partitioned": False,
}


@dataclass(frozen=True)
class ParallelLayout:
    """The degrees, world_size = pipeline x data x sequence x tensor, and the coordinates of `rank`. Ranks are numbered
    as in DeepSpeed: tensor-parallel ranks are neighbours, then come sequence, data and pipeline. The processes that
    hold one copy of the model together are a *replica*, and read the same samples. So code that counts samples, sums a
    loss or draws a seed uses `data_rank` and `data_size`, and code that counts processes (files of a checkpoint, who
    prints) uses `rank` and `world_size`."""

    world_size: int = 1
    rank: int = 0
    tensor: int = 1  # ranks that split each layer
    pipeline: int = 1  # stages, each with some of the layers
    sequence: int = 1  # ranks that split each row
    dp_replicate: int = 1  # HSDP: groups of neighbouring ranks, each with a full sharded copy

    def __post_init__(self) -> None:
        if self.world_size % self.replica_size:
            raise UserError(
                f"num_processes = {self.world_size} is not a multiple of tensor x pipeline x sequence = {self.tensor} "
                f"x {self.pipeline} x {self.sequence} = {self.replica_size}. Use --num_processes {self.replica_size}, "
                "or a multiple of it"
            )

    @property
    def replica_size(self) -> int:
        """The number of ranks that hold one copy of the model together."""
        return self.tensor * self.pipeline * self.sequence

    @property
    def model_size(self) -> int:
        """The number of ranks over which tensor and pipeline parallelism divide the weights."""
        return self.tensor * self.pipeline

    @property
    def data_size(self) -> int:
        """The number of replicas: each reads its own samples."""
        return self.world_size // self.replica_size

    @property
    def data_rank(self) -> int:
        """The number of this rank's replica."""
        return self.rank // (self.tensor * self.sequence) % self.data_size

    @property
    def tensor_rank(self) -> int:
        """The index of this rank among those that split each layer."""
        return self.rank % self.tensor

    @property
    def pipeline_stage(self) -> int:
        """The number of this rank's pipeline stage."""
        return self.stage_of(self.rank)

    @property
    def sequence_rank(self) -> int:
        """The index of this rank among those that split each row."""
        return self.rank // self.tensor % self.sequence

    @property
    def shard_rank(self) -> int:
        """The index of this rank among those that shard the same weights."""
        return self.rank // self.tensor % self.shard_size

    @property
    def shard_size(self) -> int:
        """The number of ranks that shard the same weights."""
        return self.data_size * self.sequence // self.dp_replicate

    @property
    def is_main(self) -> bool:
        """True if this rank prints and writes for the run."""
        return self.rank == 0

    @property
    def loss_ranks(self) -> list[int]:
        """The first rank of each replica's last stage, which has the loss, in the order of the replicas. Sums and
        counts over the run are taken on these ranks, so that each sample counts once."""
        first = self.world_size // self.pipeline * (self.pipeline - 1)
        return [*range(first, self.world_size, self.tensor * self.sequence)]

    @property
    def dropout_seed_key(self) -> tuple[int, ...]:
        """The key from which this rank seeds dropout: another one for each replica, each stage, each part of a row,
        and each part of a layer, since these have different heads and tokens."""
        shared = (
            (self.pipeline_stage, self.pipeline),
            (self.sequence_rank, self.sequence),
            (self.tensor_rank, self.tensor),
        )
        return (self.data_rank, *(place for place, size in shared if size > 1))

    def stage_of(self, rank: int) -> int:
        """Return the number of a rank's pipeline stage."""
        return rank // (self.world_size // self.pipeline)


def offload_device(zero: dict[str, Any], part: str) -> str:
    """Return where a zero_optimization section puts one of OFFLOAD_KEYS: cpu, nvme or none."""
    return (zero.get(part) or {}).get("device", "none")


@functools.cache
def sequence_groups(layout: ParallelLayout) -> Any:
    """Return DeepSpeed's module of the groups that split rows. All ranks make the first call together."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(layout.sequence)
    return parallel_state_sp


@functools.cache
def model_groups(layout: ParallelLayout) -> Any:
    """Return DeepSpeed's grid of the groups that share layers. All ranks make the first call together."""
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=layout.pipeline, num_mp=layout.tensor, num_dp=layout.data_size)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the topology
        return PipelineParallelGrid(topology=topology)


def initializing_deepspeed(layout: ParallelLayout) -> AbstractContextManager[Any]:
    """The context in which accelerate builds the engine: DeepSpeed gets the groups of ranks with the same weights."""
    if layout.replica_size == 1 or layout.pipeline > 1:  # a pipeline's module has the groups itself
        return contextlib.nullcontext()
    return initializing_with(model_groups(layout) if layout.tensor > 1 else sequence_groups(layout))


def take_degrees(config: dict[str, Any], source: str) -> tuple[int, int, int]:
    """Return (tensor, pipeline, sequence): the numbers of ranks that share each layer, the layers, and each row.
    `tensor_parallel` is removed from the configuration: DeepSpeed would replace layers by its own (AutoTP), which
    support neither GPT-2 nor a tied vocabulary that is split. The other keys of `pipeline` are added, and
    `sequence_parallel_size` stays: DeepSpeed reads it where ZeRO-3 shards a new model. Raises UserError where a degree
    is not a number of processes, or other settings of the section are not supported."""
    problems = []
    degrees = {}
    for name, key, usable in ((TENSOR_KEY, "autotp_size", {}), (PIPELINE_KEY, "stages", PIPELINE_VALUES)):
        section = config.get(name, {key: 1})
        for extra in sorted(section.keys() - {key}):
            if section[extra] is not usable.get(extra):
                problems.append(f"{source}: {name}.{extra} = {json.dumps(section[extra])} is not supported. Remove it")
        degrees[f"{name}.{key}"] = section.get(key)
    degrees[SEQUENCE_KEY] = config.get(SEQUENCE_KEY, 1)
    problems += [
        f"{source}: {key} = {degree!r}: expected a number of processes, e.g. 2"
        for key, degree in degrees.items()
        if type(degree) is not int or degree < 1
    ]
    if problems:
        raise UserError(problems)
    tensor, pipeline, sequence = degrees.values()
    config.pop(TENSOR_KEY, None)
    if PIPELINE_KEY in config:
        config[PIPELINE_KEY] = {"stages": pipeline, **PIPELINE_VALUES}
    return tensor, pipeline, sequence


def with_degrees(config: dict[str, Any], tensor: int, pipeline: int, sequence: int) -> dict[str, Any]:
    """Return a copy of a configuration with these degrees, for those kinds of parallelism that it has."""
    degrees = {
        TENSOR_KEY: {"autotp_size": tensor},
        SEQUENCE_KEY: sequence,
        PIPELINE_KEY: {**config.get(PIPELINE_KEY, {}), "stages": pipeline},
    }
    return {key: degrees.get(key, value) for key, value in config.items()}
