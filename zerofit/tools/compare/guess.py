"""What `zerofit plan` predicts for a comparison: the size that a strategy's first launch begins with.

It runs as another process (`python -m zerofit.tools.compare.guess REQUEST`, JSON), since it imports torch and
transformers. A comparison needs no prediction: what cannot be predicted is left out, whatever the reason.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 120
# Of a trial on a CPU: its data and process group. Source: before its model it has 476 MiB, and 545 under DeepSpeed;
# with the libraries alone a process has 454 and 521.
BEFORE_MODEL_BYTES = 24 * 2**20
MOST_PREDICTIONS = 8


@dataclass(frozen=True)
class Guess:
    """A prediction for a strategy.

    Attributes:
        size: the largest batch that fits; 0: none does.
        peak: there (at the smallest batch, where none fits), in bytes as the limit counts it.
        per_sample: bytes by which the peak grows with each sample.
        curve: (size, peak) of the sizes that were predicted, ascending.
    """

    size: int
    peak: int
    per_sample: float
    curve: list[tuple[int, int]]

    def peak_at(self, size: int) -> int:
        return round(self.peak + (size - max(self.size, 1)) * self.per_sample)


def guess(request: dict[str, Any]) -> dict[str, Guess]:
    """{name of a candidate: its prediction}; empty where there is none.

    Args:
        request: task, recipe (file), num_processes, kind of the device, has_gpu_kernels, limit (bytes of a process),
            sizes, by_length (they are lengths of rows), and candidates {name: [YAML, flags]}.
    """
    with contextlib.suppress(Exception):  # it is only a first guess
        command = [sys.executable, "-m", "zerofit.tools.compare.guess", json.dumps(request)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
        return {name: Guess(**values) for name, values in json.loads(done.stdout.splitlines()[-1]).items()}
    return {}


def largest(peak_at: Callable[[int], int], sizes: list[int], limit: int) -> Guess:
    """The largest size whose peak is within the limit, from a few peaks: they grow almost in proportion."""
    known = {size: peak_at(size) for size in dict.fromkeys((sizes[0], sizes[min(3, len(sizes) - 1)]))}
    place = 0
    while len(known) < MOST_PREDICTIONS:
        beyond = [size for size in known if known[size] > limit]
        within = max(set(known) - set(beyond), default=min(known))
        low, high = (within, min(beyond)) if beyond else sorted(known)[-2:] if len(known) > 1 else (within, within)
        slope = (known[high] - known[low]) / (high - low) if high != low else 0
        # Where the optimizer's step needs most, small batches all need the same.
        reached = low + (limit - known[low]) / slope if slope > 0 else 4 * max(known)
        place = max(0, sum(size <= reached for size in sizes) - 1)
        if sizes[place] in known:
            break
        known[sizes[place]] = peak_at(sizes[place])
    fitting = [size for size in known if known[size] <= limit]
    size = max(fitting, default=0)
    near = sorted(known, key=lambda other: abs(other - size))[:2]
    slope = (known[near[1]] - known[near[0]]) / (near[1] - near[0]) if len(near) > 1 else 0.0
    return Guess(size, known[size or sizes[0]], slope, sorted(known.items()))


def _predictions(request: dict[str, Any]) -> dict[str, Guess]:
    guesses, programs = {}, _programs(request) if request["kind"] == "cpu" else {}
    for name, (config, flags) in request["candidates"].items():
        with contextlib.suppress(Exception):
            guesses[name] = largest(_peaks_of(request, config, flags, programs), request["sizes"], request["limit"])
    return guesses


def _programs(request: dict[str, Any]) -> dict[bool, int]:
    """{with DeepSpeed: bytes of a trial on a CPU before its model}: of this process, once it has what a trial has."""
    from zerofit.strategy.host_memory import resident_bytes
    from zerofit.tools.compare.trial import import_libraries

    programs = {}
    for deepspeed in (False, True):
        import_libraries(request["task"], False, deepspeed)
        programs[deepspeed] = resident_bytes() + BEFORE_MODEL_BYTES
    return programs


def _peaks_of(
    request: dict[str, Any], config: str, flags: list[str], programs: dict[bool, int]
) -> Callable[[int], int]:
    """Peaks by size, as the limit counts them: on a CPU with the program, else what is allocated or reserved."""
    from dataclasses import replace

    from zerofit.estimate.memory_constants import CUBLAS_WORKSPACE_BYTES
    from zerofit.estimate.planned_model import read_planned_model
    from zerofit.tools.plan.length_planner import LengthPlanner
    from zerofit.tools.plan.plan_options import PlanOptions
    from zerofit.tools.plan.planner import Planner
    from zerofit.tools.plan.prediction import Budget
    from zerofit.tools.plan.resolve import resolve
    from zerofit.tools.tool_recipe import read_with_recipe

    kind, ranks = request["kind"], request["num_processes"]
    recipe = ["--task", request["task"], "--config", request["recipe"], *flags]
    options, _ = read_with_recipe(PlanOptions, [*recipe, "--strategies", config, "--gpu_memory", "1GiB"], "guess")
    subject = replace(
        read_planned_model(options, request["task"], kind != "cpu"), cpu_kernels=not request["has_gpu_kernels"]
    )
    planner = Planner(options, subject, Budget(request["limit"], None, ranks, ranks))
    resolved = resolve(config, options, subject, ranks, ranks)

    lengths = LengthPlanner(planner, request["sizes"])

    def peak_at(size: int) -> int:
        found = lengths.predict(resolved, size) if request["by_length"] else planner.predict(resolved, size)
        peak = found.peak
        if kind == "cpu":
            return peak.allocated + programs[resolved.zero is not None]
        return peak.reserved if kind == "cuda" else peak.allocated - CUBLAS_WORKSPACE_BYTES

    return peak_at


if __name__ == "__main__":
    print(json.dumps({name: asdict(one) for name, one in _predictions(json.loads(sys.argv[1])).items()}))
