"""The watchdog of a rank: a small child process that reports how the rank ended when the rank itself cannot.

A rank that the kernel's out-of-memory killer ends prints nothing, and a rank that waits for a dead rank hangs forever.
The watchdog process (watchdog_process.py) detects the first by the end of a pipe and the second by silence. It costs a
rank some milliseconds at the start and one small write per phase. If it cannot be started, or dies, the run continues
without it.
"""

import atexit
import contextlib
import faulthandler
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from zerofit.health import flight

PIPE_BYTES = 2**20  # some 40,000 messages, of which the watchdog process reads those of half a second
STDERR = 2


class Watchdog:
    """The rank's side of its watchdog, which reports where the rank is. It never raises and never blocks. Without a
    sign of life for `limit_seconds` the rank prints its stacks and is ended; None: never."""

    def __init__(self, rank: int, limit_seconds: float | None, machine: str = ""):
        self.machine = machine
        self.machines = [machine]
        self.world_size = 1
        self.rank = rank
        self.limit_seconds = math.inf if limit_seconds is None else limit_seconds
        self.at: tuple[str, int | None] = ("start", None)  # (phase, update)
        self.first_patience = (
            1.0  # the patience when an update enters a phase for the first time: layers may be compiled
        )
        self._entered: set[str] = set()  # the phases that updates have entered
        self._pid = os.getpid()
        self._began = time.time()
        self._pipe: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._flight: str | None = None  # the folder of the flight recorder's records

    def start(self) -> None:
        """Start the watchdog process. This is called once, as soon as the rank is known."""
        with contextlib.suppress(OSError, ValueError):
            faulthandler.enable(file=STDERR)
            faulthandler.register(signal.SIGUSR2, file=STDERR, all_threads=True)
        script = Path(__file__).with_name("watchdog_process.py")
        numbers = map(str, (os.getpid(), self.rank, self.limit_seconds))
        try:
            reader, writer = os.pipe()
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script), *numbers, self.machine],
                stdin=reader,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError:  # too many files or processes
            return
        os.close(reader)
        os.set_blocking(writer, False)
        with contextlib.suppress(OSError, AttributeError):  # Linux
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._pipe = writer
        # A launcher that sends SIGTERM to its ranks knows why, so the watchdog must not report it. faulthandler writes
        # to the watchdog even while the main thread waits in native code, and then lets the signal have its usual
        # effect. A Python handler that is set later replaces it.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                faulthandler.register(signal.SIGTERM, file=writer, all_threads=False, chain=True)
        atexit.register(self.leave)  # a rank that leaves through the interpreter has reported why
        os.register_at_fork(after_in_child=self._forget)  # a worker would keep the pipe open, and write for the rank

    def phase(self, name: str, update: int | None = None, patience: float = 1.0) -> None:
        """Report that the rank enters a phase, as a sign of life. `patience`: how many times the limit may pass in
        this phase; math.inf: the phase may take any time."""
        if update is not None and name not in self._entered:
            self._entered.add(name)
            patience = max(patience, self.first_patience)
        self.at = (name, update)
        self._send(phase=name, update=update, patience=patience)

    def alive(self) -> None:
        """Give a sign of life within a phase."""
        self._send()

    def stop_requested(self, signal_name: str) -> None:
        """Report that the rank has been asked to stop. If it is killed before it stops, the report is one line."""
        self._send(stop_requested=signal_name)

    def record_collectives(self, folder: Path, world_size: int, backend: str, machines: list[str]) -> None:
        """Let this rank write its flight record whenever the watchdog asks for it. A thread writes it, since the main
        thread waits then. `machines`: the names of all machines; each machine has the same number of ranks."""
        if self._child is None or self._child.stdout is None:
            return
        self.machines = machines
        self.world_size = world_size
        self._flight = records = str(folder.absolute() / flight.FLIGHT_FOLDER)
        requests = self._child.stdout.fileno()

        def write_records() -> None:
            with contextlib.suppress(OSError, ValueError):
                while os.read(requests, 64):
                    flight.write_record(records, self.rank)

        threading.Thread(target=write_records, daemon=True).start()
        self._send(flight=records, world_size=world_size, backend=backend, machines=machines)

    def waits_for(self) -> list[str]:
        """Write this rank's record, and return lines on the collective in which it has failed."""
        if self._flight is None:
            return []
        flight.write_record(self._flight, self.rank)
        records = flight.read_flight_records(self._flight, self._began)
        waits = flight.describe_waits(records, self.world_size, self.machines)
        return waits or (flight.describe_last(records[self.rank]) if self.rank in records else [])

    def leave(self) -> None:
        """End the watchdog process without a report, since the rank leaves in order."""
        if self._child is None or os.getpid() != self._pid:
            return
        self._child.kill()
        self._child.wait()
        self._child = None
        self._forget()

    def _send(self, **message: Any) -> None:
        """Send the fields of RankStatus that have changed."""
        if self._pipe is not None:
            with contextlib.suppress(OSError):  # the pipe is full, or the watchdog is gone
                os.write(self._pipe, f"{json.dumps(message)}\n".encode())

    def _forget(self) -> None:
        if self._pipe is None:
            return
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            faulthandler.unregister(signal.SIGTERM)  # or it would write to the next file with the pipe's number
        os.close(self._pipe)
        self._pipe = None
