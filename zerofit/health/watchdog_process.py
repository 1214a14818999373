"""The watchdog process of a rank, a script that zerofit/health/watchdog.py starts: it tells how its rank ended.

    python -I -S watchdog_process.py PID RANK LIMIT_S MACHINE     (the rank's messages come in on stdin)

It is the rank's child. It wakes when the pipe's last writer is gone, and twice a second, to read the rank's memory and
the host's, and to see how long the rank has been silent. It imports a small part of the standard library, and two
modules that do likewise, but not torch: so it holds 9 MB and starts in some tens of milliseconds.
"""

import contextlib
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

if __name__ == "__main__":  # started alone: the package's folder is not on the path
    sys.path.insert(0, __file__.rpartition("/zerofit/")[0])

from zerofit.health import flight
from zerofit.strategy.host_memory import GIB, cgroups, headroom, proc_field, read_or_empty

TICK_S = 0.5
MAX_TICK_GAP_S = 1.5  # more than this between two looks: this process was stopped too, which is no silence of the rank
MAX_SAMPLES = 60  # a large process needs seconds to die, and what was scarce is free again when it has
MIN_MEMORY_LEFT = 0.05  # share of the limit: where less is left, the kernel's killer and others act
STACKS_S = 2.0  # that a silent rank has to write its stacks and its record, before it is killed
RECORDS_S = 10.0  # the same, while other ranks' records are missing: they hang too, and write theirs soon
STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # whoever sends these knows why
CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
RESUME = "the same command resumes from the newest checkpoint (without one it starts over)"
MEMORY_ADVICE = (
    "use less host memory: a strategy without offload (zero3, not zero3_offload: offload moves the optimizer's state "
    "to the host), --dataloader_num_workers 0, --save_async false, fewer processes on this host (--num_processes)"
)


class MemoryReading(NamedTuple):
    """The memory of rank and host at one moment, in bytes; None where this system does not say."""

    resident: int | None = None  # of the rank
    left: int | None = None  # of the host's memory, or of the cgroup around the rank that is nearer to its limit
    limit: int | None = None
    oom_kills: int | None = None  # by the kernel so far, in the rank's cgroup; of the host where it has none


class RankStatus(NamedTuple):
    """The state of a rank, as its messages to the watchdog tell it: lines of JSON with some of these fields."""

    rank: int
    pid: int
    machine: str = ""  # of the rank, in words
    phase: str = "start"
    update: int | None = None
    patience: float = math.inf  # nobody can say how long imports take
    stop_requested: str = ""  # the signal that asked it to stop, and that it has handled
    was_terminated: bool = False  # by SIGTERM, before it had a handler
    flight: str = ""  # the folder of records of collectives
    world_size: int = 1
    backend: str = ""
    machines: Sequence[str] = ()  # all of them

    def after(self, line: str) -> "RankStatus":
        """Return the state after one more message."""
        if line.startswith("{"):
            return self._replace(**json.loads(line))
        return self._replace(was_terminated=self.was_terminated or line.startswith("Stack ("))  # faulthandler's

    @property
    def named(self) -> str:
        return f"rank {self.rank} (pid {self.pid})" + (f" on {self.machine}" if self.machine else "")

    @property
    def where(self) -> str:
        return f"phase {self.phase}" + (f" of update {self.update}" if self.update else "")


# ------------------------------------------------------------------------------------------------------------- looking


def read_memory(pid: int, groups: list[str]) -> MemoryReading:
    memory = read_or_empty("/proc/meminfo")
    pages = read_or_empty(f"/proc/{pid}/statm").split()
    total = proc_field(memory, "MemTotal:", 1024)
    available = proc_field(memory, "MemAvailable:", 1024)
    rooms = [room for room in map(headroom, groups) if room]
    if total is not None and available is not None:
        rooms.append((total, available))
    limit, left = min(rooms, key=lambda room: room[1] / room[0]) if rooms else (None, None)
    files = [f"{group}/{name}" for group in groups[:1] for name in ("memory.events", "memory.oom_control")]
    counts = [proc_field(read_or_empty(file), "oom_kill") for file in (*files, "/proc/vmstat")]
    resident = int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else None
    return MemoryReading(resident, left, limit, next((count for count in counts if count is not None), None))


def process_state(descriptor: int | None) -> tuple[str, bool, int] | None:
    """Return (state letter, whether it is on its way out, wait status) of a process on Linux; None if it cannot be
    seen."""
    if descriptor is None:
        return None
    try:
        words = os.pread(descriptor, 4096, 0).decode(errors="replace").rpartition(")")[2].split()
        return words[0], bool(int(words[6]) & 0x4) or words[0] in "ZX", int(words[49])
    except (OSError, IndexError):
        return None


# ------------------------------------------------------------------------------------------------------------- telling


def cause(
    status: int | None, samples: list[MemoryReading], now: MemoryReading, messages: RankStatus
) -> tuple[str, bool]:
    """Return (why a rank died, whether for want of memory), from its wait status where that is known and from the
    samples."""
    ended_by = status & 127 if status else None
    if ended_by and ended_by != signal.SIGKILL:
        name = signal.Signals(ended_by).name if ended_by in list(signal.Signals) else f"signal {ended_by}"
        if ended_by == signal.SIGABRT and messages.backend == "nccl" and messages.world_size > 1:
            others = [machine for machine in messages.machines if machine != messages.machine]
            where = f"on {flight.listed(others)}" if others else "of this machine"
            return (
                f"{name}: so torch ends a rank whose NCCL collective has failed or does not end. Most likely another "
                f"rank is gone or waits elsewhere: read the last words of the other ranks {where} first"
            ), False
        return f"{name}, a crash in native code" if ended_by in CRASH_SIGNALS else name, False
    counts = [sample.oom_kills for sample in samples if sample.oom_kills is not None]
    if counts and now.oom_kills is not None and now.oom_kills > counts[0]:
        return "the kernel's out-of-memory killer ended it", True
    if any(each.left is not None and each.limit and each.left < MIN_MEMORY_LEFT * each.limit for each in samples[-3:]):
        return "killed, very likely for want of memory", True
    return ("somebody killed it (SIGKILL)" if ended_by else "SIGKILL, or a crash in native code"), False


def crash_report(messages: RankStatus, status: int | None, samples: list[MemoryReading], now: MemoryReading) -> str:
    """The report on a rank that died; empty where somebody knows already: it left by itself, or was asked to."""
    ended_by = status & 127 if status is not None else None
    if ended_by == 0 or ended_by in STOPPING_SIGNALS or messages.was_terminated:
        return ""
    why, for_memory = cause(status, samples, now, messages)
    if messages.stop_requested and not for_memory:
        name = messages.stop_requested
        return f"{messages.named} had been asked to stop ({name}), and was killed in {messages.where}"
    memory = []
    latest = samples[-1]
    if latest.resident:
        memory.append(f"the rank held {latest.resident / GIB:.2f} GiB when last seen")
    if latest.limit and latest.left is not None:
        memory.append(f"{latest.left / GIB:.2f} of the {latest.limit / GIB:.2f} GiB of host or cgroup were left")
    lines = [
        f"{messages.named} ended without a message in {messages.where}",
        f"cause    {why}",
        f"memory   {'; '.join(memory) or 'unknown on this system'}",
        *([f"remedy   {MEMORY_ADVICE}"] if for_memory else []),
        f"resume   {RESUME}",
    ]
    return "\n  ".join(lines)


def write_log(text: str) -> None:
    """Print a text in one write, so that the messages of several ranks do not mix."""
    if text:
        with contextlib.suppress(OSError):
            os.write(2, f"\n{text}\n".encode())


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# ------------------------------------------------------------------------------------------------------------ watching


class Watch:
    """The watch over one rank, this process' parent."""

    def __init__(self, pid: int, rank: int, limit_s: float, machine: str = ""):
        self.pid = pid
        self.limit_s = limit_s
        self.began = time.time()
        self.groups = cgroups(read_or_empty(f"/proc/{pid}/cgroup"))
        self.stat_file: int | None = None  # descriptor of /proc/PID/stat, which can be read while the rank dies
        with contextlib.suppress(OSError):
            self.stat_file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        self.messages = RankStatus(rank, pid, machine)
        self.rest = b""
        self.messages_at = time.monotonic()
        self.looked_at = time.monotonic()
        self.samples = [read_memory(pid, self.groups)]
        self.stopped_at: float | None = None
        self.pipe = select.poll()
        self.pipe.register(0, 0)  # wakes when no writer is left, not for every message
        os.set_blocking(0, False)

    def run(self) -> None:
        while True:
            closed = bool(self.pipe.poll(1000 * TICK_S))
            state = process_state(self.stat_file)
            self.listen()
            if os.getppid() != self.pid or (closed and (state is None or state[1])):
                status = state[2] if state and state[1] else None
                report = crash_report(self.messages, status, self.samples, read_memory(self.pid, self.groups))
                return write_log("\n  waiting  ".join([report, *self.waiting()]) if report else "")
            if closed:
                return None  # it lives and has closed the pipe: nothing can be known of it any more
            self.samples = [*self.samples[1 - MAX_SAMPLES :], read_memory(self.pid, self.groups)]
            self.look_for_stop(state is not None and state[0] in "Tt")
            slept_s = time.monotonic() - self.looked_at
            self.looked_at = time.monotonic()
            self.messages_at += slept_s if slept_s > MAX_TICK_GAP_S else 0
            silent_s = self.looked_at - self.messages_at
            if silent_s > self.limit_s * self.messages.patience and self.give_up(silent_s):
                return None

    def listen(self) -> None:
        """Take in what the rank has said since the last time."""
        while True:
            try:
                read_now = os.read(0, 65536)
            except BlockingIOError:
                return
            if not read_now:
                return
            self.messages_at = time.monotonic()
            *lines, self.rest = (self.rest + read_now).split(b"\n")
            for line in lines:
                self.messages = self.messages.after(line.decode(errors="replace"))

    def waiting(self) -> list[str]:
        """Return lines on the collectives that ranks wait in, by the records that there are of this launch."""
        known = self.messages
        records = flight.read_flight_records(known.flight, self.began) if known.flight else {}
        return flight.describe(records, known.world_size, known.machines)

    def look_for_stop(self, is_stopped: bool) -> None:
        """Report once that the rank is stopped (SIGSTOP), so that others wait for it; it is not killed for that."""
        now = time.monotonic()
        if not is_stopped:
            self.stopped_at = None
            return
        self.messages_at = now
        if self.stopped_at is None:
            self.stopped_at = now
        if now - self.stopped_at > self.limit_s:
            self.stopped_at = math.inf
            write_log(
                f"{self.messages.named} is stopped (state T: SIGSTOP, or a debugger), in "
                f"{self.messages.where}: other ranks may wait for it. It continues with: kill -CONT {self.pid}"
            )

    def give_up(self, silent_s: float) -> bool:
        """Have the rank's stacks printed and end it; False if it has spoken meanwhile."""
        span = f"{silent_s / 60:.0f} minutes" if silent_s >= 90 else f"{silent_s:.0f} s"
        write_log(
            f"{self.messages.named} has shown no sign of life for {span} in "
            f"{self.messages.where}, most likely because another rank has died, is stopped or waits elsewhere. Where "
            "it stands, by its Python stacks:"
        )
        asked_at = time.monotonic()
        send(self.pid, signal.SIGUSR2)
        with contextlib.suppress(OSError):  # the rank has a thread that listens once there is a process group
            os.write(1, b"record\n")
        while True:
            there = flight.recorded(self.messages.flight, self.began) if self.messages.flight else {}
            others_are_missing = self.messages.rank in there and len(there) < self.messages.world_size
            if time.monotonic() - asked_at >= (RECORDS_S if others_are_missing else STACKS_S):
                break
            self.pipe.poll(1000 * TICK_S)
            self.listen()
            if os.getppid() != self.pid:
                return True
        if self.messages_at > asked_at:
            write_log(f"rank {self.messages.rank} continues after all, in {self.messages.where}")
            return False
        rank = self.messages.rank
        write_log("\n".join(f"rank {rank} by the flight recorder: {line}" for line in self.waiting()))
        write_log(f"rank {rank} (pid {self.pid}) is ended now, so that nothing hangs (--watchdog_minutes); {RESUME}")
        send(self.pid, signal.SIGKILL)
        return True


def main() -> None:
    for ignored in (*STOPPING_SIGNALS, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    pid, rank, limit_s, machine = sys.argv[1:]
    Watch(int(pid), int(rank), float(limit_s), machine).run()


if __name__ == "__main__":
    main()
