"""Launches on the simulated device and on the CPU, and how they are compared."""

import os
import subprocess
import sys
from pathlib import Path

from helpers import ROOT, largest_differences, launch, launched, updates

HERE = Path(__file__).resolve().parent
GIB = 2**30
FIGURES = ("loss", "grad_norm", "learning_rate")


class Runs:
    """Launches of a short run, each made once in a session: its metrics, and its output folder."""

    def __init__(self, folder: Path, recipes: dict[str, list], device):
        self.folder, self.recipes, self.device, self.done = folder, recipes, device, {}

    def __call__(self, where: str, strategy: str, *more, task: str = "clm", steps: int = 6) -> tuple[list[dict], Path]:
        """`where`: cpu, device, or without_data: a device on which nothing is computed. Two processes and as many
        devices, but under `single`; micro-batches of 2."""
        key = (where, strategy, *more, task, steps)
        if key not in self.done:
            output = self.folder / str(len(self.done))
            self.done[key] = launch(output, *self._arguments(task, steps, more), **self._where(where, strategy),
                                    strategy=strategy, task=task), output  # fmt: skip
        return self.done[key]

    def _arguments(self, task: str, steps: int, more) -> list:
        return [*self.recipes[task], "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "2",
                "--max_train_steps", steps, *more]  # fmt: skip

    def _where(self, where: str, strategy: str, *sizes: int, processes: int | None = None) -> dict:
        processes = processes or (1 if strategy == "single" else 2)
        sizes = sizes or (16 * GIB,) * processes
        if where == "cpu":
            return {"processes": processes}
        without_data = "1" if where == "without_data" else "0"
        return {"launcher": True, "processes": processes, **self.device(*sizes), "SIMGPU_WITHOUT_DATA": without_data}

    def within(self, output: Path, sizes: tuple[int, ...], strategy: str, *more, task: str = "clm", steps: int = 6):
        """A run with devices of these sizes, however it ends."""
        return launched(output, *self._arguments(task, steps, more), strategy=strategy, task=task,
                        **self._where("device", strategy, *sizes))  # fmt: skip


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
