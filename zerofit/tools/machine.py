"""The description of this machine, and the environment of a rank on it, to resolve a strategy without a launch."""

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
    """An accelerator, with its memory in bytes. `has_bf16` is None where torch does not report it."""

    name: str
    total: int
    free: int
    has_bf16: bool | None = None


@dataclass(frozen=True)
class Machine:
    """A machine with its accelerators.

    Attributes:
        kind: the device type of the accelerators, such as cuda; cpu without any.
        memory, memory_free: total and free memory of the host, in bytes.
        bf16_slowdown: time of bf16 / time of fp32 on the CPU; None where it does not matter.
    """

    kind: str = "cpu"
    devices: tuple[Device, ...] = ()
    cores: int = 1
    memory: int = 0
    memory_free: int = 0
    bf16_slowdown: float | None = None


def inspect_machine() -> Machine:
    """Describe this machine. The calling process then occupies half a GiB of a GPU until it ends."""
    free, total = host_memory()
    count = num_devices()
    if not count:
        return Machine(cores=usable_cores(), memory=total, memory_free=free, bf16_slowdown=bf16_slowdown())
    kind = accelerator().type
    devices = []
    for index in range(count):
        device = torch.device(kind, index)
        device_free, device_total = torch.accelerator.get_memory_info(index)
        devices.append(Device(device_name(device) or kind, device_total, device_free, has_bf16(device)))
    return Machine(kind, tuple(devices), usable_cores(), total, free)


# prefixes of the variables that a launcher above this process has set
LAUNCHER_PREFIXES = ("ACCELERATE_", "DEEPSPEED_", "TORCHELASTIC_")
VARIABLES_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def environment_of_a_rank(
    world_size: int, local_world_size: int, base: Mapping[str, str]
) -> AbstractContextManager[None]:
    """Within this context os.environ is `base` and the variables that torchrun sets for rank 0."""
    ranks = dict(zip(VARIABLES_OF_A_RANK, ("0", "0", str(world_size), str(local_world_size))))
    return patch.dict(os.environ, {**base, **ranks}, clear=True)


def strategy_of_a_launch(
    recipe: TrainingRecipe, name: str, source: str, world_size: int, local_world_size: int
) -> Strategy:
    """Return the strategy as a run of `world_size` processes would read it, and set open options of the recipe by it.
    `name`: in accelerate_configs/, or a .yaml file; `source`: the flag that names it. Raises UserError: unknown
    strategy, contradictions between recipe, YAML and JSON, or an impossible batch size."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    base["ACCELERATE_USE_CPU"] = "true"  # the strategy does not depend on this machine's GPUs
    with environment_of_a_rank(world_size, local_world_size, base):
        recipe.adopt("strategy", name, source)
        return read_strategy(recipe)
