"""The supervisor of a launch in this process: it passes signals on to the ranks, and ends with the run's exit code.

    python -P zerofit/launch/supervisor.py --config_file accelerate_configs/zero3.yaml ... train/clm.py ...

is `accelerate launch` as tools start it. It ends when the tool ends.
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

from zerofit.health.shutdown import SIGNALS, end_with_parent, signals_to_handle
from zerofit.launch.exit_code import ExitCode, Restarts
from zerofit.recipe.errors import EXIT_INTERRUPTED, EXIT_TO_BE_RESUMED, EXIT_USER_ERROR, UserError
from zerofit.record.terminal import outlive_the_terminal


class Supervisor:
    """The context in which a launch is started and waited for. As it is entered, the exit code of an earlier launch is
    removed; mistakes and signals are written to `exit_code` (None: nothing is recorded), on machine 0 only."""

    def __init__(self, exit_code: ExitCode | None = None):
        self._exit_code = exit_code
        self._restarts = Restarts(None if exit_code is None else exit_code.folder.path)
        self._handlers: dict[int, Any] = {}  # {signal: its handler before this context}

    def __enter__(self) -> "Supervisor":
        if self._exit_code is not None:
            self._exit_code.forget()
            outlive_the_terminal()
        self._handlers = {number: signal.signal(number, self._receive) for number in signals_to_handle()}
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if isinstance(error, UserError):
            self._write(EXIT_USER_ERROR, error.report())

    def run(self, words: list[str], environment: dict[str, str]) -> int:
        """Launch a program and wait for its end. Returns the recorded exit code; without one, and on other machines
        than the first, that of the launcher, which has agreed on it with the first machine (agent.py)."""
        os.environ.clear()
        os.environ.update(environment)
        from zerofit.launch.agent import launch  # imports torch

        code = launch(words, self._restarts, self._recorded)
        if (recorded := self._recorded()) is not None:
            return recorded
        if code == EXIT_USER_ERROR:
            self._write(code, "the launcher has refused to start")
        return code

    def _receive(self, number: int, frame: Any) -> None:
        """Pass a signal on to the ranks: the launch ends when they have ended, and at once if there are none yet."""
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
        """Return the exit code that the ranks have recorded; None on other machines than the first."""
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
