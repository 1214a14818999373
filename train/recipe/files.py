"""Files that several processes or machines write and read."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# File systems that other machines may see as well (psutil's fstype begins with one of these).
SHARED = ("nfs", "lustre", "cifs", "smb", "beegfs", "gpfs", "ceph", "fuse", "9p", "afs", "glusterfs", "wekafs")
# NFS may cache that a file is absent for 60 s (nfs(5): acdirmax); with a margin.
SECONDS_TO_APPEAR = 90.0


def is_shared(folder: Path) -> bool:
    """Whether other machines may see this folder."""
    import psutil

    folder = folder.resolve()
    around = [disk for disk in psutil.disk_partitions(all=True) if folder.is_relative_to(disk.mountpoint)]
    kind = max(around, key=lambda disk: len(disk.mountpoint)).fstype if around else ""
    return kind.startswith(SHARED)


def is_there(path: Path) -> bool:
    """Whether a file or folder exists, also on a network file system.

    A network file system may cache for a while that a name is absent; listing the folder asks the server again.
    """
    try:
        return path.name in os.listdir(path.parent)
    except OSError:
        return False


def appears(look: Callable[[], bool], seconds: float = SECONDS_TO_APPEAR) -> bool:
    """Wait until `look` is true: a file of another machine may appear late. Returns False after `seconds`."""
    until = time.monotonic() + seconds
    while not look():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def without_folders(value: Any) -> Any:
    """An option's value to publish: absolute paths, alone or in a list, are reduced to their last name."""
    if isinstance(value, (list, tuple)):
        return [without_folders(one) for one in value]
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value


def put_in_place(partial: Path, folder: Path) -> None:
    """Rename a finished folder. If another machine was first, keep its folder, which has the same content."""
    try:
        partial.rename(folder)
    except OSError:
        if not is_there(folder):
            raise
        shutil.rmtree(partial, ignore_errors=True)
