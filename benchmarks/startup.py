"""Seconds from `accelerate launch` to the first update, phase by phase, for one process and for ZeRO-2 with two.

    python benchmarks/loop_speed.py --startup

Launches train/clm.py for real, from the running environment's own `accelerate`, on a small text and a tiny GPT-2, so
that nearly all of the time is what every run pays before it trains: the launcher, imports, process group, engine. Each
launch has a folder and a data cache of its own, and the strategies take turns. The seconds are the run's own record
(environment.json, seconds_to_first_update, measured on rank 0 from the launcher's start on).
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zerofit.record.terminal import table

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = {"single": 1, "zero2": 2}  # accelerate_configs/NAME.yaml: processes
LAUNCHES = 3
TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind at all\n" * 400
RECIPE = {
    "config_name": "gpt2",
    "config_overrides": "n_layer=2,n_head=2,n_embd=64,n_positions=64",
    "train_tokenizer_vocab_size": 300,
    "block_size": 64,
    "per_device_train_batch_size": 2,
    "max_train_steps": 2,
    "report_to": "none",
}


def measure_startup(number_of_launches: int = LAUNCHES) -> dict[str, Any]:
    """Launch each strategy so many times, print the medians, and return all figures."""
    launches: dict[str, list[dict[str, float]]] = {name: [] for name in STRATEGIES}
    for number in range(1, number_of_launches + 1):
        for name, processes in STRATEGIES.items():
            phases = launch(name, processes)
            launches[name].append(phases)
            print(f"launch {number}  {name:8} {phases['total']:6.1f} s to the first update", flush=True)
    medians = {name: median_phases(each) for name, each in launches.items()}
    print(f"\n{phase_table(medians)}\n")
    return {"median_s": medians, "launches_s": launches}


def launch(strategy: str, processes: int) -> dict[str, float]:
    """Seconds of each phase of one launch, their `total`, and the seconds of the whole command until its `exit`.

    Raises:
        RuntimeError: the run failed; its last output is the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        text, run = Path(folder) / "text.txt", Path(folder) / "run"
        text.write_text(TEXT, encoding="utf-8")
        files = {"train_file": text, "output_dir": run, "cache_dir": Path(folder) / "cache"}
        options = [f"--{name}={value}" for name, value in {**RECIPE, **files}.items()]
        began = time.perf_counter()
        done = subprocess.run([*launcher(strategy, processes), *options], cwd=ROOT, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        if done.returncode:
            raise RuntimeError(f"{strategy} left with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
        phases = json.loads((run / "environment.json").read_text())["seconds_to_first_update"]
    return {**phases, "total": round(sum(phases.values()), 2), "exit": round(seconds, 2)}


def launcher(strategy: str, processes: int) -> list[str]:
    return [
        str(Path(sys.executable).parent / "accelerate"),
        "launch",
        "--config_file",
        f"accelerate_configs/{strategy}.yaml",
        "--num_processes",
        str(processes),
        "--main_process_port",
        "0",
        "train/clm.py",
    ]


def median_phases(launches: list[dict[str, float]]) -> dict[str, float]:
    return {phase: statistics.median(each[phase] for each in launches) for phase in launches[0]}


def phase_table(medians: dict[str, dict[str, float]]) -> str:
    """Phases down, strategies across: median seconds."""
    shown = {"total": "to the first update", "exit": "until the command ends"}
    phases = list(dict.fromkeys(phase for each in medians.values() for phase in each if phase not in shown))
    rows = [("median seconds", *medians)]
    for phase in [*phases, *shown]:
        rows.append((shown.get(phase, phase), *(f"{each.get(phase, 0.0):.2f}" for each in medians.values())))
    return table(rows)
