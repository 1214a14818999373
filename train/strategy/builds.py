"""Builds of torch extensions: DeepSpeed's operations are built, or looked at, as a run starts.

A build takes a minute or more and says nothing. torch holds `lock` in the extension's folder open meanwhile, and
whoever finds the file waits for it to go away, for ever. A process that was killed meanwhile has left it there.
(torch/utils/cpp_extension.py and file_baton.py, torch 2.13)
"""

import functools
import os
import subprocess
from contextlib import suppress
from pathlib import Path

from train.recipe.files import is_shared


def announce_builds() -> None:
    """From now on, say so when an operation is about to be built; nothing where it is in the cache.

    One process of a machine builds, the others wait for it: that one speaks. torch asks ninja each time, whose answer
    only ninja knows: it depends on flags, versions and times of files.
    """
    from torch.utils import cpp_extension

    build = getattr(cpp_extension, "_run_ninja_build", None)  # torch's own: absent one day, the run is silent again
    if build is None or hasattr(build, "__wrapped__"):
        return

    @functools.wraps(build)
    def announced(build_directory: str, *args, **kwargs) -> None:
        if not is_built(build_directory):
            print(
                f"note: DeepSpeed's {Path(build_directory).name} is being compiled, once for this machine: up to two "
                f"minutes ({build_directory})",
                flush=True,
            )
        build(build_directory, *args, **kwargs)

    cpp_extension._run_ninja_build = announced


def is_built(folder: str | os.PathLike) -> bool:
    """Whether ninja finds nothing to do there."""
    with suppress(OSError):
        asked = subprocess.run(["ninja", "-n"], cwd=folder, capture_output=True, text=True)
        return "no work to do" in asked.stdout
    return False


def abandoned_locks(since: float = 0.0) -> list[Path]:
    """Locks that no process holds. On a file system that machines share nobody can know: there are none.

    Args:
        since: only those made since then, in seconds as time.time() has them.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or _default_root())
    found = []
    for lock in (*root.glob("*/lock"), *root.glob("*/*/lock")):
        with suppress(OSError):
            if lock.stat().st_mtime >= since:
                found.append(lock.resolve())
    if not found or is_shared(root):
        return []
    held = _open_files()
    return [lock for lock in found if lock not in held]


def drop_abandoned_locks() -> list[Path]:
    """Take such locks away. Returns what they were."""
    locks = abandoned_locks()
    for lock in locks:
        lock.unlink(missing_ok=True)
    return locks


def _default_root() -> Path:
    """As torch.utils.cpp_extension.get_default_build_root has it, without importing torch."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "torch_extensions"


def _open_files() -> set[Path]:
    import psutil

    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            found |= {Path(file.path) for file in process.open_files()}
    return found
