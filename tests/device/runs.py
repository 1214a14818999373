"""Launches on the simulated device and on the CPU, and how they are compared."""

import os
import subprocess
import sys
from pathlib import Path

from helpers import ROOT, environment, largest_differences, launched, metrics, updates
from ranks import rank_environments

HERE = Path(__file__).resolve().parent
GIB = 2**30
FIGURES = ("loss", "grad_norm", "learning_rate")


class Runs:
    """Short runs of two processes (under `single` one) with micro-batches of 2, which have as many devices.

    `where`: cpu, device, or without_data: a device on which nothing is computed.
    """

    def __init__(self, folder: Path, recipes: dict[str, list], server, device):
        self.folder, self.recipes, self.server, self.device, self.done = folder, recipes, server, device, {}

    def __call__(self, where: str, strategy: str, *more, task: str = "clm", steps: int = 6) -> tuple[list[dict], Path]:
        """One that has to end well, made once in a session: its metrics, and its output folder."""
        key = (where, strategy, *more, task, steps)
        if key not in self.done:
            output = self.folder / str(len(self.done))
            done = self.launched(output, where, strategy, *more, task=task, steps=steps)
            assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
            self.done[key] = metrics(output), output
        return self.done[key]

    def launched(self, output: Path, where: str, strategy: str, *more, task: str = "clm", steps: int = 6,
                 sizes: tuple[int, ...] = ()) -> subprocess.CompletedProcess:  # fmt: skip
        """One that may end as it likes; on devices of these sizes it is launched for real."""
        words = [*self.recipes[task], "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "2",
                 "--max_train_steps", steps, *more]  # fmt: skip
        processes = 1 if strategy == "single" else 2
        if where == "device" and not sizes:
            program = [HERE / "rank.py", ROOT / "train" / f"{task}.py", "--strategy", strategy, "--output_dir", output]
            ranks = rank_environments(environment(), processes)
            return self.server.run([*map(str, (*program, *words))], ranks, ROOT, timeout=400)
        how = {"launcher": True, **self.device(*(sizes or (16 * GIB,) * processes))} if where != "cpu" else {}
        how |= {"SIMGPU_WITHOUT_DATA": "1"} if where == "without_data" else {}
        return launched(output, *words, strategy=strategy, processes=processes, task=task, **how)


def on_device(device, *arguments: str) -> subprocess.CompletedProcess:
    """pytest in a Python that has a simulated device; this one must not have it, other tests run here."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=3000, env={**os.environ, **device(16 * GIB)}
    )


def differences(ours: list[dict], theirs: list[dict]) -> dict[str, float]:
    return largest_differences(ours, theirs, FIGURES)


def peak(lines: list[dict]) -> int:
    return max(line["peak_memory_bytes"] for line in updates(lines))


def steady_peak(lines: list[dict]) -> int:
    """That every update after the first reaches: now and then a thread of gloo's holds a tensor longer."""
    return min(line["peak_memory_bytes"] for line in updates(lines)[1:])
