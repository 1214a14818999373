"""Check that a machine has what a run needs. `check_machine` asks nothing of this machine: tests make machines up."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from zerofit.recipe.files import is_shared
from zerofit.recipe.parsing import counted
from zerofit.record.terminal import size
from zerofit.strategy.gpus import ALSO_VISIBLE, NO_DEVICE, VISIBLE, cudnn, gpus_of_the_machine
from zerofit.tools.doctor.report import ERROR, NOTE, WARNING
from zerofit.tools.machine import Machine, inspect_machine

SHM = Path("/dev/shm")
SMALL_SHM = 512 * 2**20  # ds_report's limit
FULL_DISK = 2**30
NO_MEMORY_FREE = 0.9


@dataclass(frozen=True)
class Installation(Machine):
    """A machine, and where a run writes on it. Sizes are in bytes.

    Attributes:
        present: {maker: GPUs that the operating system has}, whether or not torch sees them.
        shm: of /dev/shm; None: there is none.
        output: the run's folder; None: no run is looked at.
        disk_free, disk_shared: of the disk with that folder; whether other machines may see it.
    """

    shm: int | None = None
    present: dict[str, int] = field(default_factory=dict)
    output: str | None = None
    disk_free: int = 0
    disk_shared: bool = False

    @classmethod
    def here(cls, output: Path | None) -> "Installation":
        """This machine. `output`: the run's folder."""
        shm = shutil.disk_usage(SHM).total if SHM.is_dir() else None
        found = cls(**vars(inspect_machine()), shm=shm, present=gpus_of_the_machine())
        if not output:
            return found
        path = output.expanduser().absolute()
        place = next(place for place in (path, *path.parents) if place.exists())
        free, shared = shutil.disk_usage(place).free, is_shared(place)
        return replace(found, output=str(path), disk_free=free, disk_shared=shared)

    def facts(self) -> list[tuple[str, str]]:
        """Return (what, facts in words) for a screen."""
        devices = [f"{device.name}, {size(device.free)} free of {size(device.total)}" for device in self.devices]
        shm = f"; /dev/shm {size(self.shm)}" if self.shm is not None else ""
        facts = [
            ("devices", "; ".join(devices) or f"no accelerator, {counted(self.cores, 'core')}"),
            ("torch", ", ".join(filter(None, [torch.__version__, cudnn() if self.devices else None]))),
            ("memory", f"{size(self.memory_free)} free of {size(self.memory)}{shm}"),
        ]
        if self.output:
            shared = ", shared" if self.disk_shared else ""
            facts.append(("output", f"{self.output}: {size(self.disk_free)} free{shared}"))
        return facts


def check_machine(
    machine: Installation,
    variables: Mapping[str, str],
    processes: int,
    num_machines: int = 1,
    precision: str | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield (level, message) of what is wrong with a machine for a run on it.

    Args:
        variables: the environment of a process.
    """
    there, counted_processes = len(machine.devices), counted(processes, "process")
    for maker, count in machine.present.items():
        hiding = [name for name in (VISIBLE[maker], *ALSO_VISIBLE[maker]) if variables.get(name) in NO_DEVICE]
        if hiding and not there:
            what = f"{hiding[0]} = {variables[hiding[0]]!r} hides the machine's {counted(count, f'{maker} GPU')}"
            yield WARNING, f"{what}: a run is on the CPU. Type unset {hiding[0]}"
    if not there and processes > machine.cores:
        what = f"{counted_processes} oversubscribe {counted(machine.cores, 'core')}"
        yield WARNING, f"{what}. Use --num_processes {machine.cores * num_machines} or less"
    if there and processes != there:
        level, only = (ERROR, "") if processes > there else (NOTE, " for all of them")
        what = f"{counted_processes} on this machine, which has {counted(there, 'device')}"
        yield level, f"{what}. Use --num_processes {there * num_machines}{only}"
    for name in sorted({device.name for device in machine.devices if device.has_bf16 is False}):
        if precision == "bf16":
            yield WARNING, f"precision = bf16: torch emulates it, slowly, on a {name}. Use --precision fp16"
    if precision == "bf16" and (times := machine.bf16_slowdown):
        yield WARNING, f"precision = bf16 takes {times:.0f} times as long as fp32 on this CPU. Use --precision fp32"
    for number, device in enumerate(machine.devices):
        if device.free < NO_MEMORY_FREE * device.total:
            used = f"{size(device.total - device.free)} of {size(device.total)}"
            yield WARNING, f"device {number} ({device.name}): {used} are in use. See nvidia-smi or rocm-smi"
    if machine.shm is not None and machine.shm < SMALL_SHM and (there or processes > 1):
        what = f"/dev/shm has {size(machine.shm)}: processes that exchange data through it may die with a bus error"
        yield WARNING, f"{what}. Start the container with --shm-size=1g or more"
    if machine.output and machine.disk_free < FULL_DISK:
        yield WARNING, f"{machine.output}: only {size(machine.disk_free)} free. Name another folder with --output_dir"
    if machine.output and num_machines > 1 and not machine.disk_shared:
        what = f"{machine.output} seems to be on a disk of this machine, one of {num_machines}"
        yield WARNING, f"{what}. Name a folder on a file system that all machines share with --output_dir"
