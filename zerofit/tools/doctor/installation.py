"""What a run finds on this machine: devices, tools, memory, folders. Tests make machines up."""

import contextlib
import io
import os
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zerofit.recipe.errors import first_line
from zerofit.recipe.files import is_shared
from zerofit.recipe.paths import cannot_be_written
from zerofit.recipe.words import counted
from zerofit.record.terminal import size
from zerofit.strategy.build_locks import abandoned_locks, extensions_folder
from zerofit.strategy.gpus import gpus_of_the_machine
from zerofit.tools.machine import Machine, inspect_machine

# {operation of DeepSpeed: the class of its builder}
BUILDERS = {"cpu_adam": "CPUAdamBuilder", "fused_adam": "FusedAdamBuilder", "async_io": "AsyncIOBuilder"}
INSTALLED, COMPILED, TO_COMPILE, IMPOSSIBLE = "installed", "compiled", "to compile", "not for this machine"
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
        compiler: the C++ compiler; None: it is not found.
        cuda_toolkit: its version, or why it cannot be used; empty where torch is built without CUDA.
        operations: {operation of DeepSpeed: how it comes here}.
        locks: of builds that were killed.
        accelerate: what `accelerate env` says.
    """

    shm: int | None = None
    torch: str = ""
    built_for: str = ""
    present: dict[str, int] = field(default_factory=dict)
    driver: str = ""
    compiler: str | None = None
    ninja: str | None = None
    cuda_toolkit: str = ""
    operations: dict[str, str] = field(default_factory=dict)
    deepspeed_problem: str | None = None
    folders: tuple[Folder, ...] = ()
    locks: tuple[str, ...] = ()
    accelerate: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> list[tuple[str, str]]:
        """(what, in words) for a screen."""
        bf16 = {True: ", bf16", False: ", no bf16", None: ""}
        devices = [f"{one.name}, {size(one.free)} free of {size(one.total)}{bf16[one.has_bf16]}"
                   for one in self.devices]  # fmt: skip
        tools = [f"C++ {self.compiler or 'not found'}", f"ninja {self.ninja or 'not found'}"]
        tools += [f"CUDA toolkit {self.cuda_toolkit}"] if self.cuda_toolkit else []
        lines = [
            ("devices", "; ".join(devices) or f"no accelerator, {counted(self.cores, 'core')}"),
            ("torch", f"{self.torch}, built for {self.built_for}"
             + (f", driver {self.driver}" if self.driver else "")),
            ("memory", f"{size(self.memory_free)} free of {size(self.memory)}"
             + (f"; /dev/shm {size(self.shm)}" if self.shm is not None else "")),
            ("compilers", "; ".join(tools)),
            ("DeepSpeed", "; ".join(f"{name} {how}" for name, how in self.operations.items())),
            *((folder.what, f"{folder.path}: {size(folder.free)} free" + ", shared" * folder.shared)
              for folder in self.folders),
        ]  # fmt: skip
        return [(what, text) for what, text in lines if text]


def inspect_installation(folders: Mapping[tuple[str, str], Path], looks_at_deepspeed: bool) -> Installation:
    """This machine.

    Args:
        folders: {(what it is for, what sets it): folder}.
        looks_at_deepspeed: its operations are looked at, which takes some seconds.
    """
    operations, problem, toolkit = {}, None, ""
    if looks_at_deepspeed:
        operations, toolkit, problem = _of_deepspeed()
    compiler = shutil.which(os.environ.get("CXX", "c++").split()[0])
    with contextlib.suppress(ImportError):
        from torch.utils.cpp_extension import get_cxx_compiler

        compiler = shutil.which(get_cxx_compiler().split()[0])
    return Installation(
        **vars(inspect_machine()),
        shm=shutil.disk_usage(SHM).total if SHM.is_dir() else None,
        torch=torch.__version__,
        built_for=built_for(),
        present=gpus_of_the_machine(),
        driver=_driver(),
        compiler=compiler,
        ninja=shutil.which("ninja"),
        cuda_toolkit=toolkit,
        operations=operations,
        deepspeed_problem=problem,
        folders=tuple(_folder(*name, path) for name, path in folders.items()),
        locks=tuple(lock for lock in abandoned_locks() if Path(lock).parent.name in BUILDERS),
        accelerate=_of_accelerate(),
    )


def built_for() -> str:
    """What torch's build serves beside the CPU."""
    versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    return next((f"{name} {found}" for name, found in versions.items() if found), "the CPU alone")


def _driver() -> str:
    """The version of NVIDIA's driver; empty where there is none."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
        return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""
    return ""


def _of_deepspeed() -> tuple[dict[str, str], str, str | None]:
    """({operation: how it comes here}, the CUDA toolkit, why DeepSpeed cannot be imported), as ds_report has them."""
    from zerofit.strategy.launch import tell_deepspeed_of_a_cpu

    tell_deepspeed_of_a_cpu()
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            from deepspeed.accelerator import get_accelerator
            from deepspeed.env_report import accelerator_name, installed_ops, nvcc_version, probe_is_compatible
        except Exception as error:  # a CUDA build that does not fit raises errors of its own
            return {}, "", f"{type(error).__name__}: {first_line(error)}"
        accelerator, operations = get_accelerator(), {}
        for name, builder_class in BUILDERS.items():
            builder = accelerator.create_op_builder(builder_class)
            if builder is None or type(builder).__name__ == "NotImplementedBuilder":
                continue
            if installed_ops.get(name) and accelerator_name == accelerator._name:
                operations[name] = INSTALLED
            elif not probe_is_compatible(builder):
                operations[name] = IMPOSSIBLE
            else:
                operations[name] = COMPILED if _is_compiled(name) else TO_COMPILE
        toolkit = nvcc_version() if torch.version.cuda else ""
    return operations, "not found" if "[FAIL]" in toolkit else toolkit, None


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


def _of_accelerate() -> dict[str, Any]:
    """What `accelerate env` says of versions and devices."""
    from accelerate.commands.env import env_command

    with contextlib.redirect_stdout(io.StringIO()):
        try:
            of_accelerate = env_command(Namespace(config_file=None))
        except Exception as error:  # its default configuration cannot be read, say
            return {"error": first_line(error)}
    return {name.replace("`", ""): value for name, value in of_accelerate.items()}
