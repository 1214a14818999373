"""Leaving early and in order: signals of schedulers and people, and the time that the run was given.

Each rank may be told by itself, or only one of them. What a rank has heard goes round with the figures of every update
(train/run/loop.py), so all leave after the same update, when its checkpoint is written.
"""

import os
import signal
import sys
import time

EXIT_TO_BE_RESUMED = 85
REASONS = {0: "", 1: "SIGTERM", 2: "SIGUSR1", 3: "Ctrl-C", 4: "max_hours"}  # what goes round is the number
SIGNALS = {signal.SIGTERM: 1, signal.SIGUSR1: 2, signal.SIGINT: 3}


class Stop:
    """What this rank has heard.

    Args:
        max_hours: after this time since `began` the run is to stop; None: never.
        began: time.time() when the program was started.
    """

    def __init__(self, max_hours: float | None, began: float):
        self.until = None if max_hours is None else began + 3600 * max_hours
        self.heard = 0

    def listen(self) -> None:
        """Take the signals from now on. The first is noted, a second one ends this process at once."""
        for number in SIGNALS:
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame) -> None:
        if self.heard:
            os._exit(128 + number)
        self.heard = SIGNALS[signal.Signals(number)]
        if int(os.environ.get("RANK", "0")) == 0:
            text = f"\n{REASONS[self.heard]}: this update is finished and saved; a second signal leaves at once\n"
            os.write(sys.stderr.fileno(), text.encode())

    def code(self) -> int:
        """The number of the reason to stop; 0: none."""
        if not self.heard and self.until is not None and time.time() >= self.until:
            self.heard = 4
        return self.heard
