"""The machine that a comparison runs on, and the memory limits that it allows.

`python -m zerofit.tools.compare.trial_machine` prints its description, as another process: one that uses a GPU through
torch takes half a GiB of it until it ends.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from zerofit.estimate.memory_constants import CUDA_CONTEXT_BYTES, PROGRAM_BYTES
from zerofit.recipe.errors import UserError
from zerofit.recipe.words import counted
from zerofit.record.environment import describe_environment
from zerofit.record.terminal import size
from zerofit.strategy.launch import SHARES_DEVICES
from zerofit.tools.machine import Device, Machine, inspect_machine

USABLE = 0.9  # part of a device's memory
SHARE = 0.75  # of the host's memory, for all processes together


@dataclass(frozen=True)
class TrialMachine(Machine):
    """The machine that trials run on.

    Attributes:
        environment: versions, commit and hardware, for the report's provenance.
        simulated: variables that put a launch on simulated devices; empty: its devices are real.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    simulated: dict[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, Any]:
        """What distinguishes it from other machines."""
        return {
            "devices": [[device.name, device.total] for device in self.devices],
            "cpu": self.environment["hardware"].get("cpu"),
            "cores": self.environment["hardware"].get("cores"),
            "memory": self.memory,
            "packages": self.environment["packages"],
            **{name: value for name, value in self.simulated.items() if name.startswith("SIMGPU_")},
        }

    @property
    def settings(self) -> dict[str, str]:
        """Environment variables of trials, so that a CPU's memory counts what is in use, as a GPU's does.

        A GPU's allocator releases its cache before it reports that memory is out. The C library gives back blocks that
        are mapped one by one; smaller ones stay in the heap, with its holes. From 64 KiB on, the heap holds next to no
        tensors. And oneDNN keeps code and weights for every shape that it has seen: a launch that tries many batch
        sizes has many shapes.
        """
        if self.devices:
            return {}
        one_by_one = str(2**16)
        return {
            "MALLOC_MMAP_THRESHOLD_": one_by_one,
            "MALLOC_TRIM_THRESHOLD_": one_by_one,
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
        }

    def describe(self) -> str:
        """One line."""
        hardware = self.environment["hardware"]
        names = {device.name for device in self.devices}
        devices = [f"{sum(device.name == name for device in self.devices)} x {name}" for name in sorted(names)]
        cpu = f"{hardware.get('cores')} cores of {hardware.get('cpu') or 'a CPU'}, {size(self.memory)}"
        return ", ".join([*devices, cpu])


def launch_environment(machine: TrialMachine, num_processes: int) -> dict[str, str]:
    """Environment variables of a launch: the machine's settings, and that processes may share its devices where it has
    fewer."""
    shares = 0 < len(machine.devices) < num_processes
    return machine.settings | machine.simulated | ({SHARES_DEVICES: "1"} if shares else {})


def inspect_trial_machine(simulated: dict[str, str] | None = None) -> TrialMachine:
    """The machine that this runs on.

    Args:
        simulated: variables that put a process on simulated devices.

    Raises:
        RuntimeError: torch cannot be used.
    """
    root = Path(__file__).resolve().parents[3]
    finished = subprocess.run(
        [sys.executable, "-m", "zerofit.tools.compare.trial_machine"],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, **(simulated or {})},
    )
    if finished.returncode:
        raise RuntimeError(f"the description of the machine failed:\n{finished.stderr}")
    found = json.loads(finished.stdout.splitlines()[-1])
    devices = tuple(Device(**device) for device in found.pop("devices"))
    return TrialMachine(devices=devices, **found, simulated=simulated or {})


def _print_description() -> None:
    machine = inspect_machine()
    print(json.dumps({**asdict(machine), "environment": describe_environment([], torch.device(machine.kind))}))


@dataclass(frozen=True)
class Limits:
    """Bytes that each rank may use; None: all of it. `notes` say what was chosen."""

    device: int | None
    host: int | None
    notes: list[str]


def choose_limits(machine: TrialMachine, num_processes: int, device: int | None, host: int | None) -> Limits:
    """The limits of a rank.

    Args:
        device: of one rank, from the options.
        host: of all ranks together, from the options.

    Raises:
        UserError: the machine has less than all ranks together may use.
    """
    if host is not None and host > machine.memory:
        raise UserError(f"host_memory_limit = {size(host)}: this machine has {size(machine.memory)}")
    host_each = None if host is None else host // num_processes
    if host_each is not None and host_each < PROGRAM_BYTES:
        raise UserError(
            f"host_memory_limit = {size(host)} for {num_processes} processes: a process takes about "
            f"{size(PROGRAM_BYTES)} before it has a model. Set a larger --host_memory_limit, or fewer processes"
        )
    choose = _limit_on_devices if machine.devices else _limit_on_cpu
    limit, notes = choose(machine, num_processes, device)
    if not machine.devices and host_each is not None and host_each < limit:
        limit = host_each
        notes = [f"memory_limit {size(limit)}: on a CPU this is the host_memory_limit of each process"]
    return Limits(limit, host_each, notes)


def _limit_on_devices(machine: TrialMachine, num_processes: int, limit: int | None) -> tuple[int | None, list[str]]:
    ranks = -(-num_processes // len(machine.devices))
    total, context = (
        min(device.total for device in machine.devices),
        CUDA_CONTEXT_BYTES if machine.kind == "cuda" else 0,
    )
    notes = [
        f"{device.name} {index}: {size(device.total - device.free)} are in use by other programs"
        for index, device in enumerate(machine.devices)
        if device.free < USABLE * device.total
    ]
    if ranks * ((limit or 0) + context) > total:
        needed = " and ".join(
            [f"{size(part)} of {what}" for part, what in ((limit, "limit"), (context, "context")) if part]
        )
        room = total // ((limit or 0) + context) * len(machine.devices)
        raise UserError(
            f"num_processes = {num_processes} on {counted(len(machine.devices), 'device')}: {ranks} share one of "
            f"{size(total)}, and each needs {needed}. Use --num_processes {max(1, room)}, or a smaller --memory_limit"
        )
    if ranks > 1:
        if limit is None:
            limit = int(USABLE * (total - ranks * context) / ranks)
            more = f", and take about {size(context)} each in addition" if context else ""
            notes.append(f"memory_limit {size(limit)}: {ranks} processes share a device of {size(total)}{more}")
        notes.append("processes share a device: what they exchange goes over gloo, which is slower than NCCL")
    return limit, notes


def _limit_on_cpu(machine: TrialMachine, num_processes: int, limit: int | None) -> tuple[int | None, list[str]]:
    if limit is not None and num_processes * limit > machine.memory:
        raise UserError(
            f"memory_limit = {size(limit)} of {num_processes} processes: this machine has {size(machine.memory)}. Use "
            f"--memory_limit {machine.memory // num_processes // 2**20}MiB"
        )
    if limit is not None:
        return limit, []
    limit = int(SHARE * machine.memory / num_processes)
    if limit < PROGRAM_BYTES:
        raise UserError(
            f"num_processes = {num_processes}: this machine has {size(machine.memory)}, and a process takes about "
            f"{size(PROGRAM_BYTES)} before it has a model. Use --num_processes "
            f"{int(SHARE * machine.memory / PROGRAM_BYTES)}"
        )
    return limit, [f"memory_limit {size(limit)}: {SHARE:.0%} of this machine's memory, in equal parts"]


if __name__ == "__main__":
    _print_description()
