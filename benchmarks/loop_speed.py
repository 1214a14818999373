"""What zerofit's loop costs beside a bare PyTorch loop, and what it gains or loses beside transformers' Trainer.

    python benchmarks/loop_speed.py                   # 15 rounds of 5 candidates: 8 updates each
    python benchmarks/loop_speed.py --rounds 5 --updates 30 --warmup 5

Each round trains the same small GPT-2 from the same weights on the same batches of random tokens (full blocks, fp32)
through every candidate, one after another in one process:

    bare full        a loop written by hand: transformers' own mean loss, fused AdamW, clipping, linear decay
    zerofit full     Trainer.train, that is zerofit.training.loop with its engine, its data and its record on disk
    bare chunked     the bare loop with zerofit's memory-saving loss, so that loops are compared at an equal loss
    zerofit chunked  zerofit as it comes
    Trainer          transformers.Trainer: logs each update to nobody, no progress bar, no evaluation, no saving

The order rotates from round to round and turns around in every other one; a pair that is compared stays side by side.
Tokens/s are those of the wall clock over the updates after the warm-up, the device synchronised at both ends. Ratios
are taken within a round. All candidates must arrive at the same loss, or there is nothing to compare: then it stops.

On a machine that others share, the spread says how much they disturbed. The last column, the ratio of the two fastest
updates in all rounds, is disturbed least; that is why there are many short rounds.

OpenMP's threads sleep while they wait, for all candidates alike, as in zerofit/strategy/launch.py: spinning ones are
a little faster while nobody else wants the cores, and many times slower when somebody does. OMP_WAIT_POLICY=ACTIVE in
front of the command measures everything with torch's default.
"""

import contextlib
import gc
import io
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # OpenMP reads it once, when torch is imported

import torch
from candidates import CANDIDATES, Options, Stopwatch, Workload
from provenance import parse_options, provenance, rotated

from zerofit.model.parameters import count_parameters
from zerofit.record.terminal import duration, table

RATIOS = {  # shown name: (whose tokens/s, divided by whose)
    "zerofit / bare, full loss": ("zerofit full", "bare full"),
    "zerofit / bare, chunked loss": ("zerofit chunked", "bare chunked"),
    "zerofit (chunked) / Trainer": ("zerofit chunked", "Trainer"),
}
SAME_LOSS = 1e-3  # relative; far above rounding, far below any other training


# --------------------------------------------------------------------------------------------------------- measurement


def measure(name: str, work: Workload) -> dict[str, Any]:
    """One candidate, from fresh weights, with all cores and nothing left behind by the one before."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.set_num_threads(work.options.threads or os.cpu_count() or 1)
    gc.collect()
    watch = Stopwatch(work.options, work.device)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        CANDIDATES[name](work, watch)
    return watch.figures()


def measure_rounds(work: Workload) -> list[dict[str, dict[str, Any]]]:
    """{candidate: figures} of each round."""
    rounds = []
    for number in range(work.options.rounds):
        figures = {}
        for name in rotated(list(CANDIDATES), number):
            figures[name] = measure(name, work)
            print(f"round {number + 1}  {name:15}  {figures[name]['tokens_per_s']:10,.0f} tokens/s", flush=True)
        check_same_training(figures)
        rounds.append(figures)
    return rounds


def check_same_training(figures: dict[str, dict[str, Any]]) -> None:
    """Raises RuntimeError if the last losses of a round are not the same."""
    losses = {name: each["last_loss"] for name, each in figures.items()}
    if not max(losses.values()) - min(losses.values()) <= SAME_LOSS * min(losses.values()):
        raise RuntimeError(f"the candidates did not train the same: their last losses are {losses}")


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarise(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    speeds = {name: [figures[name]["tokens_per_s"] for figures in rounds] for name in CANDIDATES}
    fastest = {name: min(figures[name]["fastest_update_s"] for figures in rounds) for name in CANDIDATES}
    ratios = {
        shown: spread([mine / other for mine, other in zip(speeds[a], speeds[b])])
        | {"of_fastest_updates": fastest[b] / fastest[a]}
        for shown, (a, b) in RATIOS.items()
    }
    updates = {name: [figures[name]["median_update_s"] for figures in rounds] for name in CANDIDATES}
    return {
        "tokens_per_s": {name: spread(speeds[name]) for name in CANDIDATES},
        "median_update_s": {name: statistics.median(updates[name]) for name in CANDIDATES},
        "fastest_update_s": fastest,
        "ratios": ratios,
    }


def tables(summary: dict[str, dict[str, Any]]) -> str:
    keys = ("median", "min", "max")
    speeds = [("tokens/s over the rounds", *keys, "median ms", "fastest ms")]
    for name, s in summary["tokens_per_s"].items():
        milliseconds = (f"{1000 * summary[key][name]:.2f}" for key in ("median_update_s", "fastest_update_s"))
        speeds.append((name, *(f"{s[key]:,.0f}" for key in keys), *milliseconds))
    ratios = [("ratio of tokens/s in a round", *keys, "fastest updates")]
    for name, s in summary["ratios"].items():
        ratios.append((name, *(f"{s[key]:.3f}" for key in (*keys, "of_fastest_updates"))))
    return table(speeds) + "\n\n" + table(ratios)


def measure_loops(options: Options, device: torch.device) -> None:
    """Measure and print."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        work = Workload(options, device, Path(folder))
        parameters = count_parameters(work.model())[0]
        print(
            f"GPT-2 with {parameters:,} parameters, fp32, {options.tokens_per_update:,} tokens an update, "
            f"{options.warmup} + {options.updates} updates, on {device.type}, "
            f"{options.threads or os.cpu_count()} threads",
            flush=True,
        )
        rounds = measure_rounds(work)
    summary, seconds = summarise(rounds), time.perf_counter() - began
    print(f"\n{tables(summary)}\n\n{duration(seconds)} in all")


def main() -> None:
    options = parse_options(Options, __doc__)
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # zerofit then leaves the number of threads to the user
    if torch.accelerator.device_count() > 1:
        raise SystemExit("the Trainer would split batches over the devices that are visible: CUDA_VISIBLE_DEVICES=0")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    measure_loops(options, device)
    print(provenance("fp32", "torch", "transformers", "accelerate"))


if __name__ == "__main__":
    main()
