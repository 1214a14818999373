"""The environment of a run (versions, commit, hardware, command, variables) for environment.json, and the packages
whose version was not tried. Only `describe_environment` imports torch."""

import contextlib
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from packaging.requirements import Requirement

from zerofit import __version__
from zerofit.strategy.host_memory import cpu_model
from zerofit.strategy.launch import find_launcher

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "torch",
    "accelerate",
    "deepspeed",
    "transformers",
    "datasets",
    "tokenizers",
    "peft",
    "megatron-core",
    "evaluate",
    "scikit-learn",
    "sacrebleu",
    "numpy",
)
# Names, or prefixes, of the environment variables that configure network, memory and threads.
SETTINGS = tuple(
    (
        "NCCL_ RCCL_ TORCH_NCCL_ TORCH_DISTRIBUTED_DEBUG GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME UCX_ FI_ "
        "CUDA_DEVICE_MAX_CONNECTIONS CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING HIP_VISIBLE_DEVICES "
        "ROCR_VISIBLE_DEVICES PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF PYTORCH_ALLOC_CONF OMP_ MKL_NUM_THREADS "
        "KMP_ MALLOC_ TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    ).split()
)


class Timeline:
    """The seconds of the phases of a start; each phase ends where the next begins."""

    def __init__(self) -> None:
        self.started = psutil.Process().create_time()
        self.seconds: dict[str, float] = {}
        launcher = find_launcher()
        if launcher is not None:
            self.seconds["launcher"] = round(self.started - launcher.started, 2)
        self._last = self.started

    def mark(self, phase: str) -> None:
        """Record the end of a start-up phase, and how long it took."""
        now = time.time()
        self.seconds[phase] = round(self.seconds.get(phase, 0.0) + now - self._last, 2)
        self._last = now


def describe_environment(command: list[str], device: "torch.device") -> dict[str, Any]:
    """Return the content of environment.json: versions, commit, hardware and command of this run."""
    import torch

    from zerofit.strategy.devices import device_name

    packages: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    hardware: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    if device.type != "cpu":
        versions = {"cuda": torch.version.cuda, "rocm": torch.version.hip, "xpu": getattr(torch.version, "xpu", None)}
        all_devices = (torch.device(device.type, index) for index in range(torch.accelerator.device_count()))
        hardware["gpus"] = [device_name(gpu) for gpu in all_devices]
        hardware |= {name: version for name, version in versions.items() if version}
    return {
        "command": command or sys.argv,
        "arguments": sys.argv,
        "zerofit_commit": _git("rev-parse", "HEAD"),
        "zerofit_changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "hardware": hardware,
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(SETTINGS)},
    }


def untried_versions() -> list[str]:
    """Return one line on the installed packages whose version is outside the bounds of zerofit's metadata; none if all
    are within them, or if zerofit is not installed. Packages of an extra do not count."""
    outside: list[Requirement] = []
    with contextlib.suppress(PackageNotFoundError):
        for requirement in map(Requirement, requires("zerofit") or ()):
            if requirement.marker is None and requirement.specifier:
                with contextlib.suppress(PackageNotFoundError):  # its import reports that
                    if not requirement.specifier.contains(version(requirement.name), prereleases=True):
                        outside.append(requirement)
    if not outside:
        return []
    installed = ", ".join(f"{package.name} {version(package.name)}" for package in outside)
    remedy = " ".join(f"'{package}'" for package in outside)
    return [f"zerofit {__version__} was not tried with {installed}: pip install {remedy}"]


def _git(*words: str) -> str | None:
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
