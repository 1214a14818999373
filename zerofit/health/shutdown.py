"""Early and orderly ends of a run: signals of schedulers and people, the time limit of the run, and anomalies.

A signal may reach all ranks or only one of them. The ranks exchange the signals that they have received with the
figures of every update (`bounds` in zerofit/training/run.py), so all leave after the same update and its checkpoint.
"""

import contextlib
import ctypes
import enum
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import psutil

from zerofit.recipe.errors import (
    EXIT,
    EXIT_INTERRUPTED,
    EXIT_NEEDS_A_PERSON,
    EXIT_TERMINATED,
    EXIT_TO_BE_RESUMED,
    is_first_rank,
    leave,
    print_last,
    record_code,
)

PR_SET_PDEATHSIG = 1  # prctl(2)
PEER_CHECK_S = 2.0  # in which a launcher notices that a rank has died, before a signal at the start counts as a stop
REPEATED_SIGNAL_S = 1.0  # within which a signal may come twice: from the scheduler and from the launcher


class StopReason(enum.IntEnum):
    """The reason why a run stops before its last update. Ranks exchange the number."""

    NONE = 0
    SIGHUP = 1
    SIGTERM = 2
    SIGUSR1 = 3
    CTRL_C = 4
    OUT_OF_TIME = 5
    ANOMALY = 6

    @property
    def text(self) -> str:
        """The reason in a message: `stopped by TEXT`."""
        return STOP_REASON_TEXTS.get(self, self.name)

    def exit_code(self, saved: bool) -> int:
        """Return the exit code of a run that stopped for this reason. `saved`: its last update is in a checkpoint."""
        if self is StopReason.NONE:
            return 0
        needs_a_person = not saved or self is StopReason.ANOMALY
        return EXIT_NEEDS_A_PERSON if needs_a_person else EXIT_TO_BE_RESUMED


STOP_REASON_TEXTS = {
    StopReason.SIGHUP: "SIGHUP (the terminal was closed)",
    StopReason.CTRL_C: "Ctrl-C",
    StopReason.OUT_OF_TIME: "max_hours",
    StopReason.ANOMALY: "an anomaly",
}
SIGNALS = {
    signal.SIGHUP: StopReason.SIGHUP,
    signal.SIGTERM: StopReason.SIGTERM,
    signal.SIGUSR1: StopReason.SIGUSR1,
    signal.SIGINT: StopReason.CTRL_C,
}

_RECEIVERS: list[Callable[[int], None]] = []  # the last one is called with signals
_HANDLED: list[int] = []  # the signals that have our handler


def signals_to_handle() -> list[int]:
    """Return those of SIGNALS that a program has to handle: all but SIGHUP if that is ignored, as under nohup."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def end_with_parent() -> None:
    """Let this process get SIGTERM when the process that has started it is gone (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def listen(receive: Callable[[int], None]) -> None:
    """Call `receive` at every signal of SIGNALS, instead of the function that was called before.

    It is called in a thread. Python calls its own handlers only in the main thread, which may wait in native code, for
    a rank that is gone for instance.
    """
    _RECEIVERS.append(receive)
    if len(_RECEIVERS) > 1:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    _HANDLED[:] = signals_to_handle()
    for number in _HANDLED:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_stop_listening)
    threading.Thread(target=_read, args=(reader,), daemon=True, name="signals").start()


@contextlib.contextmanager
def listening_within() -> Iterator[None]:
    """Run a block in a process that continues after it: at the end the signal handlers of before are restored."""
    num_receivers = len(_RECEIVERS)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        del _RECEIVERS[num_receivers:]
        if not num_receivers and _HANDLED:
            os.close(signal.set_wakeup_fd(-1))  # this ends the thread
            for number in _HANDLED:
                signal.signal(number, handlers[signal.Signals(number)] or signal.SIG_DFL)
            _HANDLED.clear()
            faulthandler.unregister(signal.SIGTERM)  # the watchdog has registered it


def _read(reader: int) -> None:
    while numbers := os.read(reader, 64):
        for number in numbers:
            if number in list(SIGNALS):
                try:
                    _RECEIVERS[-1](number)
                except BaseException:  # the thread would end, and later signals would be lost
                    traceback.print_exc()
                    code = EXIT.code
                    os._exit(128 + number if code is None else code)
    os.close(reader)


def _stop_listening() -> None:
    """Give signals their usual effect in a process that is forked while the run starts; later, a forked worker of the
    data loader ends with its rank, not at a signal that all processes of a job get."""
    signal.set_wakeup_fd(-1)
    for number in _HANDLED if len(_RECEIVERS) == 1 else ():
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def leave_at_start(number: int) -> None:
    """End a rank that gets a signal before it trains, or that does not train. The exit code is 85, since the same
    command starts the run again, after Ctrl-C 130, and 143 if another rank has ended before: then the launcher ends
    the others with this signal. A process that is ending already keeps its exit code, and has time to print why."""
    if EXIT.code is not None:
        code = EXIT.code
        time.sleep(REPEATED_SIGNAL_S)
        leave(code)
    if number == signal.SIGINT:
        code = EXIT_INTERRUPTED
        message = "interrupted while the run was starting: its folder is unchanged"
    else:
        name = SIGNALS[signal.Signals(number)].text
        until = time.monotonic() + (0.0 if is_first_rank() else PEER_CHECK_S)
        message = f"stopped by {name} while the run was starting: the same command starts it again"
        while (all_live := ranks_are_alive()) and time.monotonic() < until:
            time.sleep(0.05)
        code = EXIT_TO_BE_RESUMED if all_live else EXIT_TERMINATED
    if is_first_rank() and code != EXIT_TERMINATED:
        EXIT.record(code, message)
        print_last(message, after_signal=True)
    leave(code)


def ranks_are_alive() -> bool:
    """Return True if all ranks that the same launcher has started on this machine are alive."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_alive = 0
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children() if num_ranks > 1 else ():
            with contextlib.suppress(psutil.Error):
                num_alive += process.status() != psutil.STATUS_ZOMBIE and "LOCAL_RANK" in process.environ()
    return num_ranks == 1 or num_alive >= num_ranks


class ShutdownHandler:
    """The signals that this rank has received while it trains, and the end of its time: `max_hours` after `started`,
    as time.time(); None: it has any time. `on_signal` is called with the text of a signal."""

    def __init__(self, max_hours: float | None, started: float, on_signal: Callable[[str], None] = lambda text: None):
        self._on_signal = on_signal
        self._deadline = None if max_hours is None else started + 3600 * max_hours
        self._reason = StopReason.NONE
        self._received_at = 0.0

    def receive(self, number: int) -> None:
        """Record the first signal. A second one ends this process at once.

        SIGHUP never ends it, and does not count as the first: a terminal that closes sends it more than once, and also
        after a Ctrl-C that has ended the terminal's own program.
        """
        if self._received_at:
            if number == signal.SIGHUP or time.time() <= self._received_at + REPEATED_SIGNAL_S:
                return
            code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED
            if EXIT.code is None and is_first_rank():
                record_code(code, f"ended at once by a second signal ({SIGNALS[signal.Signals(number)].text})")
            leave(code if EXIT.code is None else EXIT.code)
            return
        if self._reason is StopReason.SIGHUP and number == signal.SIGHUP:
            return
        self._reason = SIGNALS[signal.Signals(number)]
        self._received_at = 0.0 if number == signal.SIGHUP else time.time()
        self._on_signal(self._reason.text)
        if number == signal.SIGINT and is_first_rank() and EXIT.code is None:
            message = b"\nCtrl-C: this update is finished and saved; a second Ctrl-C leaves at once\n"
            os.write(sys.stderr.fileno(), message)

    def reason(self) -> StopReason:
        """Return the reason why this rank has to stop."""
        if not self._reason and self._deadline is not None and time.time() >= self._deadline:
            self._reason = StopReason.OUT_OF_TIME
        return self._reason
