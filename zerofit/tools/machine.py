"""The machine that this runs on: its devices, cores and memory."""

from dataclasses import dataclass

import torch

from zerofit.strategy.devices import accelerator, bf16_slowdown, device_name, has_bf16
from zerofit.strategy.gpus import num_devices
from zerofit.strategy.host_memory import host_memory, usable_cores


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
    """This machine. A process that asks takes half a GiB of a GPU until it ends."""
    free, total = host_memory()
    count = num_devices()
    if not count:
        return Machine(cores=usable_cores(), memory=total, memory_free=free, bf16_slowdown=bf16_slowdown())
    kind, devices = accelerator().type, []
    for index in range(count):
        device = torch.device(kind, index)
        free_there, total_there = torch.accelerator.get_memory_info(index)
        devices.append(Device(device_name(device) or kind, total_there, free_there, has_bf16(device)))
    return Machine(kind, tuple(devices), usable_cores(), total, free)
