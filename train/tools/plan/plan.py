r"""`zerofit plan`: what fits and how fast, predicted without a GPU, without data and without weights.

    zerofit plan --config recipes/clm/llama2-7b-continual.yaml --architecture llama-2-7b --num_gpus 8 --gpu h100-80gb
    zerofit plan --config recipes/clm/llama-long-context.yaml --gpu h100-80gb --num_gpus 8 --lengths auto
    zerofit plan --calibrate --num_gpus 2
    zerofit plan --config recipes/clm/compare-small.yaml --gpu cpu --gpu_memory 1GiB --num_gpus 2
    zerofit plan --task clm --config_name gpt2-xl --precision bf16 --gpu a100-40gb --num_gpus 4 --batch_sizes 1,8

One layer, the embedding, the head and the loss of the model that would be trained are traced with fake tensors; the
states follow from the strategy pair as a run would resolve it. docs/plan.md says how well that agrees with runs.
"""

import json
import sys
from functools import partial
from pathlib import Path

from train.recipe.errors import UserError
from train.recipe.help import wants_help
from train.recipe.parse import parse_recipe
from train.record.terminal import say, screen_width, size
from train.strategy.gpus import num_devices
from train.strategy.pairs import CONFIGS, ROOT, find_strategies
from train.tools.lengths import possible_lengths
from train.tools.plan.calibrate import calibrate
from train.tools.plan.constants import CPU_PROGRAM_BYTES, CUDA_CONTEXT_BYTES
from train.tools.plan.device_speeds import device_speeds
from train.tools.plan.gpus import CPU, Gpu, find_gpu
from train.tools.plan.lengths import LengthPlanner
from train.tools.plan.options import DevicesOptions, PlanOptions
from train.tools.plan.parallel import find_all
from train.tools.plan.planner import Planner
from train.tools.plan.prediction import Budget, Outcome
from train.tools.plan.report import describe_model, for_terminal, shown, to_json
from train.tools.plan.resolve import Resolved
from train.tools.plan.subject import read_subject
from train.tools.plan.timing import Timing
from train.tools.plan.write import write_pairs
from train.tools.tool_recipe import parse_bytes, read_with_recipe


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if only_calibrates(argv):
        _calibrate(parse_recipe(DevicesOptions, argv, prog="zerofit plan --calibrate", tool=True))
        return 0
    options, recipe = read_with_recipe(PlanOptions, argv, prog="zerofit plan")
    gpu = None if options.gpu in (None, CPU) else find_gpu(options.gpu)
    on_gpu = options.gpu != CPU
    budget = make_budget(options, gpu, on_gpu)
    names = list(find_strategies(_all_pairs() if options.names == ["all"] else options.names))
    if options.calibrate:
        _calibrate(options)
    subject = read_subject(options, options.task, on_gpu)
    speeds, links, known = device_speeds(options, gpu, on_gpu)
    planner = Planner(options, subject, budget, Timing(subject, budget, speeds, links, options.mean_length))
    outcomes = [
        one for name in names for one in planner.layouts(name, lambda resolved: _objection(resolved, gpu, on_gpu))
    ]
    lengths = possible_lengths(options.lengths, subject.config) if options.lengths else None
    find = (
        LengthPlanner(planner, lengths).find
        if lengths
        else partial(planner.find, sizes=options.sizes, max_batch_size=options.max_batch_size)
    )
    find_all(subject, outcomes, find)
    if all(outcome.refused for outcome in outcomes):
        raise UserError(_reasons(outcomes))
    scripts = (
        write_pairs(shown(outcomes, lengths)[: options.top], Path(options.write), options, recipe)
        if options.write
        else []
    )
    found = json.dumps(to_json(outcomes, planner, lengths), indent=2)
    if options.json == "-":
        print(found)
        return 0
    if options.json:
        Path(options.json).write_text(found + "\n", encoding="utf-8")
    machine = f"{budget.num_gpus} x {options.gpu or 'GPU'}, {size(budget.device)} each"
    report = for_terminal(outcomes, planner, options.top, screen_width(), options.tokens, lengths)
    say(f"model     {describe_model(planner, lengths)}", f"machine   {machine}", f"speed     {known}", "", report)
    say(*(f"written   {script}" for script in scripts))
    return 0


def make_budget(options, gpu: Gpu | None, on_gpu: bool) -> Budget:
    """What there is, from the options.

    Raises:
        UserError: a process takes more before there is a model; a CPU's memory is not known.
    """
    host = options.host_memory and parse_bytes(options.host_memory)
    stated = options.device_memory
    if stated:
        device = parse_bytes(stated[0])
    elif gpu is not None:
        device = gpu.usable_bytes
    elif host:
        device = host // min(options.num_gpus, options.gpus_per_node)
    else:
        raise UserError(
            "gpu = cpu: its memory is not known. Set --gpu_memory (of one process), e.g. --gpu_memory 4GiB"
        )
    taken, by = (CUDA_CONTEXT_BYTES, "the CUDA context") if on_gpu else (CPU_PROGRAM_BYTES, "buffers of its libraries")
    if device <= taken:
        raise UserError(
            f"{stated[1] if stated else f'host_memory = {options.host_memory}'}: a process takes about {size(taken)} "
            f"before there is a model ({by}). Set --gpu_memory to what one {'GPU' if on_gpu else 'process'} has, e.g. "
            f"--gpu_memory {'24GiB' if on_gpu else '2GiB'}"
        )
    return Budget(device, host, options.num_gpus, options.gpus_per_node)


def only_calibrates(argv: list[str]) -> bool:
    """Whether nothing is to be planned: neither a recipe nor a task is named."""
    given = {word.partition("=")[0] for word in argv}
    return "--calibrate" in given and not given & {"--config", "--task"} and not wants_help(argv)


def _calibrate(options: DevicesOptions) -> None:
    local = min(options.num_gpus, getattr(options, "gpus_per_node", options.num_gpus))
    calibrate(local if options.source("num_gpus") else num_devices() or 2)


def _reasons(outcomes: list[Outcome]) -> list[str]:
    """Why nothing is possible: each reason once, with the strategies that have it."""
    reasons: dict[str, list[str]] = {}
    for outcome in outcomes:
        reasons.setdefault(outcome.refused, []).append(outcome.label)
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


def _all_pairs() -> list[str]:
    folder = CONFIGS if CONFIGS.is_dir() else ROOT / CONFIGS
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _objection(resolved: Resolved, gpu: Gpu | None, on_gpu: bool) -> str:
    """Why a strategy cannot run on this device; empty if it can."""
    if resolved.precision == "bf16" and gpu is not None and not gpu.has_bf16:
        return f"precision = bf16: a {gpu.name} has none. Use --precision fp16"
    if resolved.precision == "fp16" and not on_gpu:
        return "precision = fp16 needs a GPU. Use --precision bf16 or fp32"
    return ""
