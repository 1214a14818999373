"""A limit of time and memory for code that others wrote, such as a chat template."""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST_S = 10.0  # of this process' cores
LARGEST_BYTES = 2 << 30  # beside what the process has


class BeyondLimits(Exception):
    """The code took more time or memory than it may; the message says which."""


@contextmanager
def limited() -> Iterator[None]:
    """End the block once it takes too much. Raises BeyondLimits.

    Time is limited in the main thread only, where Python handles signals, and memory on Linux only.
    """
    is_main, statm = threading.current_thread() is threading.main_thread(), Path("/proc/self/statm")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if statm.exists():
        used = int(statm.read_text().split()[5]) * resource.getpagesize()
        limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([used + LARGEST_BYTES, *limits]), hard))
    if is_main:
        handler = signal.signal(signal.SIGVTALRM, _stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_S, LONGEST_S)
    try:
        yield
    except _Stop:
        raise BeyondLimits(f"takes longer than {LONGEST_S:g} s") from None
    except MemoryError:
        raise BeyondLimits(f"takes more than {LARGEST_BYTES / 2**30:g} GiB of memory") from None
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, handler or signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class _Stop(BaseException):
    """No Exception, which the code might catch."""


def _stop(*_) -> None:
    raise _Stop
