"""A launch in this process: signals go to the ranks, and it ends with the exit code of the run.

    python -P zerofit/launch/supervisor.py --config_file accelerate_configs/zero3.yaml ... train/clm.py ...

is `accelerate launch`, as tools start it; it ends when they do.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # started alone: the package's folder is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from zerofit.health.shutdown import SIGNALS, end_with_parent, heard_signals
from zerofit.launch.exit_code import ExitCode, Restarts
from zerofit.recipe.errors import EXIT_INTERRUPTED, EXIT_TO_BE_RESUMED, EXIT_USER_ERROR, UserError
from zerofit.record.terminal import outlive_the_terminal


class Supervisor:
    """Starts a launch and waits for it. It removes the exit code of the launch before at once, and keeps mistakes and
    signals on record (`exit_code`; None: nothing is kept). Only machine 0 keeps the record."""

    def __init__(self, exit_code: ExitCode | None = None):
        self._exit_code = exit_code
        self._restarts = Restarts(None if exit_code is None else exit_code.folder.path)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Supervisor":
        if self._exit_code is not None:
            self._exit_code.forget()
            outlive_the_terminal()
        self._before = {number: signal.signal(number, self._receive) for number in heard_signals()}
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, UserError):
            self._write(EXIT_USER_ERROR, error.report())

    def run(self, words: list[str], environment: dict[str, str]) -> int:
        """Launch a program and wait for its end. Returns the exit code on record, or the launcher's where there is
        none and on machines but the first, to which it has been told (agent.py)."""
        os.environ.clear()
        os.environ.update(environment)
        from zerofit.launch.agent import launch  # with torch

        code = launch(words, self._restarts, self._recorded)
        if (recorded := self._recorded()) is not None:
            return recorded
        if code == EXIT_USER_ERROR:
            self._write(code, "the launcher has refused to start")
        return code

    def _receive(self, number: int, frame: Any) -> None:
        """Pass a signal on to the ranks: the launch ends when they have, and at once where there are none."""
        ranks = psutil.Process().children()
        if not ranks:
            code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TO_BE_RESUMED
            message = f"stopped by {SIGNALS[signal.Signals(number)].text} before its processes were started"
            print(message, file=sys.stderr, flush=True)
            self._write(code, message)
            recorded = self._recorded()
            raise SystemExit(code if recorded is None else recorded)
        self._restarts.is_stopped = True
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                rank.send_signal(number)

    def _recorded(self) -> int | None:
        """The exit code that the ranks of machine 0 have left; None on other machines."""
        if self._exit_code is None or not self._exit_code.is_main:
            return None
        return self._exit_code.folder.environment().get("exit_code")

    def _write(self, code: int, reason: str) -> None:
        if self._exit_code is not None and self._exit_code.is_main:
            self._exit_code.write(code, reason)


if __name__ == "__main__":
    end_with_parent()
    with Supervisor() as supervisor:
        sys.exit(supervisor.run(sys.argv[1:], dict(os.environ)))
