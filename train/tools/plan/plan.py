r"""`zerofit plan`: what fits, predicted without a GPU, without data and without weights.

    zerofit plan --config recipes/clm/llama2-7b-continual.yaml --architecture llama-2-7b --num_gpus 8 --gpu h100-80gb
    zerofit plan --config recipes/clm/compare-small.yaml --gpu cpu --gpu_memory 1GiB --num_gpus 2
    zerofit plan --task clm --config_name gpt2-xl --precision bf16 --gpu a100-40gb --num_gpus 4 --batch_sizes 1,8

One layer, the embedding, the head and the loss of the model that would be trained are traced with fake tensors; the
states follow from the strategy pair as a run would resolve it. docs/plan.md says how well that agrees with runs.
"""

import json
import sys
from pathlib import Path

from train.recipe.errors import UserError
from train.record.terminal import say, screen_width, size
from train.strategy.pairs import CONFIGS, ROOT, find_strategies
from train.tools.plan.constants import CUDA_CONTEXT_BYTES
from train.tools.plan.gpus import CPU, Gpu, find_gpu
from train.tools.plan.options import PlanOptions
from train.tools.plan.planner import Budget, Planner
from train.tools.plan.report import describe_model, for_terminal, to_json
from train.tools.plan.resolve import Resolved
from train.tools.plan.subject import read_subject
from train.tools.tool_recipe import parse_bytes, read_with_recipe


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    options, _ = read_with_recipe(PlanOptions, argv, prog="zerofit plan")
    gpu = None if options.gpu in (None, CPU) else find_gpu(options.gpu)
    on_gpu = options.gpu != CPU
    budget = make_budget(options, gpu, on_gpu)
    names = list(find_strategies(_all_pairs() if options.names == ["all"] else options.names))
    subject = read_subject(options, options.task, on_gpu)
    planner = Planner(options, subject, budget)
    outcomes = [
        planner.plan(name, options.sizes, options.max_batch_size, lambda resolved: _objection(resolved, gpu, on_gpu))
        for name in names
    ]
    if all(outcome.refused for outcome in outcomes):
        raise UserError(f"{outcome.strategy}: {outcome.refused}" for outcome in outcomes)
    found = json.dumps(to_json(outcomes, planner), indent=2)
    if options.json == "-":
        print(found)
        return 0
    if options.json:
        Path(options.json).write_text(found + "\n", encoding="utf-8")
    machine = f"{budget.num_gpus} x {options.gpu or 'GPU'}, {size(budget.device)} each"
    report = for_terminal(outcomes, planner, options.top, screen_width())
    say(f"model     {describe_model(planner)}", f"machine   {machine}", "", report)
    return 0


def make_budget(options, gpu: Gpu | None, on_gpu: bool) -> Budget:
    """What there is, from the options.

    Raises:
        UserError: a process takes more before there is a model; a CPU's memory is not known.
    """
    host = options.host_memory and parse_bytes(options.host_memory)
    if options.gpu_memory:
        device = parse_bytes(options.gpu_memory)
    elif gpu is not None:
        device = gpu.usable_bytes
    elif host:
        device = host // min(options.num_gpus, options.gpus_per_node)
    else:
        raise UserError(
            "gpu = cpu: its memory is not known. Set --gpu_memory (of one process), e.g. --gpu_memory 4GiB"
        )
    if on_gpu and device <= CUDA_CONTEXT_BYTES:
        raise UserError(
            f"gpu_memory = {options.gpu_memory}: a process takes about {size(CUDA_CONTEXT_BYTES)} before there is a "
            "model (the CUDA context). Set --gpu_memory to what one GPU has, e.g. --gpu_memory 24GiB"
        )
    return Budget(device, host, options.num_gpus, options.gpus_per_node)


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
