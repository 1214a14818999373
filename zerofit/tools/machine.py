"""The machine that this runs on, and the environment of a rank on it, without a launcher and without processes: to
resolve a strategy as a run would."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from unittest.mock import patch

import torch

from zerofit.recipe.options import TrainingRecipe
from zerofit.strategy.devices import accelerator, bf16_slowdown, device_name, has_bf16
from zerofit.strategy.gpus import num_devices
from zerofit.strategy.host_memory import host_memory, usable_cores
from zerofit.strategy.read import read_strategy
from zerofit.strategy.strategy import Strategy


@dataclass(frozen=True)
class Device:
    """An accelerator. Sizes are in bytes; `has_bf16` is None where torch does not say."""

    name: str
    total: int
    free: int
    has_bf16: bool | None = None


@dataclass(frozen=True)
class Machine:
    """A machine. Sizes are in bytes.

    Attributes:
        kind: of the devices: cuda, xpu, ...; cpu where there are none.
        memory, memory_free: of the host.
        bf16_slowdown: times that bf16 takes of fp32 on its CPU, where that matters.
    """

    kind: str = "cpu"
    devices: tuple[Device, ...] = ()
    cores: int = 1
    memory: int = 0
    memory_free: int = 0
    bf16_slowdown: float | None = None


def inspect_machine() -> Machine:
    """Return this machine. A process that calls this takes half a GiB of a GPU until it ends."""
    free, total = host_memory()
    count = num_devices()
    if not count:
        return Machine(cores=usable_cores(), memory=total, memory_free=free, bf16_slowdown=bf16_slowdown())
    kind = accelerator().type
    devices = []
    for index in range(count):
        device = torch.device(kind, index)
        free_there, total_there = torch.accelerator.get_memory_info(index)
        devices.append(Device(device_name(device) or kind, total_there, free_there, has_bf16(device)))
    return Machine(kind, tuple(devices), usable_cores(), total, free)


# prefixes of the variables that a launcher above this process has set
LAUNCHER_PREFIXES = ("ACCELERATE_", "DEEPSPEED_", "TORCHELASTIC_")
VARIABLES_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def environment_of_a_rank(
    world_size: int, local_world_size: int, base: Mapping[str, str]
) -> AbstractContextManager[None]:
    """The process' environment is `base`, and what torchrun adds for rank 0, until the context ends."""
    ranks = dict(zip(VARIABLES_OF_A_RANK, ("0", "0", str(world_size), str(local_world_size))))
    return patch.dict(os.environ, {**base, **ranks}, clear=True)


def strategy_of_a_launch(
    recipe: TrainingRecipe, name: str, source: str, world_size: int, local_world_size: int
) -> Strategy:
    """The strategy (a name in accelerate_configs/, or a .yaml file; `source`: the flag that names it) as a run of
    `world_size` processes has it. The recipe adopts what it leaves open and the pair states. Raises UserError: no such
    strategy, a contradiction between recipe, YAML and JSON, no such batch."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    base["ACCELERATE_USE_CPU"] = "true"  # a GPU that is here and that torch does not see is no matter
    with environment_of_a_rank(world_size, local_world_size, base):
        recipe.adopt("strategy", name, source)
        return read_strategy(recipe)
