"""The machine that a comparison runs on, and whether it can hold what is asked of it.

`python -m train.tools.compare.machine` prints what it is: asked for in a process of its own, since whoever looks at a
GPU through torch takes half a GiB of it for good.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.recipe.errors import UserError
from train.record.terminal import size

SHARE = 0.9  # of what is free
PROGRAM_BYTES = 400 * 2**20  # of one rank before it has a model, on a host
# What a process takes of a device beside what torch's allocator holds, and so beside its limit. A CUDA context begins
# at 287 MB and grows with every kernel that is loaded; with all of torch's it has 667 MB (pytorch/pytorch#86509).
CONTEXT_BYTES = {"cuda": 640 * 2**20}


@dataclass(frozen=True)
class Machine:
    """What there is. Sizes in bytes.

    Args:
        kind: of the devices: cuda, xpu, ...; cpu where there are none.
        devices: name, total and free memory of each.
        memory, available: of the host.
        environment: versions, commit and hardware, for the foot of the report.
    """

    kind: str
    devices: list[dict[str, Any]]
    memory: int
    available: int
    environment: dict[str, Any]

    @property
    def identity(self) -> dict[str, Any]:
        """What makes it another machine."""
        return {"devices": [[device["name"], device["total"]] for device in self.devices],
                "cpu": self.environment["hardware"].get("cpu"), "cores": self.environment["hardware"].get("cores"),
                "memory": self.memory, "packages": self.environment["packages"]}  # fmt: skip

    @property
    def settings(self) -> dict[str, str]:
        """Variables of trials, so that a CPU's memory tells what is in use, as a GPU's does.

        A GPU's allocator gives back what it hoards before it says that memory is out. The C library's gives back large
        blocks only if they are mapped one by one. And oneDNN keeps code and weights for every shape that it has met,
        which in a launch that tries many batch sizes are many.
        """
        if self.devices:
            return {}
        one_by_one = str(2**20)
        return {"MALLOC_MMAP_THRESHOLD_": one_by_one, "MALLOC_TRIM_THRESHOLD_": one_by_one,
                "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}  # fmt: skip

    def describe(self) -> str:
        """One line."""
        hardware = self.environment["hardware"]
        names = {device["name"] for device in self.devices}
        devices = [f"{sum(device['name'] == name for device in self.devices)} x {name}" for name in sorted(names)]
        cpu = f"{hardware.get('cores')} cores of {hardware.get('cpu') or 'a CPU'}, {size(self.memory)}"
        return ", ".join([*devices, cpu])


def look() -> Machine:
    """What this machine is.

    Raises:
        RuntimeError: torch cannot be asked.
    """
    root = Path(__file__).resolve().parents[3]
    asked = subprocess.run(
        [sys.executable, "-m", "train.tools.compare.machine"], capture_output=True, text=True, cwd=root
    )
    if asked.returncode:
        raise RuntimeError(f"the machine cannot be looked at:\n{asked.stderr}")
    return Machine(**json.loads(asked.stdout.splitlines()[-1]))


def _answer() -> None:
    import torch

    from train.record.run_folder import describe_environment
    from train.strategy.host_memory import host_memory

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    devices = []
    for index in range(torch.accelerator.device_count() if device.type != "cpu" else 0):
        free, total = torch.accelerator.get_memory_info(index)
        name = getattr(getattr(torch, device.type), "get_device_name", lambda index: device.type)(index)
        devices.append({"name": name, "total": total, "free": free})
    available, memory = host_memory()
    print(json.dumps({
        "kind": device.type, "devices": devices, "memory": memory, "available": available,
        "environment": describe_environment([], device),
    }))  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What each rank may have, in bytes; None: what there is. `notes` say what was chosen."""

    device: int | None
    host: int | None
    notes: list[str]


def settle_limits(machine: Machine, num_processes: int, device: int | None, host: int | None) -> Limits:
    """The limits of a rank.

    Args:
        device: of one rank, as asked for.
        host: of all ranks together, as asked for.

    Raises:
        UserError: the machine does not have what all ranks together may have.
    """
    if host is not None and host > machine.memory:
        raise UserError(f"host_memory_limit = {size(host)}: this machine has {size(machine.memory)}")
    share = None if host is None else host // num_processes
    if share is not None and share < PROGRAM_BYTES:
        raise UserError(
            f"host_memory_limit = {size(host)} for {num_processes} processes: a process takes about "
            f"{size(PROGRAM_BYTES)} before it has a model. Ask for more, or for fewer processes"
        )
    settle = _on_devices if machine.devices else _on_a_cpu
    limit, notes = settle(machine, num_processes, device)
    if not machine.devices and share is not None and share < limit:
        limit, notes = share, [f"memory_limit {size(share)}: a CPU has no other memory than host_memory_limit"]
    return Limits(limit, share, notes)


def _on_devices(machine: Machine, num_processes: int, wanted: int | None) -> tuple[int | None, list[str]]:
    ranks = -(-num_processes // len(machine.devices))
    total, context = min(device["total"] for device in machine.devices), CONTEXT_BYTES.get(machine.kind, 0)
    notes = [f"{device['name']} {index}: {size(device['total'] - device['free'])} are in use by others"
             for index, device in enumerate(machine.devices) if device["free"] < SHARE * device["total"]]  # fmt: skip
    if ranks * ((wanted or 0) + context) > total:
        raise UserError(_too_many(machine, num_processes, ranks, wanted, total, context))
    if ranks > 1:
        if wanted is None:
            wanted = int(SHARE * (total - ranks * context) / ranks)
            beside = f", and take about {size(context)} each beside it" if context else ""
            notes.append(f"memory_limit {size(wanted)}: {ranks} processes share a device of {size(total)}{beside}")
        notes.append("processes share a device: what they exchange goes over gloo, which is slower than NCCL")
    return wanted, notes


def _too_many(machine: Machine, num_processes: int, ranks: int, wanted: int | None, total: int, context: int) -> str:
    """Why so many processes with such a limit have no room on a device, and what would have."""
    each = " + ".join([*([f"memory_limit {size(wanted)}"] if wanted else []),
                       *([f"{size(context)} of context"] if context else [])])  # fmt: skip
    most = total // ((wanted or 0) + context) * len(machine.devices)
    remedies = [f"a memory_limit of at most {size(room)}"] if (room := total // ranks - context) > 0 else []
    remedies += [f"at most {most} processes"] if most else []
    return (
        f"num_processes = {num_processes} on {len(machine.devices)} {machine.kind} devices: {ranks} x ({each}) on one "
        f"that has {size(total)}. Use {', or '.join(remedies)}"
    )


def _on_a_cpu(machine: Machine, num_processes: int, wanted: int | None) -> tuple[int | None, list[str]]:
    if wanted is not None and num_processes * wanted > machine.memory:
        raise UserError(
            f"num_processes = {num_processes} and memory_limit = {size(wanted)}: together "
            f"{size(num_processes * wanted)}, and this machine has {size(machine.memory)}. Use a memory_limit of at "
            f"most {size(machine.memory // num_processes)}, or at most {machine.memory // wanted} processes"
        )
    if wanted is not None:
        return wanted, []
    wanted = int(SHARE * machine.available / num_processes)
    if wanted < PROGRAM_BYTES:
        raise UserError(
            f"num_processes = {num_processes}: {size(machine.available)} are free here, and a process takes about "
            f"{size(PROGRAM_BYTES)} before it has a model. Use at most "
            f"{int(SHARE * machine.available / PROGRAM_BYTES)} processes"
        )
    return wanted, [f"memory_limit {size(wanted)}: a fair share of what is free now. Name one, to find the same again"]


if __name__ == "__main__":
    _answer()
