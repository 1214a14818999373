"""The command line that starts ranks, and launches that a tool starts: each can be ended at any moment, with every
process that it has started."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from zerofit.launch.schedulers import ONE_MACHINE, PORT, Machines
from zerofit.recipe.places import PACKAGE, script

LAUNCHER = (sys.executable, "-P", str(PACKAGE / "launch" / "supervisor.py"))  # `accelerate launch`
MARK = "ZEROFIT_LAUNCH"  # a variable of every process of a launch; ranks have process groups of their own
TRACEBACK = "Traceback (most recent call last)"
UPDATE = re.compile(r"^update +(\d+)/", re.MULTILINE)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launcher_options(
    config: Path, processes: int, machines: Machines = ONE_MACHINE, port: int | None = None
) -> list[str]:
    """The options of `accelerate launch`, which every launch of ours gives it; without a port any free one, on one
    machine."""
    words = ["--config_file", str(config), "--num_processes", str(processes)]
    words += ["--num_machines", str(machines.count), "--machine_rank", str(machines.rank)]  # also if the YAML has some
    if machines.count > 1:
        words += ["--main_process_ip", machines.address or ""]
    default = machines.port or PORT if machines.count > 1 else "0"
    return [*words, "--main_process_port", default if port is None else str(port)]


@dataclass(frozen=True)
class LaunchedRun:
    """A training run that can be launched again and again, with any number of processes."""

    task: str
    config_file: Path
    recipe: Path
    output: Path
    flags: tuple[str, ...] = ()

    def command(self, num_processes: int) -> list[str]:
        """The command line of a launch."""
        options = ["--config", str(self.recipe), "--output_dir", str(self.output), *self.flags]
        return [*LAUNCHER, *launcher_options(self.config_file, num_processes), str(script(self.task)), *options]


class RunningLaunch:
    """A launch that is started as a `with` block begins. As the block is left, also by an error, all its processes are
    killed.

    Args:
        mark: of its processes; by default a new one. With the mark of an earlier launch, `kill` ends its processes.
    """

    def __init__(
        self,
        command: list[str],
        output: Path,
        log: Path,
        mark: str | None = None,
        environment: dict[str, str] | None = None,
    ):
        self.command, self.output, self.log = command, output, log
        self.mark = mark or uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | None = None
        self.environment, self.began = environment or {}, time.time()

    def __enter__(self) -> "RunningLaunch":
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # away from this terminal's Ctrl-C
                    env={**os.environ, **self.environment, MARK: self.mark},
                )
        except BaseException:
            self.kill()
            raise
        self.began = time.time()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def seconds(self) -> float:
        """Seconds since its start."""
        return time.time() - self.began

    def wait(self, limit_s: float, until: Callable[["RunningLaunch"], bool] | None = None) -> str:
        """Wait for its end, or until `until` returns True. Returns ended, until, or late after `limit_s`."""
        assert self.process is not None, "it has not been started"
        while self.process.poll() is None:
            if self.seconds > limit_s:
                return "late"
            if until is not None and until(self):
                return "until"
            time.sleep(0.05 if until is None else 0.005)
        return "ended"

    @property
    def exit_code(self) -> int | None:
        """The exit code of its launcher; None before its end."""
        return None if self.process is None else self.process.poll()

    @property
    def newest_update(self) -> int:
        """The last update that this launch has printed; 0: none."""
        found = UPDATE.findall(self.text)
        return int(found[-1]) if found else 0

    @property
    def is_saving(self) -> bool:
        """Return whether this launch is writing a checkpoint."""
        for path in (self.output / "checkpoints").glob("update_*.partial"):
            with suppress(OSError):
                if path.stat().st_mtime > self.began - 0.1:  # a file system's clock is coarser
                    return True
        return False

    @property
    def has_saved(self) -> bool:
        """Return whether a checkpoint is complete, of this launch or of an earlier one."""
        return (self.output / "checkpoints" / "latest").is_dir()

    def kill(self) -> None:
        """Kill every process of the launch. Returns when all are gone; signals that would end this process wait until
        then."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            quiet, dying, until = 0, set[psutil.Process](), time.monotonic() + 60
            while quiet < 2:  # a process that has just been started has no mark yet
                members = {*self.members()}
                for member in members:
                    with suppress(OSError):
                        os.kill(member.pid, signal.SIGKILL)
                if self.process is not None:
                    self.process.wait()
                dying = {process for process in dying | members if _is_alive(process)}
                quiet = 0 if members or dying else quiet + 1
                if time.monotonic() > until:
                    raise RuntimeError(f"processes {dying} cannot be killed")
                time.sleep(0.01)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def members(self) -> list[psutil.Process]:
        """The processes of the launch that are alive. (One that is ending has no mark any more.)"""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and _is_alive(process):
                    found.append(process)
        return found

    @property
    def text(self) -> str:
        """The output of the run so far."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.is_file() else ""


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process can still hold resources such as files. A zombie holds none."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit in this block, so that no launch outlives it and no file stays unfinished.

    What is ignored, as under nohup, stays so.
    """

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def failure(launch: RunningLaunch, how: str) -> str | None:
    """Return why a launch failed, with its last lines; None if it did not."""
    code, text = launch.exit_code, launch.text
    if how == "late":
        problem = f"has not ended in {launch.seconds / 60:.1f} minutes"
    elif code:
        problem = f"ended with exit code {code}"
    elif TRACEBACK in text:
        problem = "ended well, but printed a traceback"
    else:
        return None
    last = "\n".join(f"  | {line}" for line in text.splitlines()[-12:])
    return f"{problem}. Its output is {launch.log}, and ends with\n{last}"


def mistake(launch: RunningLaunch) -> str | None:
    """The message of a run that refused its recipe; None if its output has no such message."""
    message = re.search(r"^error: (.*(?:\n .*)*)", launch.text, re.MULTILINE)  # the lines of a list are indented
    return message[1].strip() if message else None
