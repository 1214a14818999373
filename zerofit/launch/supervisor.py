"""The parent of a launch: it passes signals on to the ranks, and ends with the exit code of the run."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from typing import Any

import psutil

from zerofit.health.shutdown import SIGNALS, heard_signals
from zerofit.launch.exit_code import ExitCode
from zerofit.launch.runs import LAUNCHER
from zerofit.recipe.errors import EXIT_INTERRUPTED, EXIT_TO_BE_RESUMED, EXIT_USER_ERROR, UserError
from zerofit.record.terminal import outlive_the_terminal

PR_SET_CHILD_SUBREAPER = 36  # prctl(2): ranks whose launcher was killed get this process as their parent


class Supervisor:
    """Starts a launch and waits for it. It removes the exit code of the launch before at once, and keeps mistakes and
    signals on record. Only machine 0 keeps the record.

    Args:
        exit_code: of the run.
        is_launch: False: nothing is started.
    """

    def __init__(self, exit_code: ExitCode, is_launch: bool):
        self._exit_code, self._is_launch = exit_code, is_launch
        self._process: subprocess.Popen[bytes] | None = None
        self._is_starting = False
        self._stopped: int | None = None  # before there was a rank
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Supervisor":
        if self._is_launch:
            self._exit_code.forget()
            outlive_the_terminal()
            self._before = {number: signal.signal(number, self._receive) for number in heard_signals()}
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._is_launch and isinstance(error, UserError):
            self._write(EXIT_USER_ERROR, error.report())

    def run(self, layout: list[str], program: list[str], environment: dict[str, str]) -> int:
        """Launch a program and wait for its end. Returns the exit code on record, or the launcher's where there is
        none and on machines but the first, to which it has been told (machine_group.py).

        Args:
            layout: the options of `accelerate launch`.
        """
        self._is_starting = True
        with contextlib.suppress(OSError, AttributeError):  # Linux
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        environment = environment | {"ZEROFIT_RUN": str(self._exit_code.folder.path)}  # for agent.py
        # A session of its own: Ctrl-C at a terminal reaches this process only, which passes it on once.
        command = [*LAUNCHER, *layout, *program]
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        if self._stopped is not None:
            self._receive(self._stopped, None)
        code = self._process.wait()
        if code < 0:
            self._end_orphans()
        recorded = self._exit_code.read().get("exit_code") if self._exit_code.is_main else None
        if recorded is not None:
            return recorded
        if self._stopped is not None:
            return self._leave(self._stopped)
        if code == EXIT_USER_ERROR:
            self._write(code, "the launcher has refused to start")
        return code if code >= 0 else 128 - code

    def _end_orphans(self) -> None:
        """Let ranks whose launcher was killed save and leave. A rank that hangs is ended by its watchdog."""
        orphans = psutil.Process().children()
        for process in orphans:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGTERM)
        psutil.wait_procs(orphans)

    def _receive(self, number: int, frame: Any) -> None:
        """Pass a signal on to the ranks, which are the launcher's children. It ends by itself when they have."""
        if self._process is None:
            self._stopped = number
            if not self._is_starting:
                raise SystemExit(self._leave(number))
            return
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if ranks := psutil.Process(self._process.pid).children():
                self._process.send_signal(signal.SIGUSR2)  # no restart (agent.py)
                for rank in ranks:
                    rank.send_signal(number)
            else:
                self._stopped = number
                os.killpg(self._process.pid, signal.SIGTERM)

    def _leave(self, number: int) -> int:
        """The exit code of a launch that was stopped before it had ranks."""
        code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TO_BE_RESUMED
        message = f"stopped by {SIGNALS[signal.Signals(number)].text} before its processes were started"
        print(message, file=sys.stderr, flush=True)
        self._write(code, message)
        return code

    def _write(self, code: int, reason: str) -> None:
        if self._exit_code.is_main:
            self._exit_code.write(code, reason)
