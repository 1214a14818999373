"""Files that several processes, and several machines, make and look for."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# File systems that other machines may see as well (psutil's fstype begins with one of these).
SHARED = ("nfs", "lustre", "cifs", "smb", "beegfs", "gpfs", "ceph", "fuse", "9p", "afs", "glusterfs", "wekafs")
# NFS may not ask the server for this long whether a file is there (nfs(5): acdirmax is 60 s), and then some.
SECONDS_TO_APPEAR = 90.0


def is_shared(folder: Path) -> bool:
    """Whether other machines may see this folder."""
    import psutil

    folder = folder.resolve()
    around = [disk for disk in psutil.disk_partitions(all=True) if folder.is_relative_to(disk.mountpoint)]
    kind = max(around, key=lambda disk: len(disk.mountpoint)).fstype if around else ""
    return kind.startswith(SHARED)


def is_there(path: Path) -> bool:
    """Whether a file or folder is there; unlike `path.exists()`, not by what this machine remembers of it.

    A network file system keeps in mind for a while that a name was absent; listing the folder asks anew.
    """
    try:
        return path.name in os.listdir(path.parent)
    except OSError:
        return False


def appears(look: Callable[[], bool], seconds: float = SECONDS_TO_APPEAR) -> bool:
    """Whether `look` comes true within this time: what another machine has written may take a while to be seen."""
    until = time.monotonic() + seconds
    while not look():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def without_folders(value: Any) -> Any:
    """An option's value as others may see it: of absolute paths in it, alone or in a list, the last name is left."""
    if isinstance(value, (list, tuple)):
        return [without_folders(one) for one in value]
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value


def put_in_place(partial: Path, folder: Path) -> None:
    """Give a finished folder its name. Where another machine was first, its folder, which holds the same, stays."""
    try:
        partial.rename(folder)
    except OSError:
        if not is_there(folder):
            raise
        shutil.rmtree(partial, ignore_errors=True)
