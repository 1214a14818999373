"""What a run finds on this machine: devices, memory, its folder. Tests make machines up."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zerofit.recipe.files import is_shared
from zerofit.recipe.words import counted
from zerofit.record.terminal import size
from zerofit.strategy.gpus import gpus_of_the_machine
from zerofit.tools.machine import Machine, inspect_machine

SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Disk:
    """Where a run writes its folder; `shared`: other machines may see it."""

    path: str
    free: int
    shared: bool = False


@dataclass(frozen=True)
class Installation(Machine):
    """A machine, and what is installed on it. Sizes are in bytes.

    Attributes:
        present: {maker: GPUs that the operating system has}, whether or not torch sees them.
        shm: of /dev/shm; None: there is none.
        output: of the run; None: no run is looked at.
    """

    shm: int | None = None
    torch: str = ""
    present: dict[str, int] = field(default_factory=dict)
    output: Disk | None = None

    def lines(self) -> list[tuple[str, str]]:
        """(what, in words) for a screen."""
        devices = [f"{device.name}, {size(device.free)} free of {size(device.total)}" for device in self.devices]
        shm = f"; /dev/shm {size(self.shm)}" if self.shm is not None else ""
        lines = [
            ("devices", "; ".join(devices) or f"no accelerator, {counted(self.cores, 'core')}"),
            ("torch", self.torch),
            ("memory", f"{size(self.memory_free)} free of {size(self.memory)}{shm}"),
        ]
        if self.output:
            shared = ", shared" * self.output.shared
            lines.append(("output", f"{self.output.path}: {size(self.output.free)} free{shared}"))
        return lines


def inspect_installation(output: Path | None) -> Installation:
    """This machine.

    Args:
        output: the run's folder; None: no run is looked at.
    """
    return Installation(
        **vars(inspect_machine()),
        shm=shutil.disk_usage(SHM).total if SHM.is_dir() else None,
        torch=f"{torch.__version__}, built for {built_for()}",
        present=gpus_of_the_machine(),
        output=_disk_of(output) if output else None,
    )


def built_for() -> str:
    """What torch's build serves beside the CPU."""
    versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    return next((f"{name} {found}" for name, found in versions.items() if found), "the CPU alone")


def _disk_of(path: Path) -> Disk:
    path = path.expanduser().absolute()
    place = next(place for place in (path, *path.parents) if place.exists())
    return Disk(str(path), shutil.disk_usage(place).free, is_shared(place))
