"""Leaving early and in order: signals of schedulers and people, the time that the run was given, and anomalies.

Each rank may be signalled by itself, or only one of them. What a rank has received goes round with the figures of
every update (train/training/step.py), so all leave after the same update, when its checkpoint is written.
"""

import enum
import os
import signal
import sys
import time
from collections.abc import Callable

from train.recipe.errors import leave

EXIT_TO_BE_RESUMED = 85
EXIT_NEEDS_A_PERSON = 86  # the same command would come to the same end
ONE_SIGNAL_S = 1.0  # within which a signal may come twice: a scheduler sends it, and the launcher passes it on


class StopReason(enum.IntEnum):
    """Why a run stopped before its last update. Ranks exchange the number."""

    NONE = 0
    SIGTERM = 1
    SIGUSR1 = 2
    CTRL_C = 3
    OUT_OF_TIME = 4
    ANOMALY = 5
    CHECKPOINT_FAILED = 6

    @property
    def text(self) -> str:
        """The reason in a message: `stopped by TEXT`."""
        named = {"CTRL_C": "Ctrl-C", "OUT_OF_TIME": "max_hours", "ANOMALY": "an anomaly",
                 "CHECKPOINT_FAILED": "a checkpoint that failed"}  # fmt: skip
        return named.get(self.name, self.name)

    @property
    def is_signal(self) -> bool:
        return self in SIGNALS.values()

    @property
    def exit_code(self) -> int:
        """The exit code of a run that stopped for this reason; 0: it came to its end."""
        if self is StopReason.NONE:
            return 0
        needs_a_person = self in (StopReason.ANOMALY, StopReason.CHECKPOINT_FAILED)
        return EXIT_NEEDS_A_PERSON if needs_a_person else EXIT_TO_BE_RESUMED


SIGNALS = {
    signal.SIGTERM: StopReason.SIGTERM, signal.SIGUSR1: StopReason.SIGUSR1, signal.SIGINT: StopReason.CTRL_C,
}  # fmt: skip


class ShutdownHandler:
    """The signals that this rank has received, and the time that its run has left.

    Args:
        max_hours: after this time since `started` the run is to stop; None: never.
        started: time.time() when the program was started.
        on_signal: is given the name of the signal that was received.
    """

    def __init__(self, max_hours: float | None, started: float, on_signal: Callable[[str], None] = lambda name: None):
        self._on_signal = on_signal
        self._deadline = None if max_hours is None else started + 3600 * max_hours
        self._reason, self._received_at = StopReason.NONE, 0.0

    def install(self) -> None:
        """Handle the signals from now on. The first is noted, a later one ends this process at once."""
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame) -> None:
        if self._received_at:
            if time.time() > self._received_at + ONE_SIGNAL_S:
                leave(128 + number)
            return
        self._reason, self._received_at = SIGNALS[signal.Signals(number)], time.time()
        self._on_signal(self._reason.text)
        if number == signal.SIGINT and int(os.environ.get("RANK", "0")) == 0:
            text = "\nCtrl-C: this update is finished and saved; a second Ctrl-C leaves at once\n"
            os.write(sys.stderr.fileno(), text.encode())

    def reason(self) -> StopReason:
        """Why this rank is to stop."""
        if not self._reason and self._deadline is not None and time.time() >= self._deadline:
            self._reason = StopReason.OUT_OF_TIME
        return self._reason
