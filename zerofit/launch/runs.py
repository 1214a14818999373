"""The machines of a run, the command line that starts its ranks there, and launches that a tool starts: each can be
ended at any moment, with every process that it has started.

The machines come from the environment variables that schedulers and clouds set. One command runs on each machine; a
scheduler says how many there are, which one this is, and where the first one is. docs/clusters.md has the commands.
`WORLD_SIZE` and `RANK`, as Alibaba's PAI-DLC and Kubeflow's PyTorchJob set them, count machines; where another
scheduler has named these, `WORLD_SIZE` may also count processes, as torchrun has it.
"""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from zerofit.recipe.errors import UserError
from zerofit.recipe.files import PACKAGE_FOLDER, script

DEFAULT_PORT = "29500"  # torchrun's default
# derived ones: below those that Linux gives to connections
FIRST_DERIVED_PORT = 20_000
NUM_DERIVED_PORTS = 12_000
THIS_MACHINE = "or use this machine alone: --num_machines 1"
GENERIC = "environment; WORLD_SIZE is read as the number of machines"
# {scheduler: variables of the number of machines, of this one's number, of the first one's address (it may begin a
# list), of its port, and of what tells a job from others on the same machines}
SCHEDULERS = {
    # slurm.schedmd.com/srun.html: one task on each machine, `srun --ntasks-per-node=1`
    "Slurm": ("SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_STEP_NODELIST", "MASTER_PORT", "SLURM_JOB_ID"),
    # kubeflow.org/docs/components/trainer: torchrun's own variables
    "Kubeflow Trainer": ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", ""),
    # docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html
    "SkyPilot": ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "MASTER_PORT", "SKYPILOT_TASK_ID"),
    # dstack.ai/docs/concepts/tasks, distributed tasks
    "dstack": ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP", "MASTER_PORT", "DSTACK_RUN_NAME"),
    # docs.open-mpi.org, environment variables: one process on each machine, `mpirun --npernode 1`
    "OpenMPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "MASTER_ADDR", "MASTER_PORT", "PMIX_NAMESPACE"),
    GENERIC: ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", ""),
}
SCHEDULER_NAMES = [name for name in SCHEDULERS if name != GENERIC]
# kubernetes.io/docs/tasks/job: this machine's number; how many there are no variable says.
INDEX = "JOB_COMPLETION_INDEX"
NODE_RANK_VARIABLES = (*(SCHEDULERS[name][1] for name in SCHEDULER_NAMES), INDEX, SCHEDULERS[GENERIC][1])


@dataclass(frozen=True)
class Machines:
    """The number of machines, the number of this one, and the address of the first."""

    count: int
    rank: int | None = 0
    address: str | None = None
    port: str | None = None
    source: str = "no scheduler names others"


ONE_MACHINE = Machines(1)


def read_machines(environment: Mapping[str, str]) -> Machines:
    """The machines from the environment; one machine where it names none. Raises UserError: torchrun or accelerate has
    started this process; a scheduler starts this command on one of several machines only, or several times on each;
    two schedulers contradict each other; a number is none."""
    if "LOCAL_RANK" in environment:
        raise UserError(
            f"LOCAL_RANK = {environment['LOCAL_RANK']!r} is set: a launcher has started this command, and zerofit "
            "launch is a launcher too. Start it directly, or start train/TASK.py --strategy NAME under torchrun"
        )
    slurm_machines = environment.get("SLURM_NNODES", "1")
    if slurm_machines != "1":
        remedy = f"Start it once on each: srun --ntasks-per-node=1 zerofit launch ... ({THIS_MACHINE})"
        count = environment.get("SLURM_STEP_NUM_NODES")
        tasks = environment.get("SLURM_STEP_NUM_TASKS")
        if count is None:
            raise UserError(f"SLURM_NNODES = {slurm_machines}, and this command runs on one of them. {remedy}")
        if tasks not in (None, count):
            raise UserError(f"SLURM_STEP_NUM_TASKS = {tasks} on {count} machines: each needs one launcher. {remedy}")
    local = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    if "OMPI_COMM_WORLD_SIZE" in environment and local != "1":
        raise UserError(
            f"OMPI_COMM_WORLD_LOCAL_SIZE = {local}: each machine needs one launcher. Start one on each, {THIS_MACHINE}"
        )
    named = [machines for name in SCHEDULER_NAMES if (machines := _read(name, environment)) is not None]
    generic = _read(GENERIC, environment)
    machines = named[0] if named else generic
    contradicting = [other for other in named if (other.rank, other.count) != (named[0].rank, named[0].count)]
    if named and generic and (generic.rank not in (None, named[0].rank) or generic.count % named[0].count):
        contradicting.append(generic)
    if machines is not None and contradicting:
        raise UserError(
            f"two schedulers contradict each other: {machines.source}, and {contradicting[0].source}. Unset the "
            "variables of one, or set --num_machines, --machine_rank and --main_process_ip"
        )
    if machines is None and INDEX in environment:
        raise UserError(
            f"{INDEX} = {environment[INDEX]}: this is one pod of an indexed job, and nothing says how many there are. "
            f"Set --num_machines N and --main_process_ip (the name of pod 0), {THIS_MACHINE}"
        )
    if machines is None or machines.count == 1:
        return Machines(1)
    return replace(machines, address=machines.address or environment.get("MASTER_ADDR"))


def _read(name: str, environment: Mapping[str, str]) -> Machines | None:
    """The machines that a scheduler names; None: it has not started this process, or Slurm has on one machine only."""
    count, rank, address, port, job = variables = SCHEDULERS[name]
    if count not in environment or (
        name == "Slurm" and "1" in (environment.get("SLURM_NNODES", "1"), environment[count])
    ):
        return None
    shown = (f"{each} = {' '.join(environment[each].split())}" for each in variables[:4] if each in environment)
    number = number_in(environment, rank) if rank in environment else None
    own_port = environment.get(port)
    if not own_port and environment.get(job):  # one that two jobs on the same machines do not share
        own_port = str(FIRST_DERIVED_PORT + zlib.crc32(environment[job].encode()) % NUM_DERIVED_PORTS)
    # A list of lines, or as Slurm writes it: the first of `gpu[01-04,07],other` is `gpu01`.
    first = next(iter(environment.get(address, "").split()), None)
    if match := re.match(r"([^,\[\]]+)(?:\[([^,\-\]]+)[^\]]*\]([^,\[\]]*))?", first or ""):
        first = "".join(filter(None, match.groups()))
    if name == "Slurm":
        first = environment.get("MASTER_ADDR") or first
    return Machines(number_in(environment, count), number, first, own_port or None, f"{', '.join(shown)} ({name})")


def given_machines(count: int, environment: Mapping[str, str]) -> Machines:
    """Return `count` machines, of which this one has the number that a scheduler's variable gives."""
    name = next((name for name in NODE_RANK_VARIABLES if name in environment), None)
    if count == 1 or name is None:
        return Machines(count, 0 if count == 1 else None, source="--num_machines")
    rank = number_in(environment, name)
    return Machines(count, rank, source=f"--num_machines, {name} = {rank}")


def number_in(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        raise UserError(
            f"{name} = {text!r} in the environment: expected a number. Set --num_machines and --machine_rank"
        )
    return int(text)


LAUNCH_COMMAND = (sys.executable, "-P", str(PACKAGE_FOLDER / "launch" / "supervisor.py"))  # `accelerate launch`
LAUNCH_VARIABLE = "ZEROFIT_LAUNCH"  # a variable of every process of a launch; ranks have process groups of their own
TRACEBACK_HEADER = "Traceback (most recent call last)"
UPDATE_LINE = re.compile(r"^update +(\d+)/", re.MULTILINE)
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launcher_options(
    config: Path, processes: int, machines: Machines = ONE_MACHINE, port: int | None = None
) -> list[str]:
    """The options of `accelerate launch`, which every launch of ours gives it; without a port any free one, on one
    machine."""
    words = ["--config_file", str(config), "--num_processes", str(processes)]
    words += ["--num_machines", str(machines.count), "--machine_rank", str(machines.rank)]  # also if the YAML has some
    if machines.count > 1:
        words += ["--main_process_ip", machines.address or ""]
    default = machines.port or DEFAULT_PORT if machines.count > 1 else "0"
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
        return [*LAUNCH_COMMAND, *launcher_options(self.config_file, num_processes), str(script(self.task)), *options]


class RunningLaunch:
    """A launch that is started as a `with` block begins. As the block is left, also by an error, all its processes are
    killed."""

    def __init__(
        self,
        command: list[str],
        output: Path,
        log: Path,
        mark: str | None = None,
        environment: dict[str, str] | None = None,
    ):
        self.command = command
        self.output = output
        self.log = log
        self.mark = mark or uuid.uuid4().hex  # of its processes; with that of an earlier launch `kill` ends those
        self.process: subprocess.Popen[bytes] | None = None
        self.environment = environment or {}
        self.began = time.time()

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
                    env={**os.environ, **self.environment, LAUNCH_VARIABLE: self.mark},
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
        found = UPDATE_LINE.findall(self.text)
        return int(found[-1]) if found else 0

    @property
    def is_saving(self) -> bool:
        """Return whether this launch is writing a checkpoint."""
        for path in (self.output / "checkpoints").glob("update_*.partial"):
            with suppress(OSError):
                if path.stat().st_mtime > self.began - 0.1:  # a file system's clock is coarser
                    return True
        return False

    def kill(self) -> None:
        """Kill every process of the launch. Returns when all are gone; signals that would end this process wait until
        then."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        try:
            quiet = 0
            dying: set[psutil.Process] = set()
            until = time.monotonic() + 60
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
                if process.environ().get(LAUNCH_VARIABLE) == self.mark and _is_alive(process):
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
    What is ignored, as under nohup, stays so."""

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
    """The message of a run that refused its recipe; None if its output has no such message."""
    message = re.search(r"^error: (.*(?:\n .*)*)", launch.text, re.MULTILINE)  # the lines of a list are indented
    return message[1].strip() if message else None
