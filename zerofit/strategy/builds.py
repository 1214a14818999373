"""Builds of torch extensions, such as DeepSpeed's operations: their folders, and the locks of killed builds.

While torch builds an extension it holds the file `lock` in its folder open, and other processes wait until the file is
removed. A build that was killed leaves the file, and they hang (torch/utils/cpp_extension.py, file_baton.py, 2.13).
"""

import getpass
import glob
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from zerofit.recipe.errors import UserError
from zerofit.recipe.files import is_shared
from zerofit.recipe.paths import untrusted_folder_reason


def extensions_folder() -> str:
    """Return the folder of compiled extensions, as torch.utils.cpp_extension.get_default_build_root does."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")


def describe_build(extension: str) -> str | None:
    """Return a note if DeepSpeed will compile an extension at its first use; None if it is compiled already."""
    from deepspeed.git_version_info import installed_ops

    if installed_ops.get(extension) or glob.glob(os.path.join(extensions_folder(), "*", extension, f"{extension}.so")):
        return None
    return f"DeepSpeed's {extension} is being compiled, once for this machine: up to two minutes"


def lock_files() -> list[str]:
    """Return the lock files of all extensions of this user."""
    patterns = (("*", "lock"), ("*", "*", "lock"))
    return [path for pattern in patterns for path in sorted(glob.glob(os.path.join(extensions_folder(), *pattern)))]


def drop_abandoned_locks() -> list[str]:
    """Remove the locks that no process holds open, and return their paths. On a shared file system nothing is removed.
    If another run does the same and begins to build, its lock is a new file, and is kept."""
    times = {path: os.stat(path).st_mtime for path in map(os.path.realpath, lock_files()) if os.path.exists(path)}
    if not times or is_shared(Path(extensions_folder())):
        return []
    open_files = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            open_files |= {file.path for file in process.open_files()}
    dropped = []
    for lock in times.keys() - open_files:
        with suppress(FileNotFoundError):
            if os.stat(lock).st_mtime == times[lock]:
                os.unlink(lock)
                dropped.append(lock)
    return dropped


def check_compiled_code() -> None:
    """Raises UserError where other users can write to a folder from which torch, DeepSpeed or Triton run compiled
    code."""
    triton = os.path.join(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache")
    user = "unknown"
    with suppress(KeyError, OSError):  # in a container a user may have no name
        user = getpass.getuser()
    inductor = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")  # torch/_inductor/runtime
    folders = {
        "TORCH_EXTENSIONS_DIR": extensions_folder(),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or inductor,
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR") or triton,
    }
    problems = [
        f"{name}: {folder} {why} and holds compiled code, which would be run. Set {name} to a folder of your own, "
        "which only you can write to"
        for name, folder in folders.items()
        if (why := untrusted_folder_reason(Path(folder)))
    ]
    if problems:
        raise UserError(problems)
