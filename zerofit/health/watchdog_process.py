"""The watchdog process of a rank, a script that zerofit/health/watchdog.py starts: it reports how its rank ended.

    python -I -S watchdog_process.py PID RANK LIMIT_S MACHINE     (stdin has the rank's messages)

It is the rank's child. It wakes when the last writer of the pipe is gone, and twice a second to read the memory of the
rank and of the host, and to check how long the rank has been silent. It and the two modules that it imports need only
a small part of the standard library, not torch: so it uses 9 MB and starts in some tens of milliseconds.
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
MAX_TICK_GAP_S = 1.5  # after a longer gap between two ticks this process was stopped too, and the rank was not silent
MAX_SAMPLES = 60  # of memory: a large process needs seconds to die, and its memory is free again after that
MIN_MEMORY_LEFT = 0.05  # share of the limit: if less is left, out-of-memory killers act
STACKS_S = 2.0  # in which a silent rank writes its stacks and its record, before it is killed
RECORDS_S = 10.0  # the same while other ranks' records are missing: they hang too, and write theirs soon
STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the sender of these knows why the rank ended
CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
RESUME = "the same command resumes from the newest checkpoint (without one it starts over)"
MEMORY_ADVICE = (
    "use less host memory: a strategy without offload (zero3, not zero3_offload: offload moves the optimizer's state "
    "to the host), --dataloader_num_workers 0, --save_async false, fewer processes on this host (--num_processes)"
)


class MemoryReading(NamedTuple):
    """The memory of the rank and the host at one moment, in bytes; None: this system does not tell it."""

    resident: int | None = None  # of the rank
    left: int | None = None  # of the host, or of a cgroup of the rank that is nearer to its limit
    limit: int | None = None  # of the same
    oom_kills: int | None = None  # by the kernel so far, in the rank's cgroup; without a cgroup, on the host


class RankStatus(NamedTuple):
    """The state of a rank from its messages to the watchdog: lines of JSON with some of these fields."""

    rank: int
    pid: int
    machine: str = ""  # the name of its machine
    phase: str = "start"
    update: int | None = None
    patience: float = math.inf  # imports may take any time
    stop_requested: str = ""  # the signal that asked it to stop, and that it has handled
    was_terminated: bool = False  # by SIGTERM, before it had a handler
    flight: str = ""  # the folder of the flight recorder's records
    world_size: int = 1
    backend: str = ""
    machines: Sequence[str] = ()  # the names of all machines

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


# ------------------------------------------------------------------------------------------------- reading from Linux


def read_memory(pid: int, groups: list[str]) -> MemoryReading:
    """Read the memory of a rank and its host. `groups`: the folders of the rank's cgroups, the innermost first."""
    memory = read_or_empty("/proc/meminfo")
    pages = read_or_empty(f"/proc/{pid}/statm").split()
    total = proc_field(memory, "MemTotal:", 1024)
    available = proc_field(memory, "MemAvailable:", 1024)
    limits = list(filter(None, map(headroom, groups)))  # (limit, bytes that are left)
    if total is not None and available is not None:
        limits.append((total, available))
    limit, left = min(limits, key=lambda pair: pair[1] / pair[0]) if limits else (None, None)
    files = [f"{group}/{name}" for group in groups[:1] for name in ("memory.events", "memory.oom_control")]
    counts = [proc_field(read_or_empty(file), "oom_kill") for file in (*files, "/proc/vmstat")]
    resident = int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else None
    return MemoryReading(resident, left, limit, next((count for count in counts if count is not None), None))


def process_state(descriptor: int | None) -> tuple[str, bool, int] | None:
    """Return (state letter, True if it is ending, wait status) of a process on Linux; None: it cannot be read.
    `descriptor`: of /proc/PID/stat."""
    if descriptor is None:
        return None
    try:
        words = os.pread(descriptor, 4096, 0).decode(errors="replace").rpartition(")")[2].split()
        return words[0], bool(int(words[6]) & 0x4) or words[0] in "ZX", int(words[49])
    except (OSError, IndexError):
        return None


# ----------------------------------------------------------------------------------------------------------- reporting


def find_cause(
    status: int | None, samples: list[MemoryReading], now: MemoryReading, rank: RankStatus
) -> tuple[str, bool]:
    """Return (why a rank died, True if memory ran out). `status`: its wait status, if known. `samples`: earlier
    readings, the newest last."""
    ended_by = status & 127 if status else None
    if ended_by and ended_by != signal.SIGKILL:
        name = signal.Signals(ended_by).name if ended_by in list(signal.Signals) else f"signal {ended_by}"
        if ended_by == signal.SIGABRT and rank.backend == "nccl" and rank.world_size > 1:
            others = [machine for machine in rank.machines if machine != rank.machine]
            where = f"on {flight.join_names(others)}" if others else "of this machine"
            return (
                f"{name}: torch ends a rank like this if its NCCL collective has failed or does not end. Most likely "
                f"another rank is gone or waits elsewhere: read the last lines of the other ranks {where} first"
            ), False
        return f"{name}, a crash in native code" if ended_by in CRASH_SIGNALS else name, False
    counts = [sample.oom_kills for sample in samples if sample.oom_kills is not None]
    if counts and now.oom_kills is not None and now.oom_kills > counts[0]:
        return "the kernel's out-of-memory killer ended it", True
    if any(sample.limit and (sample.left or 0) < MIN_MEMORY_LEFT * sample.limit for sample in samples[-3:]):
        return "killed, very likely because memory ran out", True
    return ("somebody killed it (SIGKILL)" if ended_by else "SIGKILL, or a crash in native code"), False


def crash_report(rank: RankStatus, status: int | None, samples: list[MemoryReading], now: MemoryReading) -> str:
    """Return the report on a rank that died; empty: the cause is known, since it left by itself or was asked to."""
    ended_by = status & 127 if status is not None else None
    if ended_by == 0 or ended_by in STOPPING_SIGNALS or rank.was_terminated:
        return ""
    cause, memory_ran_out = find_cause(status, samples, now, rank)
    if rank.stop_requested and not memory_ran_out:
        return f"{rank.named} had been asked to stop ({rank.stop_requested}), and was killed in {rank.where}"
    memory = []
    latest = samples[-1]
    if latest.resident:
        memory.append(f"the rank held {latest.resident / GIB:.2f} GiB when last seen")
    if latest.limit and latest.left is not None:
        memory.append(f"{latest.left / GIB:.2f} of the {latest.limit / GIB:.2f} GiB of host or cgroup were left")
    lines = [
        f"{rank.named} ended without a message in {rank.where}",
        f"cause    {cause}",
        f"memory   {'; '.join(memory) or 'unknown on this system'}",
        *([f"remedy   {MEMORY_ADVICE}"] if memory_ran_out else []),
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
    """The watch over one rank, which is the parent of this process."""

    def __init__(self, pid: int, rank: int, limit_s: float, machine: str = ""):
        self.pid = pid
        self.limit_s = limit_s
        self.began = time.time()
        self.groups = cgroups(read_or_empty(f"/proc/{pid}/cgroup"))
        self.stat_file: int | None = None  # /proc/PID/stat, opened now so that it can be read while the rank dies
        with contextlib.suppress(OSError):
            self.stat_file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        self.rank = RankStatus(rank, pid, machine)
        self.partial_line = b""
        self.message_at = time.monotonic()
        self.tick_at = time.monotonic()
        self.samples = [read_memory(pid, self.groups)]
        self.stopped_at: float | None = None
        self.pipe = select.poll()
        self.pipe.register(0, 0)  # wakes when no writer is left, not at every message
        os.set_blocking(0, False)

    def run(self) -> None:
        while True:
            closed = bool(self.pipe.poll(1000 * TICK_S))
            state = process_state(self.stat_file)
            self.read_messages()
            if os.getppid() != self.pid or (closed and (state is None or state[1])):
                status = state[2] if state and state[1] else None
                report = crash_report(self.rank, status, self.samples, read_memory(self.pid, self.groups))
                return write_log("\n  waiting  ".join([report, *self.describe_waits()]) if report else "")
            if closed:
                return None  # the rank lives and has closed the pipe: it can no longer be watched
            self.samples = [*self.samples[1 - MAX_SAMPLES :], read_memory(self.pid, self.groups)]
            self.report_stopped(state is not None and state[0] in "Tt")
            slept_s = time.monotonic() - self.tick_at
            self.tick_at = time.monotonic()
            self.message_at += slept_s if slept_s > MAX_TICK_GAP_S else 0
            silent_s = self.tick_at - self.message_at
            if silent_s > self.limit_s * self.rank.patience and self.end_silent_rank(silent_s):
                return None

    def read_messages(self) -> None:
        """Read the messages that the rank has sent since the last call."""
        while True:
            try:
                read_now = os.read(0, 65536)
            except BlockingIOError:
                return
            if not read_now:
                return
            self.message_at = time.monotonic()
            *lines, self.partial_line = (self.partial_line + read_now).split(b"\n")
            for line in lines:
                self.rank = self.rank.after(line.decode(errors="replace"))

    def describe_waits(self) -> list[str]:
        """Return lines on the collectives in which ranks wait, from the records of this launch."""
        records = flight.read_flight_records(self.rank.flight, self.began) if self.rank.flight else {}
        return flight.describe_waits(records, self.rank.world_size, self.rank.machines)

    def report_stopped(self, is_stopped: bool) -> None:
        """Report once that the rank is stopped (SIGSTOP), so that others wait for it. It is not killed for that."""
        now = time.monotonic()
        if not is_stopped:
            self.stopped_at = None
            return
        self.message_at = now
        self.stopped_at = self.stopped_at or now
        if now - self.stopped_at > self.limit_s:
            self.stopped_at = math.inf
            write_log(
                f"{self.rank.named} is stopped (state T: SIGSTOP, or a debugger), in {self.rank.where}: other ranks "
                f"may wait for it. It continues with: kill -CONT {self.pid}"
            )

    def end_silent_rank(self, silent_s: float) -> bool:
        """Let the rank print its stacks, and end it. Returns False if the rank has given a sign of life meanwhile."""
        span = f"{silent_s / 60:.0f} minutes" if silent_s >= 90 else f"{silent_s:.0f} s"
        write_log(
            f"{self.rank.named} has shown no sign of life for {span} in {self.rank.where}, most likely because "
            "another rank has died, is stopped or waits elsewhere. Its Python stacks show where it is:"
        )
        asked_at = time.monotonic()
        send(self.pid, signal.SIGUSR2)
        with contextlib.suppress(OSError):  # a thread of the rank reads it, once there is a process group
            os.write(1, b"record\n")
        while True:
            records = flight.find_records(self.rank.flight, self.began) if self.rank.flight else {}
            others_are_missing = self.rank.rank in records and len(records) < self.rank.world_size
            if time.monotonic() - asked_at >= (RECORDS_S if others_are_missing else STACKS_S):
                break
            self.pipe.poll(1000 * TICK_S)
            self.read_messages()
            if os.getppid() != self.pid:
                return True
        rank = self.rank.rank
        if self.message_at > asked_at:
            write_log(f"rank {rank} continues after all, in {self.rank.where}")
            return False
        write_log("\n".join(f"rank {rank} by the flight recorder: {line}" for line in self.describe_waits()))
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
