"""What a run finds on this machine: devices, tools, memory, folders. Tests make machines up."""

import contextlib
import io
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.cpp_extension import CUDA_HOME, get_cxx_compiler

from zerofit.recipe.errors import first_line
from zerofit.recipe.files import is_shared
from zerofit.recipe.paths import cannot_be_written
from zerofit.recipe.words import counted
from zerofit.record.terminal import size
from zerofit.strategy.build_locks import extensions_folder
from zerofit.strategy.gpus import gpus_of_the_machine
from zerofit.strategy.launch import tell_deepspeed_of_a_cpu
from zerofit.tools.machine import Machine, inspect_machine

# {operation of DeepSpeed: the class of its builder}
BUILDERS = {"cpu_adam": "CPUAdamBuilder", "fused_adam": "FusedAdamBuilder", "async_io": "AsyncIOBuilder"}
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Folder:
    """A folder into which a run writes.

    Attributes:
        option: what sets it.
        problem: why it cannot be written; None: it can.
        shared: other machines may see it.
    """

    what: str
    option: str
    path: str
    free: int
    total: int
    shared: bool = False
    problem: str | None = None


@dataclass(frozen=True)
class Installation(Machine):
    """A machine, and what is installed on it. Sizes are in bytes.

    Attributes:
        present: {maker: GPUs that the operating system has}, whether or not torch sees them.
        shm: of /dev/shm; None: there is none.
        operations: {operation of DeepSpeed that is not compiled yet: what its build lacks}.
    """

    shm: int | None = None
    torch: str = ""
    built_for: str = ""
    present: dict[str, int] = field(default_factory=dict)
    operations: dict[str, list[str]] = field(default_factory=dict)
    deepspeed_problem: str | None = None
    folders: tuple[Folder, ...] = ()

    def lines(self) -> list[tuple[str, str]]:
        """(what, in words) for a screen."""
        devices = [f"{device.name}, {size(device.free)} free of {size(device.total)}" for device in self.devices]
        shm = f"; /dev/shm {size(self.shm)}" if self.shm is not None else ""
        lines = [
            ("devices", "; ".join(devices) or f"no accelerator, {counted(self.cores, 'core')}"),
            ("torch", f"{self.torch}, built for {self.built_for}"),
            ("memory", f"{size(self.memory_free)} free of {size(self.memory)}{shm}"),
        ]
        for folder in self.folders:
            lines.append((folder.what, f"{folder.path}: {size(folder.free)} free{', shared' * folder.shared}"))
        return lines


def inspect_installation(folders: Mapping[tuple[str, str], Path], operations: tuple[str, ...] | None) -> Installation:
    """This machine.

    Args:
        folders: {(what it is for, what sets it): folder}.
        operations: of DeepSpeed, to be looked at, which takes some seconds; None: DeepSpeed is not needed.
    """
    lacking, problem = ({}, None) if operations is None else _of_deepspeed(operations)
    return Installation(
        **vars(inspect_machine()),
        shm=shutil.disk_usage(SHM).total if SHM.is_dir() else None,
        torch=torch.__version__,
        built_for=built_for(),
        present=gpus_of_the_machine(),
        operations=lacking,
        deepspeed_problem=problem,
        folders=tuple(_folder(*name, path) for name, path in folders.items()),
    )


def built_for() -> str:
    """What torch's build serves beside the CPU."""
    versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    return next((f"{name} {found}" for name, found in versions.items() if found), "the CPU alone")


def _of_deepspeed(operations: tuple[str, ...]) -> tuple[dict[str, list[str]], str | None]:
    """({operation: what its build lacks}, why DeepSpeed cannot be imported), as ds_report has them."""
    tell_deepspeed_of_a_cpu()
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            from deepspeed.accelerator import get_accelerator  # this may fail, which is a finding
            from deepspeed.env_report import accelerator_name, installed_ops, probe_is_compatible
        except Exception as error:  # a CUDA build that does not fit raises errors of its own
            return {}, f"{type(error).__name__}: {first_line(error)}"
        accelerator, lacking = get_accelerator(), {}
        for name in operations:
            installed = installed_ops.get(name) and accelerator_name == accelerator._name
            if not installed and not _is_compiled(name):
                builder = accelerator.create_op_builder(BUILDERS[name])
                lacking[name] = _missing_tools(name)
                lacking[name] += [] if probe_is_compatible(builder) else ["ds_report says it is not compatible"]
    return lacking, None


def _missing_tools(operation: str) -> list[str]:
    tools = {"ninja": shutil.which("ninja"), "a C++ compiler": shutil.which(get_cxx_compiler().split()[0])}
    if torch.version.cuda and operation != "cpu_adam":
        tools["a CUDA toolkit (CUDA_HOME)"] = CUDA_HOME
    return [f"there is no {name}" for name, found in tools.items() if not found]


def _is_compiled(name: str) -> bool:
    root = Path(extensions_folder())
    return any(
        file.is_file() for pattern in (f"{name}/{name}.so", f"*/{name}/{name}.so") for file in root.glob(pattern)
    )


def _folder(what: str, option: str, path: Path) -> Folder:
    path = path.expanduser().absolute()
    place = next(place for place in (path, *path.parents) if place.exists())
    usage = shutil.disk_usage(place)
    return Folder(what, option, str(path), usage.free, usage.total, is_shared(place), cannot_be_written(path))
