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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from zerofit.tools.plan.size_search import search

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 120
# Of a trial on a CPU: its data and process group. Source: before its model it has 476 MiB, and 545 under DeepSpeed;
# with the libraries alone a process has 454 and 521.
BEFORE_MODEL_BYTES = 24 * 2**20


@dataclass(frozen=True)
class Guess:
    """A prediction for a strategy.

    Attributes:
        size: the largest batch that fits; 0: none does.
        peak: there (at the smallest batch, where none fits), in bytes as the limit counts it.
        per_sample: bytes by which the peak grows with each sample.
        curve: [size, peak] of each size that the search for the largest predicted, ascending.
    """

    size: int
    peak: int
    per_sample: float
    curve: list[list[int]] = field(default_factory=list)

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


@dataclass(frozen=True)
class PredictedSize:
    """The predicted peak of a size, as the limit counts it."""

    size: int
    device_bytes: int
    fits: bool


def guess_of(tried: list[PredictedSize]) -> Guess:
    """From what a search has predicted, by size."""
    size = max((found.size for found in tried if found.fits), default=0)
    first, *others = sorted(tried, key=lambda found: abs(found.size - size))[:2]
    slope = (others[0].device_bytes - first.device_bytes) / (others[0].size - first.size) if others else 0.0
    return Guess(size, first.device_bytes, slope, [[found.size, found.device_bytes] for found in tried])


def _predictions(request: dict[str, Any]) -> dict[str, Guess]:
    guesses, programs = {}, _programs(request) if request["kind"] == "cpu" else {}
    for name, (config, flags) in request["candidates"].items():
        with contextlib.suppress(Exception):
            predict = _predictor(request, config, flags, programs)
            guesses[name] = guess_of(search(request["sizes"], predict, request["limit"]))
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


def _predictor(
    request: dict[str, Any], config: str, flags: list[str], programs: dict[bool, int]
) -> Callable[[int], PredictedSize]:
    """Peaks by size, as the limit counts them: on a CPU with the program, else what is allocated or reserved."""
    from zerofit.estimate.peak import CUBLAS_WORKSPACE_BYTES
    from zerofit.estimate.read_model import read_planned_model
    from zerofit.tools.plan.layouts import resolve
    from zerofit.tools.plan.plan_options import PlanOptions
    from zerofit.tools.plan.planner import LengthPlanner, Planner
    from zerofit.tools.plan.prediction import Budget
    from zerofit.tools.tool_recipe import read_with_recipe

    kind, ranks = request["kind"], request["num_processes"]
    recipe = ["--task", request["task"], "--config", request["recipe"], *flags]
    options, _ = read_with_recipe(PlanOptions, [*recipe, "--strategies", config, "--gpu_memory", "1GiB"], "guess")
    model = replace(
        read_planned_model(options, request["task"], kind != "cpu"), cpu_kernels=not request["has_gpu_kernels"]
    )
    planner = Planner(options, model, Budget(request["limit"], None, ranks, ranks))
    resolved = resolve(config, options, model, ranks, ranks)

    lengths = LengthPlanner(planner, request["sizes"])

    def predict(size: int) -> PredictedSize:
        peak = (lengths if request["by_length"] else planner).predict(resolved, size).peak
        if kind == "cpu":
            counted = peak.allocated + programs[resolved.zero is not None]
        else:
            context = peak.device - peak.reserved
            counted = peak.needed - context if kind == "cuda" else peak.allocated - CUBLAS_WORKSPACE_BYTES
        return PredictedSize(size, counted, counted <= request["limit"])

    return predict


if __name__ == "__main__":
    print(json.dumps({name: asdict(found) for name, found in _predictions(json.loads(sys.argv[1])).items()}))
