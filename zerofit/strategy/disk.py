"""Optimizer state on a disk (DeepSpeed's `device: nvme`): what is refused, and the folder of a process."""

import fcntl
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerofit.recipe.errors import UserError
from zerofit.recipe.files import is_shared, open_without_links

PREFIX = "zerofit-"
_LOCKS: list[int] = []  # file descriptors, open as long as this process lives


def look_at_disk(zero: dict[str, Any]) -> list[str]:
    """The problems of a zero_optimization section that puts something on disk."""
    problems = []
    weights, optimizer = (zero.get(part) for part in ("offload_param", "offload_optimizer"))
    if isinstance(weights, dict) and weights.get("device") == "nvme":
        problems.append(
            'zero_optimization.offload_param.device = "nvme" is not supported: a resumed run could not restore '
            'weights that are not in memory. Write "cpu"'
        )
    if not isinstance(optimizer, dict) or optimizer.get("device") != "nvme":
        return problems
    if not optimizer.get("nvme_path"):
        problems.append("zero_optimization.offload_optimizer.nvme_path is missing: name a folder of a fast local disk")
    if zero.get("stage") != 3:
        problems.append(
            f'zero_optimization.offload_optimizer.device = "nvme" under stage {zero.get("stage")}: DeepSpeed has it '
            'under stage 3 alone. Use ds_configs/zero3_offload_nvme.json, or write "cpu"'
        )
    for setting in ("pipeline_read", "pipeline_write"):
        if optimizer.get(setting):
            problems.append(
                f"zero_optimization.offload_optimizer.{setting} = true: checkpoints read the state group by group, "
                "which DeepSpeed's pipelined swapper has not been tried with. Remove it"
            )
    return problems


def keeps_optimizer_on_disk(zero: dict[str, Any]) -> bool:
    """Whether a resolved zero_optimization section does."""
    return (zero.get("offload_optimizer") or {}).get("device") == "nvme"


def shared_disk_note(zero: dict[str, Any]) -> str | None:
    """Of a resolved zero_optimization section whose optimizer is on a file system of several machines."""
    path = keeps_optimizer_on_disk(zero) and zero["offload_optimizer"]["nvme_path"]
    if not path or not is_shared(Path(path).expanduser()):
        return None
    return (
        f"zero_optimization.offload_optimizer.nvme_path = {path!r} is on a file system that other machines share, and "
        "each update reads and writes 32 bytes a parameter there. Name a folder of a disk of the machine itself"
    )


def check_async_io() -> None:
    """Before a model is loaded.

    Raises:
        UserError: DeepSpeed cannot compile what reads and writes the disk.
    """
    import torch
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import CUDA_HOME

    device, instead = (
        'zero_optimization.offload_optimizer.device = "nvme": DeepSpeed',
        "or use --strategy zero3_offload",
    )
    if installed_ops.get("async_io"):
        return
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise UserError(
            f"{device} compiles async_io against libaio, whose headers are not here. Install them (apt install "
            f"libaio-dev), {instead}"
        )
    if torch.version.cuda and torch.cuda.is_available() and CUDA_HOME is None:  # it joins paths to it
        raise UserError(
            f"{device} compiles async_io against a CUDA toolkit, and CUDA_HOME names none. Install CUDA "
            f"{torch.version.cuda} and set CUDA_HOME, {instead}"
        )


def own_folder(below: str) -> Path:
    """A new folder of this process; those of processes that were killed are removed.

    DeepSpeed names its files after parameters and ranks alone: two runs in one folder would read each other's state.
    A process holds a lock beside its folder, which the system drops when it ends, however it ends. On a file system
    without locks nothing is removed.
    """
    base = Path(below).expanduser().resolve()
    base.mkdir(parents=True, exist_ok=True)
    for lock in base.glob(f"{PREFIX}*.lock"):
        with suppress(OSError), open(lock, "a", opener=open_without_links) as file:  # it is held, or not ours
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(dir=base, prefix=PREFIX, suffix=".partial")
    with suppress(OSError):  # some network file systems have none
        fcntl.flock(handle, fcntl.LOCK_EX)  # before others see it as a lock
    _LOCKS.append(handle)
    folder = Path(name).rename(Path(name).with_suffix(".lock")).with_suffix("")
    folder.mkdir()
    return folder


def remove(folder: Path) -> None:
    """Remove such a folder, and its lock."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".lock").unlink(missing_ok=True)
