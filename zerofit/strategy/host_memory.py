"""The memory and the cores of the host, or of the container that a process is in. Only the standard library is
imported here, and psutil in one function: the watchdog (zerofit/health/watchdog_process.py) is to stay small."""

import os
import platform

GIB = 2**30


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor of this machine."""
    lines = read_or_empty("/proc/cpuinfo").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def read_or_empty(path: str) -> str:
    """A file's text; empty where there is none."""
    try:
        with open(path) as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""


def proc_field(text: str, name: str, unit: int = 1) -> int | None:
    """The number that follows `name` at the start of a line, times the unit."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1]) * unit
    return None


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    return proc_field(read_or_empty("/proc/self/status"), "VmRSS:", 1024) or 0


def int_or_none(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def cgroups(of_process: str, root: str = "/sys/fs/cgroup") -> list[str]:
    """The memory cgroup of a process and those around it, from /proc/PID/cgroup: versions 1 and 2. In a container the
    path may be the host's, and name nothing here; then the root is the container's own group."""
    path = None
    for line in of_process.splitlines():
        _, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            root = os.path.join(root, "memory")
            path = name
            break
        if not controllers:
            path = name
    folders = []
    while path is not None:
        folder = os.path.normpath(root + "/" + path)
        if os.path.isdir(folder):
            folders.append(folder)
        path = os.path.dirname(path) if path.strip("/") else None
    return folders


def headroom(folder: str) -> tuple[int, int] | None:
    """Return (limit, bytes left) of a cgroup; page cache that can be dropped counts as left. None: it has no limit."""
    two = os.path.exists(folder + "/memory.max")
    limit = int_or_none(read_or_empty(folder + ("/memory.max" if two else "/memory.limit_in_bytes")))
    used = int_or_none(read_or_empty(folder + ("/memory.current" if two else "/memory.usage_in_bytes")))
    if limit is None or used is None or limit >= 2**60:
        return None
    idle = proc_field(read_or_empty(folder + "/memory.stat"), "inactive_file" if two else "total_inactive_file") or 0
    return limit, limit - used + min(idle, used)


def host_memory() -> tuple[int, int]:
    """Return (free, total) bytes of the host, or of the container that this process is in."""
    import psutil

    memory = psutil.virtual_memory()
    limits = [
        each for each in map(headroom, cgroups(read_or_empty("/proc/self/cgroup"))) if each and each[0] < memory.total
    ]
    limit, left = min(limits, key=lambda each: each[1], default=(memory.total, memory.available))
    return min(left, memory.available), limit
