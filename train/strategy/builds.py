"""Locks of torch's extension builds. DeepSpeed's operations are built, or looked at, as a run starts.

torch holds `lock` in the extension's folder open while it does that, and whoever finds the file waits for it to go
away, for ever. A process that was killed meanwhile has left it there. (torch/utils/file_baton.py, torch 2.13)
"""

import os
from contextlib import suppress
from pathlib import Path


def abandoned_locks(since: float = 0.0) -> list[Path]:
    """Locks that no process of this machine holds.

    Args:
        since: only those made since then, in seconds as time.time() has them. (On a home that machines share, an older
            one may be another machine's.)
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or _default_root())
    found = []
    for lock in (*root.glob("*/lock"), *root.glob("*/*/lock")):
        with suppress(OSError):
            if lock.stat().st_mtime >= since:
                found.append(lock.resolve())
    held = _open_files() if found else set()
    return [lock for lock in found if lock not in held]


def drop_abandoned_locks(since: float = 0.0) -> list[Path]:
    """Take such locks away. Returns what they were."""
    locks = abandoned_locks(since)
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
