"""Optimizer state on a disk (ZeRO-3, DeepSpeed's `device: nvme`): the folder of a process, and what lies there,
of which DeepSpeed brings one sub-group at a time."""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from zerofit.compat.deepspeed import step_sub_group, swapped_in
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import open_without_links
from zerofit.strategy.state import Shard, ShardedState

PREFIX = "zerofit-"
SAVED = "saved.bin"
_LOCKS: list[int] = []  # file descriptors, open as long as this process lives


def check_async_io() -> None:
    """Raises UserError where DeepSpeed cannot build what reads and writes an NVMe disk."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not installed_ops.get("async_io") and not AsyncIOBuilder().is_compatible(verbose=False):
        raise UserError(
            'zero_optimization.offload_optimizer.device = "nvme": DeepSpeed compiles async_io against libaio, whose '
            "headers are not here. Install them (apt install libaio-dev), or use --strategy zero3_offload"
        )


def own_folder(below: str) -> Path:
    """A new folder of this process; those of processes that were killed are removed. DeepSpeed names its files after
    parameters and ranks alone: two runs in one folder would read each other's state. A process holds a lock beside its
    folder, which the system drops when it ends, however it ends. On a file system without locks nothing is removed."""
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


def remove_disk_folder(folder: Path) -> None:
    """Remove such a folder, and its lock."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".lock").unlink(missing_ok=True)


class DiskState(ShardedState):
    """The state of ZeRO-3's optimizer on a disk, of which DeepSpeed has one sub-group in memory at a time. `folder`:
    of this process, on the disk. What a checkpoint is written from lies in a file there, not in memory."""

    def __init__(self, engine: Any, folder: Path) -> None:
        super().__init__(engine)
        self.folder = folder

    @property
    def _zero(self) -> Any:
        return self.engine.engine.optimizer

    def tensors(self) -> dict[str, torch.Tensor]:
        shards = self.own()
        size = len(self.kinds) * sum(shard.stop - shard.start for shard in shards)
        file = self.folder / SAVED
        file.unlink(missing_ok=True)  # a save under way keeps what it has
        room = torch.from_file(str(file), shared=True, size=size) if size else torch.empty(0)
        saved, start = {}, 0
        for shard in self._in_memory(shards):
            for kind in self.kinds:
                values = self.get(kind, shard)
                saved[f"{kind}/{shard.name}"] = room[start : start + len(values)].copy_(values)
                start += len(values)
        return saved

    def _step(self) -> None:
        for number, flat in enumerate(self._zero.fp32_partitioned_groups_flat):
            with swapped_in(self._zero, number, written=True):
                flat.grad = torch.zeros_like(flat)
                step_sub_group(self._zero, number)

    def _in_memory(self, shards: list[Shard], written: bool = False) -> Iterator[Shard]:
        def number(shard: Shard) -> int:
            return self._zero.grad_position[self._zero.get_param_id(self.parameters[shard.name])][0]

        for key, several in groupby(sorted(shards, key=number), number):
            with swapped_in(self._zero, key, written):
                yield from several
