"""The memory and the cores of the host, or of the container of this process. The module imports the standard library
only, and psutil in one function, since the watchdog (zerofit/health/watchdog_process.py) must stay small."""

import os
import platform

GIB = 2**30


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """Return the name of this machine's processor."""
    lines = read_or_empty("/proc/cpuinfo").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def read_or_empty(path: str) -> str:
    """Return a file's text; empty where it cannot be read."""
    try:
        with open(path) as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""


def proc_field(text: str, name: str, unit: int = 1) -> int | None:
    """Return the number behind `name` at the start of a line, times `unit`; None if there is no such line."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1]) * unit
    return None


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 where the system does not tell it."""
    return proc_field(read_or_empty("/proc/self/status"), "VmRSS:", 1024) or 0


def int_or_none(text: str) -> int | None:
    """Return the integer in a text; None if it is not one, such as cgroup's "max"."""
    return int(text) if text.strip().isdigit() else None


def cgroups(of_process: str, root: str = "/sys/fs/cgroup") -> list[str]:
    """Return the folders of a process's memory cgroup and its parents, versions 1 and 2. `of_process`: the text of
    /proc/PID/cgroup. In a container its path may be the host's and not exist; the root is the container's group."""
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
    is_v2 = os.path.exists(folder + "/memory.max")
    limit = int_or_none(read_or_empty(folder + ("/memory.max" if is_v2 else "/memory.limit_in_bytes")))
    used = int_or_none(read_or_empty(folder + ("/memory.current" if is_v2 else "/memory.usage_in_bytes")))
    if limit is None or used is None or limit >= 2**60:
        return None
    idle = proc_field(read_or_empty(folder + "/memory.stat"), "inactive_file" if is_v2 else "total_inactive_file") or 0
    return limit, limit - used + min(idle, used)


def host_memory() -> tuple[int, int]:
    """Return (free, total) bytes of the host, or of the container that this process is in."""
    import psutil

    memory = psutil.virtual_memory()
    rooms = map(headroom, cgroups(read_or_empty("/proc/self/cgroup")))
    limits = [room for room in rooms if room and room[0] < memory.total]
    limit, left = min(limits, key=lambda room: room[1], default=(memory.total, memory.available))
    return min(left, memory.available), limit
