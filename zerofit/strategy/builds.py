"""Builds of torch extensions, which DeepSpeed's operations are: their folders, and locks that a killed build has left.

torch holds `lock` in the extension's folder open while it builds, and every other process that needs the extension
waits until the file is gone, without a limit. A build that was killed leaves the file behind, and then all wait for
ever (torch/utils/cpp_extension.py and file_baton.py, torch 2.13).
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
    """The folder of compiled extensions, as torch.utils.cpp_extension.get_default_build_root has it."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")


def describe_build(extension: str) -> str | None:
    """A note where DeepSpeed will compile an extension when it first uses it; None where it is there already."""
    from deepspeed.git_version_info import installed_ops

    if installed_ops.get(extension) or glob.glob(os.path.join(extensions_folder(), "*", extension, f"{extension}.so")):
        return None
    return f"DeepSpeed's {extension} is being compiled, once for this machine: up to two minutes"


def lock_files() -> list[str]:
    """The lock files of all extensions of this user."""
    patterns = (("*", "lock"), ("*", "*", "lock"))
    return [path for pattern in patterns for path in sorted(glob.glob(os.path.join(extensions_folder(), *pattern)))]


def drop_abandoned_locks() -> list[str]:
    """Remove the locks that no process holds open, and return their paths. Where other machines see the file system
    nothing is removed. Another run may do the same and begin to build: the lock that it makes is another file."""
    made = {path: os.stat(path).st_mtime for path in map(os.path.realpath, lock_files()) if os.path.exists(path)}
    if not made or is_shared(Path(extensions_folder())):
        return []
    held = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            held |= {file.path for file in process.open_files()}
    dropped = []
    for lock in made.keys() - held:
        with suppress(FileNotFoundError):
            if os.stat(lock).st_mtime == made[lock]:
                os.unlink(lock)
                dropped.append(lock)
    return dropped


def check_compiled_code() -> None:
    """Raises UserError where others may write to a folder in which torch, DeepSpeed and Triton find compiled code, and
    run it."""
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
