r"""`zerofit plan`: what fits and how fast, predicted without a GPU, without data and without weights.

    zerofit plan --config recipes/clm/llama2-7b-continual.yaml --architecture llama-2-7b --num_gpus 8 --gpu h100-80gb
    zerofit plan --config recipes/clm/llama-long-context.yaml --gpu h100-80gb --num_gpus 8 --lengths auto
    zerofit plan --config recipes/clm/compare-small.yaml --gpu cpu --gpu_memory 1GiB --num_gpus 2
    zerofit plan --task clm --config_name gpt2-xl --precision bf16 --gpu a100-40gb --num_gpus 4 --batch_sizes 1,8

Two layers, the embedding, the head and the loss of the model are traced with fake tensors; the model states follow
from the strategy pair, which is resolved as in a run. docs/measurements/plan.md compares predictions with runs.
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
from zerofit.tools.plan.joint_search import RemedySearch, find_best, option_words
from zerofit.tools.plan.plan_options import Degrees, PlanOptions, read_pair
from zerofit.tools.plan.plan_report import BATCH_OPTIONS, PlanReport, list_refusals, make_folder, write_pairs
from zerofit.tools.plan.planner import LayoutOutcome, MemoryBudget, Planner, predict_layouts
from zerofit.tools.tool_recipe import read_with_recipe

SINGLE_STRATEGY = "single"  # the pair of one process
SEARCH_FOLDER = "outputs/plan"


def main(argv: list[str]) -> int:
    options, recipe = read_with_recipe(PlanOptions, argv, prog="zerofit plan")
    folder = make_folder(Path(options.write)) if options.write else None
    budget = make_budget(options)
    names = options.names
    if names == ["all"]:  # all that have an effect on this number of processes
        names = sorted(path.stem for path in configs().glob("*.yaml") if path.stem != SINGLE_STRATEGY)
        if budget.num_gpus == 1:  # nothing is shared; the others may still differ in precision or offload
            names = [SINGLE_STRATEGY, *(name for name in names if read_pair(name).degrees == Degrees())]
    strategies = find_strategies(names)
    model = read_planned_model(options, options.task, options.gpu != CPU)
    planner = Planner(options, model, budget)
    outcomes = [outcome for name in strategies for outcome in planner.layouts(name)]
    precisions = {outcome.resolved.precision != "fp32" for outcome in outcomes if not outcome.refused}
    planner.timing, speed_source = make_timing(options, model, budget, precisions)
    if options.search:
        return _search(planner, outcomes, speed_source, recipe, folder or make_folder(Path(SEARCH_FOLDER)))
    report = PlanReport(outcomes, planner)
    with doing() as show:
        predict_layouts(model, outcomes, planner.find, show, "tracing")
        if all(outcome.refused for outcome in outcomes):
            raise UserError(list_refusals(outcomes))
        predict_layouts(model, [outcome for outcome, _ in report.misfits], RemedySearch(planner).add, show, "remedies")
    scripts = []
    if folder:
        scripts = write_pairs(report.rows[: options.top], folder, options, recipe, keeping=report.keeping)
    if _writes_json(report.to_json(), options.json):
        return 0
    header = {
        "model": report.describe_model(),
        "machine": f"{budget.num_gpus} x {options.gpu or 'GPU'}, {size(budget.device)} each",
        "speed": speed_source,
    }
    if not model.on_gpu and True in precisions and (times := bf16_slowdown()):
        header["note"] = f"bf16 products take {times:.0f} times as long as fp32 on this CPU. Faster: --precision fp32"
    width = screen_width()
    log_lines(*(wrapped(f"{name:<10}{text}", width, 10) for name, text in header.items()), "")
    log_lines(report.for_terminal(options.top, width, options.tokens))
    log_lines(*(f"written   {script}" for script in scripts))
    return 0


def _writes_json(content: object, file: str | None) -> bool:
    """Write predictions to --json FILE. Returns True if that is the standard output, which then has nothing else."""
    if file and file != "-":
        Path(file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    elif file:
        print(json.dumps(content, indent=2))
    return file == "-"


def _search(
    planner: Planner, outcomes: list[LayoutOutcome], speed_source: str, recipe: type[TaskRecipe], folder: Path
) -> int:
    """Print the fastest combinations, and write recipe, pair and script of the first one. Returns the exit code."""
    options = planner.recipe
    found = find_best(planner, list(dict.fromkeys(outcome.strategy for outcome in outcomes)), options.top)
    if not found:
        raise UserError("search: nothing fits. Set a larger --num_gpus or another --gpu, or say --lora")
    (best, prediction), *_ = found
    best_options = best.planner.recipe
    # recipe.yaml has each option of the task that was set, so the script needs no other recipe and no flags.
    names = [field.name for field in dataclasses.fields(recipe) if best_options.source(field.name)]
    content = {name: getattr(best_options, name) for name in names if name not in ("config", *BATCH_OPTIONS)}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    (script,) = write_pairs([prediction], folder, best_options, recipe, recipe_file=file)
    contents = [{**prediction.to_dict(), "options": combination.options} for combination, prediction in found]
    if _writes_json(contents, options.json):
        return 0
    report = PlanReport([], planner)
    log_lines(
        f"model     {report.describe_model()}", f"speed     {speed_source}", "", "the fastest that fit, predicted:", ""
    )
    head = ("strategy", "batch", "memory", "s/update", "tokens/s", "with")
    rows = [
        (
            entry.label,
            f"{entry.micro_batch} x {entry.accumulation}",
            size(entry.peak.needed),
            rounded(entry.speed.time.seconds) if entry.speed else "-",
            rounded(entry.tokens_per_s),
            " ".join(option_words(combination.options)) or "-",
        )
        for combination, entry in found
    ]
    log_lines(table([head, *rows], screen_width()), "", *report.trust(prediction), f"written   {script}")
    return 0


def make_budget(options: PlanOptions) -> MemoryBudget:
    """Return the memory and the number of devices in the options. Raises UserError: a process needs more even without
    a model; a CPU's memory is not set."""
    host = parse_bytes(options.host_memory) if options.host_memory else None
    gpu = options.known_gpu
    on_gpu = options.gpu != CPU
    given = options.device_memory
    if given:
        device = parse_bytes(given[0])
    elif gpu is not None:
        device = int(gpu.usable_bytes)
    elif host:
        device = host // min(options.num_gpus, options.gpus_per_node)
    else:
        raise UserError("gpu = cpu: set the memory of one process, e.g. --gpu_memory 4GiB")
    minimum, by = (
        (CUDA_CONTEXT_BYTES, "the CUDA context") if on_gpu else (CPU_PROGRAM_BYTES, "buffers of its libraries")
    )
    if device <= minimum:
        raise UserError(
            f"{given[1] if given else f'host_memory = {options.host_memory}'}: a process takes about {size(minimum)} "
            f"without a model ({by}). Set --gpu_memory, e.g. to {'24GiB' if on_gpu else '2GiB'}"
        )
    return MemoryBudget(device, host, options.num_gpus, options.gpus_per_node)


def make_timing(
    options: PlanOptions, model: PlannedModel, budget: MemoryBudget, in_half: set[bool]
) -> tuple[Timing, str]:
    """Return (the predictor of times, the source of its speeds). `in_half`: {True} if all strategies compute
    in half precision, {False} if none does, else both."""
    speeds, links, source = device_speeds(options, options.known_gpu, model.on_gpu)
    if speeds is not None and not all(map(speeds.computes, in_half)):
        speeds = None
        source = f"not known of {options.gpu} in fp32"
    is_known = speeds is not None
    if speeds is None:
        plain = SimpleNamespace(**vars(options) | dict.fromkeys(SPEED_OVERRIDES))
        speeds, links, _ = device_speeds(plain, STAND_IN_GPU, on_gpu=True)
        assert speeds is not None  # the table has its figures
        source = f"{source} (ranked as on {STAND_IN_GPU.name})"
    return Timing(model, budget.gpus_per_node, speeds, links, options.mean_length, is_known=is_known), source
