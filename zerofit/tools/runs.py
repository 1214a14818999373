"""A launch that a tool starts, watches, and can end at any moment with every process that it has started."""

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from zerofit.launch.machines import LAUNCH_COMMAND, launcher_options
from zerofit.recipe.files import script

LAUNCH_VARIABLE = "ZEROFIT_LAUNCH"  # marks every process of a launch, since ranks have their own process groups
TRACEBACK_HEADER = "Traceback (most recent call last)"
UPDATE_LINE = re.compile(r"^update +(\d+)/", re.MULTILINE)
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KILL_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class LaunchedRun:
    """A training run that can be launched again and again, with any number of processes."""

    task: str
    config_file: Path
    recipe: Path
    output: Path
    flags: tuple[str, ...] = ()

    def command(self, num_processes: int) -> list[str]:
        """Return the command line of a launch with this number of processes."""
        options = ["--config", str(self.recipe), "--output_dir", str(self.output), *self.flags]
        return [*LAUNCH_COMMAND, *launcher_options(self.config_file, num_processes), str(script(self.task)), *options]


@dataclass
class RunningLaunch:
    """A launch that is started as a `with` block begins. At the end of the block, and after an error in it, all its
    processes are killed."""

    command: list[str]
    output: Path  # the folder of the run
    log: Path  # the file of the launch's output
    mark: str = ""  # in the environment of the launch's processes; by default a new one
    environment: dict[str, str] = field(default_factory=dict)  # variables besides those of this process
    process: subprocess.Popen[bytes] = field(init=False)
    began: float = field(init=False)  # as time.time()

    def __enter__(self) -> "RunningLaunch":
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.mark = self.mark or uuid.uuid4().hex
        try:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # away from this terminal's Ctrl-C
                    env={**os.environ, **self.environment, LAUNCH_VARIABLE: self.mark},
                )
        except BaseException:
            kill_launch(self.mark)
            raise
        self.began = time.time()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill every process of the launch, and return when all are gone."""
        kill_launch(self.mark)
        self.process.wait()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.time() - self.began

    def wait(self, limit_s: float, until: Callable[["RunningLaunch"], bool] | None = None) -> str:
        """Wait for the end of the launch, or until `until` returns True. Returns ended, until, or late after
        `limit_s`."""
        while self.process.poll() is None:
            if self.seconds > limit_s:
                return "late"
            if until is not None and until(self):
                return "until"
            time.sleep(0.05 if until is None else 0.005)
        return "ended"

    @property
    def exit_code(self) -> int | None:
        """The exit code of the launcher; None before its end."""
        return self.process.poll()

    @property
    def newest_update(self) -> int:
        """The number of the last update that this launch has printed; 0: it has printed none."""
        updates = UPDATE_LINE.findall(self.text)
        return int(updates[-1]) if updates else 0

    @property
    def is_saving(self) -> bool:
        """True while this launch writes a checkpoint."""
        for path in (self.output / "checkpoints").glob("update_*.partial"):
            with suppress(OSError):
                if path.stat().st_mtime > self.began - 0.1:  # a file system's clock is coarser
                    return True
        return False

    @property
    def text(self) -> str:
        """The output of the launch so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")


def kill_launch(mark: str) -> None:
    """Kill every process of the launch with this mark, and return when all are gone. Signals that would end this
    process wait until then. Raises RuntimeError: a process cannot be killed."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        rounds_without_processes = 0
        dying: set[psutil.Process] = set()
        until = time.monotonic() + KILL_TIMEOUT_S
        while rounds_without_processes < 2:  # a process that has just been started has no mark yet
            members = find_processes(mark)
            for process in members:
                with suppress(psutil.Error):
                    process.kill()
            dying = set(filter(_is_alive, dying | members))  # a process that is ending has no mark any more
            rounds_without_processes = 0 if members or dying else rounds_without_processes + 1
            if time.monotonic() > until:
                raise RuntimeError(f"processes {dying} cannot be killed")
            time.sleep(0.01)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def find_processes(mark: str) -> set[psutil.Process]:
    """Return the living processes of the launch with this mark."""
    processes = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(LAUNCH_VARIABLE) == mark and _is_alive(process):
                processes.add(process)
    return processes


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process can still hold resources such as files. A zombie holds none."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Run a block in which SIGTERM and SIGHUP raise SystemExit, so that no launch outlives it and no file stays
    unfinished. A signal that is ignored, as under nohup, stays ignored."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, leave) for number in handled}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def failure(launch: RunningLaunch, how: str) -> str | None:
    """Return why a launch failed, with the last lines of its output; None if it did not fail. `how`: as
    `RunningLaunch.wait` returned."""
    code = launch.exit_code
    text = launch.text
    if how == "late":
        problem = f"has not ended in {launch.seconds / 60:.1f} minutes"
    elif code:
        problem = f"ended with exit code {code}"
    elif TRACEBACK_HEADER in text:
        problem = "ended well, but printed a traceback"
    else:
        return None
    last = "\n".join(f"  | {line}" for line in text.splitlines()[-12:])
    return f"{problem}. Its output is {launch.log}, and ends with\n{last}"


def mistake(launch: RunningLaunch) -> str | None:
    """Return the message of a run that refused its recipe; None if its output has no such message."""
    message = re.search(r"^error: (.*(?:\n .*)*)", launch.text, re.MULTILINE)  # the lines of a list are indented
    return message[1].strip() if message else None
