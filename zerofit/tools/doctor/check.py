"""Whether what a run needs is on a machine. Nothing is asked of this machine here: tests make machines up."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zerofit.estimate.memory_constants import PROGRAM_BYTES
from zerofit.recipe.files import is_shared
from zerofit.recipe.parsing import counted
from zerofit.record.terminal import size
from zerofit.strategy.gpus import ALSO_VISIBLE, NO_DEVICE, VISIBLE, gpus_of_the_machine
from zerofit.tools.doctor.doctor_report import Finding, error, note, warning
from zerofit.tools.machine import Machine, inspect_machine

SHM = Path("/dev/shm")
SMALL_SHM = 512 * 2**20  # ds_report's limit
FULL_DISK = 2**30
NO_MEMORY_FREE = 0.9


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


@dataclass(frozen=True)
class Needs:
    """What a run asks of this machine. Sizes are in bytes; None: not known.

    Attributes:
        processes: on this machine.
        precision: None: nothing says.
        visible: devices that the launcher leaves to the run; None: all.
        state_bytes: weights, gradients and optimizer state of one process on its device.
        host_bytes: of all processes of this machine.
        checkpoint_bytes: of one checkpoint; None too where none is saved.
        examined: a run was looked at; else only the machine.
    """

    processes: int = 1
    num_machines: int = 1
    precision: str | None = None
    visible: int | None = None
    state_bytes: int | None = None
    host_bytes: int | None = None
    checkpoint_bytes: int | None = None
    examined: bool = True


def check_machine(machine: Installation, needs: Needs, variables: Mapping[str, str]) -> list[Finding]:
    """What is wrong.

    Args:
        variables: the environment of a process.
    """
    findings = [*_processes(machine, needs, variables), *_devices(machine, needs), *_memory(machine, needs)]
    return findings + (list(_disk(machine.output, needs)) if machine.output else [])


def _processes(machine: Installation, needs: Needs, variables: Mapping[str, str]) -> Iterator[Finding]:
    there, processes = len(machine.devices), counted(needs.processes, "process")
    for maker, count in machine.present.items():
        hiding = [name for name in (VISIBLE[maker], *ALSO_VISIBLE[maker]) if variables.get(name) in NO_DEVICE]
        if hiding and not there:
            what = f"{hiding[0]} = {variables[hiding[0]]!r} hides the machine's {counted(count, f'{maker} GPU')}"
            yield warning(f"{what}: a run is on the CPU. Type unset {hiding[0]}")
    if not there and needs.processes > machine.cores:
        remedy = f"Use --num_processes {machine.cores * needs.num_machines} or less"
        yield warning(f"{processes} oversubscribe {counted(machine.cores, 'core')}. {remedy}")
    usable = min(there, needs.visible) if needs.visible is not None else there
    remedy = f"Use --num_processes {usable * needs.num_machines}"
    if there and needs.examined and needs.processes > usable:
        yield error(f"{processes} on this machine, which has {counted(usable, 'device')}. {remedy}")
    if there and needs.examined and needs.processes < usable:
        yield note(f"this machine has {usable} devices, and the run uses {needs.processes}. {remedy} for all of them")


def _devices(machine: Installation, needs: Needs) -> Iterator[Finding]:
    without = sorted({device.name for device in machine.devices if device.has_bf16 is False})
    if needs.precision == "bf16" and without:
        what = f"precision = bf16: torch emulates it, slowly, on a {', a '.join(without)}"
        yield warning(f"{what}. Use --precision fp16")
    if needs.precision == "bf16" and machine.bf16_slowdown:
        what = f"precision = bf16: its products take {machine.bf16_slowdown:.0f} times as long as fp32 on this CPU"
        yield warning(f"{what}. Use --precision fp32")
    for number, device in enumerate(machine.devices):
        if device.free < NO_MEMORY_FREE * device.total:
            used = f"{size(device.total - device.free)} of {size(device.total)}"
            yield warning(f"device {number} ({device.name}): {used} are in use. See nvidia-smi or rocm-smi")
    largest = min((device.total for device in machine.devices), default=None)
    if needs.state_bytes and largest and needs.state_bytes > largest:
        what = f"weights, gradients and optimizer state take {size(needs.state_bytes)} of each device, which has"
        yield error(f"{what} {size(largest)}. See zerofit plan --gpu_memory SIZE for strategies that fit")


def _memory(machine: Installation, needs: Needs) -> Iterator[Finding]:
    if machine.shm is not None and machine.shm < SMALL_SHM and (machine.devices or needs.processes > 1):
        what = f"/dev/shm has {size(machine.shm)}: processes that exchange data through it may die with a bus error"
        yield warning(f"{what}. Start the container with --shm-size=1g or more")
    program = needs.processes * PROGRAM_BYTES
    total = program + (needs.host_bytes or 0)
    if not needs.examined or total <= machine.memory_free:
        return
    state = f", {size(needs.host_bytes)} for the state that they keep there" if needs.host_bytes else ""
    parts = f"the run takes about {size(total)} of host memory: {size(program)} for "
    parts += f"{counted(needs.processes, 'process')}{state}"
    if total > machine.memory:
        yield error(f"{parts}; this machine has {size(machine.memory)}. Use fewer processes, or offload less")
    else:
        yield warning(f"{parts}; {size(machine.memory_free)} are free now. End other programs")


def _disk(disk: Disk, needs: Needs) -> Iterator[Finding]:
    """The run's folder. Whether it can be written is told by the recipe's own check."""
    remedy = "Name another folder with --output_dir"
    if disk.free < FULL_DISK:
        yield warning(f"{disk.path}: only {size(disk.free)} free. {remedy}")
    elif needs.checkpoint_bytes and disk.free < 2 * needs.checkpoint_bytes:
        fits = disk.free >= needs.checkpoint_bytes
        what = f"{disk.path} has {size(disk.free)} free, and a checkpoint takes {size(needs.checkpoint_bytes)}"
        level = warning if fits else error
        yield level(f"{what}{': the second has no room' if fits else ''}. {remedy}")
    if needs.num_machines > 1 and not disk.shared:
        what = f"{disk.path} seems to be on a disk of this machine, one of {needs.num_machines}"
        yield warning(f"{what}. Name a folder on a file system that all machines share with --output_dir")
