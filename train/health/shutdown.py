"""Leaving early and in order: signals of schedulers and people, the time that the run was given, and faults.

Each rank may be told by itself, or only one of them. What a rank has heard goes round with the figures of every update
(train/training/loop.py), so all leave after the same update, when its checkpoint is written.
"""

import os
import signal
import sys
import time
from collections.abc import Callable

from train.recipe.errors import leave

EXIT_TO_BE_RESUMED = 85
EXIT_NEEDS_A_PERSON = 86  # the same command would come to the same end
# What goes round is the number.
REASONS = {1: "SIGTERM", 2: "SIGUSR1", 3: "Ctrl-C", 4: "max_hours", 5: "a fault", 6: "a checkpoint that failed"}
ONE_SIGNAL = 1.0  # seconds in which a signal may come twice: a scheduler sends it, and the launcher passes it on
SIGNALS = {signal.SIGTERM: 1, signal.SIGUSR1: 2, signal.SIGINT: 3}
OUT_OF_TIME, FAULT, SAVE_FAILED = 4, 5, 6


def exit_code(stopped: int) -> int:
    """The exit code of a run that stopped for this reason; 0: it came to its end."""
    if not stopped:
        return 0
    return EXIT_NEEDS_A_PERSON if stopped in (FAULT, SAVE_FAILED) else EXIT_TO_BE_RESUMED


class ShutdownHandler:
    """What this rank has heard, and what the clock says.

    Args:
        max_hours: after this time since `began` the run is to stop; None: never.
        save_minutes: after this time since the last checkpoint another one is due; 0: never.
        began: time.time() when the program was started.
        told: is told the name of the signal that was heard.
    """

    def __init__(
        self,
        max_hours: float | None,
        save_minutes: float,
        began: float,
        told: Callable[[str], None] = lambda name: None,
    ):
        self.told = told
        self.until = None if max_hours is None else began + 3600 * max_hours
        self.every, self.saved = 60 * save_minutes, time.time()
        self.heard, self._at = 0, 0.0

    def listen(self) -> None:
        """Take the signals from now on. The first is noted, a later one ends this process at once."""
        for number in SIGNALS:
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame) -> None:
        if self._at:
            if time.time() > self._at + ONE_SIGNAL:
                leave(128 + number)
            return
        self.heard, self._at = SIGNALS[signal.Signals(number)], time.time()
        self.told(REASONS[self.heard])
        if number == signal.SIGINT and int(os.environ.get("RANK", "0")) == 0:
            text = "\nCtrl-C: this update is finished and saved; a second Ctrl-C leaves at once\n"
            os.write(sys.stderr.fileno(), text.encode())

    def code(self) -> int:
        """The number of the reason to stop; 0: none."""
        if not self.heard and self.until is not None and time.time() >= self.until:
            self.heard = OUT_OF_TIME
        return self.heard

    def clock(self) -> bool:
        """Whether it is time for a checkpoint."""
        return bool(self.every) and time.time() >= self.saved + self.every

    def has_saved(self) -> None:
        """A checkpoint has just been begun."""
        self.saved = time.time()
