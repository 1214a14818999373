"""The seconds of a run's phases before the first update, from the launcher's start on."""

import time

from zerofit.strategy.launch import find_launcher


class Timeline:
    """Named phases that follow each other; each ends where the next begins."""

    def __init__(self) -> None:
        import psutil

        self.started = psutil.Process().create_time()
        self.seconds: dict[str, float] = {}
        launcher = find_launcher()
        if launcher is not None:
            self.seconds["launcher"] = round(self.started - launcher.started, 2)
        self._last = self.started

    def mark(self, phase: str) -> None:
        """Record the end of a start-up phase, and how long it took."""
        now = time.time()
        self.seconds[phase] = round(self.seconds.get(phase, 0.0) + now - self._last, 2)
        self._last = now
