"""`zerofit plan --calibrate`: measures this machine in less than a minute, and keeps the result for later plans."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from zerofit.estimate.device_speeds import VERSION, Calibration, cpu_name
from zerofit.estimate.operations import ALL_REDUCE, MATRIX, MEMORY
from zerofit.recipe.errors import UserError
from zerofit.record.terminal import rounded, say
from zerofit.strategy.devices import device_name
from zerofit.strategy.gpu_table import SLICE, gpu_of
from zerofit.strategy.gpus import num_devices

LIMIT_S = 400  # it takes 20 to 40 on an idle machine


def calibrate(processes: int) -> Calibration:
    """Measure with so many processes of this machine at the same time, and keep the result.

    Raises:
        UserError: more processes than devices, or a process fails.
    """
    devices = num_devices()
    if devices and processes > devices:
        raise UserError(f"num_gpus = {processes}: this machine has {devices}. Use --calibrate --num_gpus {devices}")
    device = _name_of_gpu() if devices else cpu_name()
    began = time.monotonic()
    found = _measure(processes)
    measured = f"torch {torch.__version__}, {processes} process{'es' if processes > 1 else ''}, {time.strftime('%F')}"
    calibration = Calibration(VERSION, device, processes, measured=measured, **found)
    path = calibration.write()
    say(*describe(calibration), f"kept in   {path} ({time.monotonic() - began:.0f} s)")
    return calibration


def describe(calibration: Calibration) -> list[str]:
    """What was found, each the highest rate of one process."""
    best = {name: max(rate for _, rate in points) for name, points in (calibration.rates | calibration.links).items()}
    products = ", ".join(f"{rounded(best[f'{MATRIX} {one}'] / 1e9)} GFLOP/s in {word}"
                         for one, word in (("single", "fp32"), ("half", "bf16")))  # fmt: skip
    links = best.get(f"{ALL_REDUCE} single")
    lines = [
        f"measured  {calibration.device}, {calibration.processes} process{'es' * (calibration.processes > 1)}",
        f"products  {products}, each process",
        f"memory    {rounded(best[f'{MEMORY} single'] / 1e9)} GB/s, each process",
        f"Adam      {rounded(calibration.adam / 1e6)} million weights/s on the host",
    ]
    return lines + ([f"link      {rounded(links / 1e9)} GB/s of an all-reduce"] if links else [])


def _name_of_gpu() -> str:
    name = device_name(torch.accelerator.current_accelerator())
    gpu = gpu_of(name)
    return gpu.model if gpu and SLICE not in name else name


def _measure(processes: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
                       "OMP_WAIT_POLICY": "PASSIVE"}  # fmt: skip
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "zerofit.tools.plan.measure", folder], env=environment | {"RANK": str(rank)},
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            ) for rank in range(processes)
        ]  # fmt: skip
        try:
            errors = [worker.communicate(timeout=LIMIT_S)[1] for worker in workers]
        except subprocess.TimeoutExpired:
            raise UserError(
                f"calibrate: the measurement did not end within {LIMIT_S} s. Try again when the machine is idle"
            ) from None
        finally:
            for worker in workers:
                worker.kill()
        if any(worker.returncode for worker in workers):
            last = next(text for worker, text in zip(workers, errors) if worker.returncode).strip().splitlines()[-1]
            raise UserError(f"calibrate: a process failed: {last}")
        return json.loads((Path(folder) / "found.json").read_text())
