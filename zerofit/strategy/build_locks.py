"""Locks of torch's extension builds that a killed build has left.

torch holds `lock` in the extension's folder open while it builds, and every other process that needs the extension
waits until the file is gone, without a limit. A build that was killed leaves the file behind, and then all wait for
ever (torch/utils/cpp_extension.py and file_baton.py, torch 2.13).

Only os and glob are imported here, the rest within functions: the watchdog (zerofit/health/watchdog_process.py)
must stay small.
"""

import contextlib
import glob
import os
from pathlib import Path

COMPILERS = {"ninja", "nvcc", "cicc", "ptxas", "cudafe++", "cc1plus", "c++", "g++", "gcc", "clang", "clang++", "hipcc"}
OLD_S = 60.0  # a lock of this age is stale where nothing is being compiled


def lock_files() -> dict[str, float]:
    """{lock file: the time.time() at which it was made} of all extensions of this user."""
    made_at = {}
    for pattern in (("*", "lock"), ("*", "*", "lock")):
        for path in sorted(glob.glob(os.path.join(extensions_folder(), *pattern))):
            with contextlib.suppress(OSError):
                made_at[path] = os.stat(path).st_mtime
    return made_at


def stale_locks(locks: dict[str, float], began: float, now: float, compiling: bool) -> list[str]:
    """The locks that nobody will remove, by their age: older than `began`, or old while nothing is being compiled.
    This also works on a file system that other machines see."""
    return [path for path, made in locks.items() if made < began or (now - made > OLD_S and not compiling)]


def compilers_running() -> bool:
    """Whether any process of this machine is a compiler."""
    from zerofit.strategy.host_memory import read

    return any(read(path).strip() in COMPILERS for path in glob.glob("/proc/[0-9]*/comm"))


def abandoned_locks(since: float = 0.0) -> list[str]:
    """The locks that no process holds open; none where other machines see the file system, as their processes may.

    Args:
        since: only locks made since then, in seconds as time.time() has them.
    """

    from zerofit.recipe.files import is_shared

    recent = [os.path.realpath(path) for path, made in lock_files().items() if made >= since]
    if not recent or is_shared(Path(extensions_folder())):
        return []
    open_files = _open_files()
    return [path for path in recent if path not in open_files]


def drop_abandoned_locks() -> list[str]:
    """Remove such locks. Returns their paths.

    Another run may do the same meanwhile and begin to build: the lock that it makes is another file.
    """
    before, dropped = {os.path.realpath(path): made for path, made in lock_files().items()}, []
    for lock in abandoned_locks():
        with contextlib.suppress(FileNotFoundError):
            if os.stat(lock).st_mtime == before.get(lock):
                os.unlink(lock)
                dropped.append(lock)
    return dropped


def extensions_folder() -> str:
    """As torch.utils.cpp_extension.get_default_build_root has it, without importing torch."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")


def _open_files() -> set[str]:
    import psutil

    paths = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            paths |= {file.path for file in process.open_files()}
    return paths
