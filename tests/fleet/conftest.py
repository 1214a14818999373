"""Machines, and a run that is started on them."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT, environment, metrics, updates

from zerofit.record.metrics import LineReader

sys.path.insert(0, str(Path(__file__).parent))

from machines import Fleet, wait_for, why_not

NEVER_AGAIN = (0, 2, 86, 87)


@pytest.fixture(scope="session")
def fleet():
    """Three machines."""
    if reason := why_not():
        pytest.skip(reason)
    with Fleet(3) as machines:
        yield machines


@pytest.fixture
def machines(fleet):
    """The same, whose processes end with the test."""
    yield fleet.machines
    fleet.stop()


class Job:
    """A run as a scheduler starts it: the same command on some machines.

    Args:
        options: of the program.
        strategy: a pair.
        processes: of all machines together.
        flags: of `zerofit launch`.
    """

    def __init__(self, folder: Path, machines, options, strategy="ddp", processes=None, flags=()):
        self.folder, self.machines = folder, machines
        self.options, self.strategy, self.flags = options, strategy, [*flags]
        self.processes = processes or 2 * len(machines)
        self.running = {}

    def command(self, number: int, **changes) -> list:
        said = {
            "num_machines": len(self.machines),
            "machine_rank": number,
            "main_process_ip": self.machines[0].address,
            "main_process_port": 29501,
            "num_processes": self.processes,
            "strategy": self.strategy,
            **changes,
        }
        words = [word for name, value in said.items() for word in (f"--{name}", value)]
        return [
            sys.executable, "-m", "zerofit.cli", "launch", *words, *self.flags, "train/clm.py",
            "--output_dir", self.folder, *self.options,
        ]  # fmt: skip

    def file_of(self, scheduler: str, *flags: object) -> str:
        """What `zerofit submit` writes of it, under zero2 on two machines of two processes."""
        command = [
            sys.executable, "-m", "zerofit.cli", "submit", scheduler, "train/clm.py", "--strategy", "zero2", "--nodes",
            2, "--gpus_per_node", 0, "--num_processes", 4, "--rendezvous_minutes", 1, *flags, "--output_dir",
            self.folder, *self.options,
        ]  # fmt: skip
        done = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, number: int, **changes) -> None:
        self.running[number] = self.machines[number].start(*self.command(number, **changes), log=self.log(number))

    def start_all(self) -> "Job":
        for number in range(len(self.machines)):
            self.start(number)
        return self

    def log(self, number: int) -> Path:
        return self.folder.parent / f"{self.folder.name}.machine{number}.log"

    def logs(self) -> list[str]:
        files = map(self.log, range(len(self.machines)))
        return [file.read_text() if file.exists() else "" for file in files]

    def said(self, before: list[str] | None = None) -> str:
        """What all machines have printed, without their stacks.

        Args:
            before: what they had printed by then is left out.
        """
        earlier = before or [""] * len(self.machines)
        new = [log.removeprefix(old) for log, old in zip(self.logs(), earlier, strict=True)]
        return "\n".join(line for log in new for line in log.splitlines() if not line.startswith(("  File", "Thread")))

    def last_update(self) -> int:
        return max((line["update"] for line in LineReader(self.folder / "metrics.jsonl").poll()), default=0)

    def ends(self, limit_s: float = 300) -> list[int]:
        """The exit codes of all machines."""
        wait_for(
            lambda: all(process.poll() is not None for process in self.running.values()), limit_s, "the end of the run"
        )
        return [self.running[number].returncode for number in sorted(self.running)]

    def kept_up(self, limit_s: float = 600, until=None) -> list[int]:
        """As a scheduler would, start again what has ended on a machine, unless its code says never. Returns the
        codes of the last launches, when none is to be started again or `until()` is true."""
        last = time.monotonic() + limit_s
        while True:
            codes = {number: process.poll() for number, process in self.running.items()}
            if all(code in NEVER_AGAIN for code in codes.values()) or (until and until()):
                return list(codes.values())
            assert time.monotonic() < last, f"not within {limit_s:g} s: {codes}\n{self.said()[-8000:]}"
            for number, code in codes.items():
                if code is not None and code not in NEVER_AGAIN:
                    self.start(number)
            time.sleep(0.5)

    def kept_up_to(self, update: int, limit_s: float = 400) -> None:
        codes = self.kept_up(limit_s, lambda: self.last_update() >= update)
        assert self.last_update() >= update, f"{codes}\n{self.said()[-8000:]}"

    def losses(self) -> dict[int, float]:
        return {line["update"]: line["loss"] for line in updates(metrics(self.folder)) if "loss" in line}


@pytest.fixture
def job(tmp_path, machines, llama, material, cache):
    """Makes jobs of a short run; each in its folder."""

    def make(name: str, count: int = 2, steps: int = 30, **how) -> Job:
        options = [
            "--model_name_or_path", llama, "--train_file", material / "text" / "train.txt", "--block_size", 64,
            "--global_batch_size", 8, "--per_device_train_batch_size", 1, "--max_train_steps", steps,
            "--cache_dir", cache, "--validation_split_percentage", 0, "--save_steps", 10, *how.pop("options", ()),
        ]  # fmt: skip
        return Job(tmp_path / name, machines[:count], options, **how)

    return make
