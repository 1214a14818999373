"""The memory that a rank may use, and does use: of a device's allocator, or on a CPU of the process' data segment.

On a CPU the limit is RLIMIT_DATA. It counts the writable private memory that a process has requested: what its
allocator holds, as a GPU's limit counts what its allocator has reserved. Before there is a model, libraries have
requested a GiB or so that they never touch (Arrow's allocator does); so the count starts at what is resident by then.
Linux gives the present size of the data segment and not its peak, so a thread reads it every few milliseconds.
"""

import contextlib
import os
import resource
import threading
import time
from pathlib import Path

import torch

from zerofit.record.meters import MemoryMeter
from zerofit.strategy.host_memory import resident_bytes

SAMPLE_EVERY_S = 0.002
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class DataSegment:
    """The data segment of this process in bytes, without what was requested and not touched when this was made.

    Args:
        watched: measure its peak from now on, in a thread, whose own stack is not counted.
    """

    def __init__(self, watched: bool = False):
        self._peak = 0
        if watched:
            threading.Thread(target=self._poll, daemon=True, name="data segment").start()
        self.untouched = max(0, _data_bytes() - resident_bytes())

    def now(self) -> int:
        return _data_bytes() - self.untouched

    def limit(self, limit: int) -> None:
        """Limit it to this many bytes: the system refuses requests beyond that."""
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        present = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([self.untouched + limit, *present]), hard))

    def _poll(self) -> None:
        with contextlib.suppress(OSError), open("/proc/self/statm", "rb", buffering=0) as file:
            while True:
                now = int(file.read(128).split()[5]) * PAGE
                self._peak = max(self._peak, now)  # the peak is read last, so that a reset meanwhile is kept
                file.seek(0)
                time.sleep(SAMPLE_EVERY_S)

    def reset(self) -> None:
        self._peak = _data_bytes()

    def peak_bytes(self) -> int:
        """The peak since the last reset."""
        self._peak = max(self._peak, _data_bytes())
        return self._peak - self.untouched


def _data_bytes() -> int:
    """What RLIMIT_DATA counts; 0 on systems other than Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * PAGE
    except (OSError, IndexError, ValueError):
        return 0


class TrialMemory:
    """The peaks of one trial. It takes the place of the loop's MemoryMeter, which starts again at every update."""

    def __init__(self, device: torch.device, segment: DataSegment):
        self.host = MemoryMeter(torch.device("cpu"))
        self.meter = MemoryMeter(device) if device.type != "cpu" else self.host
        self.data = segment if device.type == "cpu" else None
        # A simulated device counts what the host would hold: nothing of it is resident.
        self.simulated = getattr(torch.get_device_module(device), "peak_host_bytes", None)
        self.peaks: dict[str, int] = {}
        self.begin()

    def begin(self) -> None:
        """A trial begins: forget all peaks."""
        self.peaks = {}
        self._reset_all()

    def peak_bytes(self) -> int:
        """The peak of allocated memory in the trial so far."""
        self.note()
        return self.peaks["allocated"]

    def reset(self) -> None:
        """Reset the meters as the loop does; the peaks of the trial are kept."""
        self.note()
        self._reset_all()

    def note(self) -> dict[str, int]:
        """The peaks of the trial so far, in bytes: allocated (by torch; on a CPU resident), reserved (what the limit
        counts), total (of the whole device, other processes included; on a CPU of the process) and host (resident)."""
        host = self.simulated() if self.simulated else self.host.peak_bytes()
        if self.data is not None:
            now = {"allocated": host, "reserved": self.data.peak_bytes(), "total": host, "host": host}
        else:
            free, total = torch.accelerator.get_memory_info()
            now = {
                "allocated": self.meter.peak_bytes(),
                "reserved": torch.accelerator.max_memory_reserved(),
                "total": total - free,
                "host": host,
            }
        self.peaks = {name: max(size, self.peaks.get(name, 0)) for name, size in now.items()}
        return self.peaks

    def _reset_all(self) -> None:
        self.host.reset()
        if self.data is not None:
            self.data.reset()
        else:
            self.meter.reset()
        if self.simulated:
            self.simulated(reset=True)


def limit_device(device: torch.device, limit: int | None, ranks: int = 1) -> int | None:
    """Limit this rank to `limit` bytes of its device. Returns what it may use.

    The limit is the allocator's. Memory outside of it (the driver's context of each process, other programs) is
    measured here: with it, the device could be full before the limits are reached.

    Args:
        ranks: processes on this device, each with this limit. All of them have their contexts by now.

    Raises:
        ValueError: the device has less, or its allocator cannot be limited; the message says which.
    """
    free, total = torch.accelerator.get_memory_info()
    if limit is None:
        return total
    taken = max(0, total - free - ranks * torch.accelerator.memory_reserved())
    if ranks * limit + taken > total:
        shared = f"{ranks} processes use it, " if ranks > 1 else ""
        raise ValueError(
            f"the device has {total / 2**30:.2f} GiB; {shared}and {taken / 2**30:.2f} GiB are in use before there is "
            f"a model. At most {(total - taken) // ranks / 2**30:.2f} GiB are left for each"
        )
    restrict = getattr(getattr(torch, device.type, None), "set_per_process_memory_fraction", None)
    if restrict is None:
        raise ValueError(f"torch cannot limit the memory of a {device.type} device")
    restrict(limit / total)
    return limit
