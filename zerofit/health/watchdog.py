"""The watchdog of a rank: a small process beside it, which tells how the rank ended when the rank itself cannot.

A rank that the kernel's out-of-memory killer ends says nothing, and one that waits for a dead rank hangs
forever. The watchdog process (watchdog_process.py) learns of the first by the end of a pipe, of the second by
silence. It costs a rank some milliseconds at the start and one small write a phase. Where it cannot be started, or
dies, the run continues without it.
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

PIPE_BYTES = 2**20  # the watchdog process reads twice a second: room for some 40,000 messages
STDERR = 2


class Watchdog:
    """The rank's side: says where the rank is. Nothing here raises or blocks."""

    def __init__(self, rank: int, limit_seconds: float | None, machine: str = ""):
        self.machine = machine
        self.machines = [machine]
        self.world_size = 1
        self.rank = rank
        # Without a sign of life for so long, the rank's stacks are printed and it is ended; None: never.
        self.limit_seconds = math.inf if limit_seconds is None else limit_seconds
        self.at: tuple[str, int | None] = ("start", None)  # phase and update
        self.first_patience = 1.0  # of the first of each phase of an update, in which layers may be compiled
        self._entered: set[str] = set()  # phases of an update
        self._pid = os.getpid()
        self._began = time.time()
        self._pipe: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._flight: str | None = None

    def start(self) -> None:
        """Start the watchdog process; once, as early as the rank is known."""
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
        # A launcher that asks its ranks to end knows why. faulthandler tells the watchdog of it even while the main
        # thread waits in native code, and then lets the signal do what it would have done. A handler of Python's that
        # is set later takes its place.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                faulthandler.register(signal.SIGTERM, file=writer, all_threads=False, chain=True)
        atexit.register(self.leave)  # whoever leaves through the interpreter has told why
        os.register_at_fork(after_in_child=self._forget)  # workers would keep the pipe open, and speak for the rank

    def phase(self, name: str, update: int | None = None, patience: float = 1.0) -> None:
        """Say where the rank is now, as a sign of life. `patience`: times the limit may pass in this phase; math.inf
        where nobody can say how long it takes."""
        if update is not None and name not in self._entered:
            self._entered.add(name)
            patience = max(patience, self.first_patience)
        self.at = (name, update)
        self._send(phase=name, update=update, patience=patience)

    def alive(self) -> None:
        """Give a sign of life within the phase."""
        self._send()

    def stop_requested(self, signal_name: str) -> None:
        """Say that the rank has been asked to stop; should it be killed before it has, one line says so."""
        self._send(stop_requested=signal_name)

    def record_collectives(self, folder: Path, world_size: int, backend: str, machines: list[str]) -> None:
        """Let this rank, which has a process group now, write down where it stands in its collectives when the
        watchdog asks for it, from a thread, since the main thread waits. `machines`: all of them, in words; each has
        as many ranks as this one."""
        if self._child is None or self._child.stdout is None:
            return
        self.machines = machines
        self.world_size = world_size
        self._flight = records = str(folder.absolute() / flight.FLIGHT_FOLDER)
        asked = self._child.stdout.fileno()

        def write_records() -> None:
            with contextlib.suppress(OSError, ValueError):
                while os.read(asked, 64):
                    flight.write_record(records, self.rank)

        threading.Thread(target=write_records, daemon=True).start()
        self._send(flight=records, world_size=world_size, backend=backend, machines=machines)

    def waits_for(self) -> list[str]:
        """Write this rank's record, and return lines on the collective that it has failed in."""
        if self._flight is None:
            return []
        flight.write_record(self._flight, self.rank)
        records = flight.read_flight_records(self._flight, self._began)
        waits = flight.describe(records, self.world_size, self.machines)
        return waits or (flight.last(records[self.rank]) if self.rank in records else [])

    def leave(self) -> None:
        """End the watchdog process without a word, since the rank leaves in order."""
        if self._child is None or os.getpid() != self._pid:
            return
        self._child.kill()
        self._child.wait()
        self._child = None
        self._forget()

    def _send(self, **message: Any) -> None:
        """Send fields of RankStatus that have changed."""
        if self._pipe is not None:
            with contextlib.suppress(OSError):  # the pipe is full, or the watchdog is gone
                os.write(self._pipe, f"{json.dumps(message)}\n".encode())

    def _forget(self) -> None:
        if self._pipe is None:
            return
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            faulthandler.unregister(signal.SIGTERM)  # or it would write to whatever has the pipe's number next
        os.close(self._pipe)
        self._pipe = None
