r"""`zerofit plan`: what fits and how fast, predicted without a GPU, without data and without weights.

    zerofit plan --config recipes/clm/llama2-7b-continual.yaml --architecture llama-2-7b --num_gpus 8 --gpu h100-80gb
    zerofit plan --config recipes/clm/llama-long-context.yaml --gpu h100-80gb --num_gpus 8 --lengths auto
    zerofit plan --config recipes/clm/compare-small.yaml --gpu cpu --gpu_memory 1GiB --num_gpus 2
    zerofit plan --task clm --config_name gpt2-xl --precision bf16 --gpu a100-40gb --num_gpus 4 --batch_sizes 1,8

One layer, the embedding, the head and the loss of the model that would be trained are traced with fake tensors; the
states follow from the strategy pair as a run would resolve it. docs/measurements/plan.md says how well that
agrees with runs.
"""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import yaml

from zerofit.estimate.peak import CPU_PROGRAM_BYTES, CUDA_CONTEXT_BYTES
from zerofit.estimate.planned_model import PlannedModel, read_planned_model
from zerofit.estimate.timing import SPEED_OVERRIDES, STAND_IN_GPU, Timing, device_speeds
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import configs, parse_bytes
from zerofit.recipe.tasks import TaskRecipe
from zerofit.record.terminal import doing, log_lines, rounded, screen_width, size, table, wrapped
from zerofit.strategy.devices import bf16_slowdown
from zerofit.strategy.gpu_table import CPU
from zerofit.strategy.launch import find_strategies
from zerofit.tools.plan.joint_search import Remedies, find_best, words_of
from zerofit.tools.plan.plan_options import Degrees, PlanOptions, read_pair
from zerofit.tools.plan.plan_report import SET_HERE, PlanReport, make_folder, refusals, write_pairs
from zerofit.tools.plan.planner import Budget, LayoutOutcome, Planner, find_all
from zerofit.tools.tool_recipe import read_with_recipe

SINGLE = "single"  # the pair of one process
SEARCHED = "outputs/plan"


def main(argv: list[str]) -> int:
    options, recipe = read_with_recipe(PlanOptions, argv, prog="zerofit plan")
    folder = make_folder(Path(options.write)) if options.write else None
    budget = make_budget(options)
    names = options.names
    if names == ["all"]:  # that mean something on this number of processes
        names = sorted(path.stem for path in configs().glob("*.yaml") if path.stem != SINGLE)
        if budget.num_gpus == 1:  # nothing is shared; the others may still differ in precision or offload
            names = [SINGLE, *(name for name in names if read_pair(name).degrees == Degrees())]
    strategies = find_strategies(names)
    model = read_planned_model(options, options.task, options.gpu != CPU)
    planner = Planner(options, model, budget)
    outcomes = [one for name in strategies for one in planner.layouts(name)]
    in_half = {one.resolved.precision != "fp32" for one in outcomes if not one.refused}
    planner.timing, known = make_timing(options, model, budget, in_half)
    if options.search:
        return _search(planner, outcomes, known, recipe, folder or make_folder(Path(SEARCHED)))
    report = PlanReport(outcomes, planner)
    with doing() as say_now:
        find_all(model, outcomes, planner.find, say_now, "tracing")
        if all(outcome.refused for outcome in outcomes):
            raise UserError(refusals(outcomes))
        find_all(model, [one for one, _ in report.misfits], Remedies(planner).add, say_now, "remedies")
    scripts = []
    if folder:
        scripts = write_pairs(report.rows[: options.top], folder, options, recipe, keeping=report.keeping)
    if _writes_json(report.to_json(), options.json):
        return 0
    said = {
        "model": report.describe_model(),
        "machine": f"{budget.num_gpus} x {options.gpu or 'GPU'}, {size(budget.device)} each",
        "speed": known,
    }
    if not model.on_gpu and True in in_half and (times := bf16_slowdown()):
        said["note"] = f"bf16 products take {times:.0f} times as long as fp32 on this CPU. Faster: --precision fp32"
    width = screen_width()
    log_lines(*(wrapped(f"{name:<10}{text}", width, 10) for name, text in said.items()), "")
    log_lines(report.for_terminal(options.top, width, options.tokens))
    log_lines(*(f"written   {script}" for script in scripts))
    return 0


def _writes_json(content: object, file: str | None) -> bool:
    """Write predictions to --json FILE; return whether that is the standard output, which has nothing else then."""
    if file and file != "-":
        Path(file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    elif file:
        print(json.dumps(content, indent=2))
    return file == "-"


def _search(
    planner: Planner, outcomes: list[LayoutOutcome], known: str, recipe: type[TaskRecipe], folder: Path
) -> int:
    """Print the fastest combinations, and write the first one."""
    options = planner.recipe
    found = find_best(planner, list(dict.fromkeys(one.strategy for one in outcomes)), options.top)
    if not found:
        raise UserError("search: nothing fits. Set a larger --num_gpus or another --gpu, or say --lora")
    (best, prediction), *_ = found
    best_options = best.planner.recipe
    # Each option of the task that was set stands in recipe.yaml, in place of a recipe's file and flags.
    names = [field.name for field in dataclasses.fields(recipe) if best_options.source(field.name)]
    content = {name: getattr(best_options, name) for name in names if name not in ("config", *SET_HERE)}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    (script,) = write_pairs([prediction], folder, best_options, recipe, recipe_file=file)
    if _writes_json([{**one.to_dict(), "options": combination.options} for combination, one in found], options.json):
        return 0
    report = PlanReport([], planner)
    log_lines(f"model     {report.describe_model()}", f"speed     {known}", "", "the fastest that fit, predicted:", "")
    head = ("strategy", "batch", "memory", "s/update", "tokens/s", "with")
    rows = [
        (
            one.label,
            f"{one.micro_batch} x {one.accumulation}",
            size(one.peak.needed),
            rounded(one.speed.time.seconds) if one.speed else "-",
            rounded(one.tokens_per_s),
            " ".join(words_of(combination.options)) or "-",
        )
        for combination, one in found
    ]
    log_lines(table([head, *rows], screen_width()), "", *report.trust(prediction), f"written   {script}")
    return 0


def make_budget(options: PlanOptions) -> Budget:
    """Return the memory and the devices that the options name. Raises UserError: a process takes more before there is
    a model; a CPU's memory is not known."""
    host = parse_bytes(options.host_memory) if options.host_memory else None
    gpu = options.known_gpu
    on_gpu = options.gpu != CPU
    stated = options.device_memory
    if stated:
        device = parse_bytes(stated[0])
    elif gpu is not None:
        device = int(gpu.usable_bytes)
    elif host:
        device = host // min(options.num_gpus, options.gpus_per_node)
    else:
        raise UserError("gpu = cpu: set the memory of one process, e.g. --gpu_memory 4GiB")
    taken, by = (CUDA_CONTEXT_BYTES, "the CUDA context") if on_gpu else (CPU_PROGRAM_BYTES, "buffers of its libraries")
    if device <= taken:
        raise UserError(
            f"{stated[1] if stated else f'host_memory = {options.host_memory}'}: a process takes about {size(taken)} "
            f"without a model ({by}). Set --gpu_memory, e.g. to {'24GiB' if on_gpu else '2GiB'}"
        )
    return Budget(device, host, options.num_gpus, options.gpus_per_node)


def make_timing(options: PlanOptions, model: PlannedModel, budget: Budget, in_half: set[bool]) -> tuple[Timing, str]:
    """Return (the time of updates, what it rests on). `in_half`: whether strategies compute in half precision."""
    speeds, links, known = device_speeds(options, options.known_gpu, model.on_gpu)
    if speeds is not None and not all(map(speeds.computes, in_half)):
        speeds = None
        known = f"not known of {options.gpu} in fp32"
    is_known = speeds is not None
    if speeds is None:
        plain = SimpleNamespace(**vars(options) | dict.fromkeys(SPEED_OVERRIDES))
        speeds, links, _ = device_speeds(plain, STAND_IN_GPU, on_gpu=True)
        assert speeds is not None  # its maker states them
        known = f"{known} (ranked as on {STAND_IN_GPU.name})"
    return Timing(model, budget.gpus_per_node, speeds, links, options.mean_length, is_known=is_known), known
