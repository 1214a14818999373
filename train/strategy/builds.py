"""Locks of torch's extension builds. DeepSpeed's operations are built, or looked at, as a run starts.

torch holds `lock` in the extension's folder open while it does that, and whoever finds the file waits for it to go
away, for ever. A process that was killed meanwhile has left it there. (torch/utils/file_baton.py, torch 2.13)
"""

import os
from contextlib import suppress
from pathlib import Path

from train.recipe.files import is_shared


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
